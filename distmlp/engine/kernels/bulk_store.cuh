// The matrices of the bulk kernel, and how results leave the registers of `wgmma` for them.
#pragma once
#define MAX_BULK_LAYERS 12
#define MAX_UPDATE_LAYERS MAX_BULK_LAYERS  // shared memory is scarce
#define RARELY __forceinline__
#include "bulk_ring.cuh"
#include "update.cuh"

#define COLUMN_BLOCKS (BULK_N / 64)
#define SIGN_WORDS COLUMN_BLOCKS  // a thread has so many times 32 outputs of a tile
#define TELLS_BY_SIGN (HIDDEN_ACTIVATION == RELU || HIDDEN_ACTIVATION == LEAKY_RELU)

// Matrices of a layer, as plan_bulk.py lays them out.
struct Matrices {
    Blocked output, error, weight;
    float* sums;  // of the errors' columns, (warps' rows, padded columns)
    u32* signs;   // of the outputs, where slopes are told from them: see `Signs`
};
__shared__ Matrices near_matrices[MAX_BULK_LAYERS];

struct Places {  // of all layers' matrices
    u8 *inputs, *outputs, *errors, *weights;
    float* sums;
    u32* signs;
    int rows;  // that they have, a multiple of TILE_M
};
__device__ __forceinline__ i64 padded_bytes(int rows, int columns) { return (i64)rows * ((columns + 63) / 64 * 128); }
__device__ __forceinline__ Blocked blocked(u8* base, int rows, int columns) {
    return {base, (i64)rows * 128, (columns + 63) / 64};
}
__device__ __forceinline__ int weight_rows(const Layer& layer) { return (layer.fan_in + WIDEST - 1) / WIDEST * WIDEST; }
__device__ __forceinline__ Blocked inputs_of(const Places& places, int parity) {
    const int features = LAYER(0).fan_in;
    return blocked(places.inputs + parity * padded_bytes(places.rows, features), places.rows, features);
}
__device__ __forceinline__ void place_matrices(const Places& places) {
    if (threadIdx.x == 0) {
        i64 rows_at = 0, weight_at = 0, sums_at = 0, signs_at = 0;
        for (int l = 0; l < ENGINE.layers; ++l) {
            const Layer& layer = LAYER(l);
            Matrices& m = near_matrices[l];
            m.output = blocked(places.outputs + rows_at, places.rows, layer.fan_out);
            m.error = blocked(places.errors + rows_at, places.rows, layer.fan_out);
            m.weight = blocked(places.weights + weight_at, weight_rows(layer), layer.fan_out);
            m.sums = places.sums + sums_at;
            rows_at += padded_bytes(places.rows, layer.fan_out);
            weight_at += padded_bytes(weight_rows(layer), layer.fan_out);
            m.signs = places.signs + signs_at;
            sums_at += (i64)(places.rows / 16) * m.error.blocks * 64;
            signs_at += (i64)(places.rows / TILE_M) * ((layer.fan_out + BULK_N - 1) / BULK_N) * SIGN_WORDS * CONSUMERS;
        }
    }
    __syncthreads();
}

// What a thread of a warpgroup has of a tile: of every eight columns two, in two rows eight apart.
struct Fragment {
    int warp, lane;
    int row;         // of the batch, the first of the two
    bool inside[2];  // the rows exist

    __device__ __forceinline__ Fragment(int m0, int rows)
        : warp(threadIdx.x >> 5), lane(threadIdx.x & 31), row(m0 + warp * 16 + (lane >> 2)),
          inside{row < rows, row + 8 < rows} {}
    __device__ __forceinline__ int column(int j) const { return j * 8 + (lane & 3) * 2; }  // of group j
    __device__ __forceinline__ u32 mask(int half) const { return inside[half] ? ~0u : 0u; }
};

// A warp's way out to memory: 16 rows of a column block, as they will lie there, through one of two places in shared
// memory. Plain stores and not bulk ones, whose fence would wait for everything that the warp has under way.
struct Staging {
    u32 own, anchor;  // this lane's 16 bytes of what is copied, its row for stmatrix and ldmatrix
    u32 next;

    __device__ __forceinline__ explicit Staging(u32 shared) : next(0) {
        const int lane = threadIdx.x & 31, row = (lane & 7) + (lane >> 3 & 1) * 8;
        const u32 base = shared + STAGING_AT + (threadIdx.x >> 5) * 2 * STAGING_BYTES;
        own = base + lane * 16;
        anchor = base + row * 128 + ((lane >> 4 ^ row) & 7) * 16;
    }
    // Address for stmatrix and ldmatrix of groups 2 * pair and 2 * pair + 1: their chunks lie by the bits of the row.
    __device__ __forceinline__ u32 address(int pair) const { return (anchor ^ pair * 32) + next; }
    // packed[2 * j], packed[2 * j + 1]: group j of the two rows.
    __device__ __forceinline__ void write(const u32 (&packed)[16]) const {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            store_matrices(
                address(pair), packed[pair * 4], packed[pair * 4 + 1], packed[pair * 4 + 2], packed[pair * 4 + 3]);
        __syncwarp();
    }
    __device__ __forceinline__ void send(u8* to) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                         : "r"(own + next + i * 512)
                         : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("st.global.cg.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (threadIdx.x & 31) * 16 + i * 512),
                         "r"(v[i].x), "r"(v[i].y), "r"(v[i].z), "r"(v[i].w)
                         : "memory");
        next ^= STAGING_BYTES;  // read again only after the other place was written, with a barrier of the warp behind
    }
    __device__ __forceinline__ void put(const u32 (&packed)[16], u8* to) {
        write(packed);
        send(to);
    }
};

// The largest magnitude of bfloat16 pairs, NaN above all: as integers they have the same order.
struct Largest {
    u32 pair = 0;

    __device__ __forceinline__ void see(u32 packed) {
        asm("max.u16x2 %0, %0, %1;" : "+r"(pair) : "r"(packed & 0x7fff7fffu));
    }
    __device__ __forceinline__ void tell(u32* where) const { warp_largest(where, max(pair << 16, pair & 0xffff0000u)); }
};

// Two outputs of ReLU.
__device__ __forceinline__ u32 pack_relu(float low, float high) {
    u32 pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Bits that say which outputs of a block are positive, a pair at a time: pair i of 16 ends at bits i and 16 + i.
__device__ __forceinline__ u32 add_signs(u32 signs, u32 packed) {
    u32 positive;  // in the highest bits of the two
    if (HIDDEN_ACTIVATION == RELU) positive = packed + 0x7fff7fffu;  // none is negative
    else asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(positive) : "r"(0u), "r"(packed));
    return signs >> 1 | (positive & 0x80008000u);
}
// All ones where the output of pair i was positive.
__device__ __forceinline__ u32 mask_of_signs(u32 signs, int i) {
    u32 mask;
    asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(mask) : "r"(signs << (15 - i)));  // every byte the sign of the upper one
    return mask;
}

// Sums over the 16 rows of a warp of the columns that lie in `staging`: this lane gets columns 2 * lane and 2 * lane + 1.
// Products with a matrix that is one in row g alone and else zero add up group g there.
__device__ __forceinline__ float2 sum_rows(const Staging& staging) {
    const int own = (threadIdx.x & 31) >> 2;
    float sums[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        u32 b[4];
        load_matrices_transposed(staging.address(pair), b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 one = own == pair * 2 + half ? 0x3f803f80u : 0u;
            const u32 a[4] = {one, 0u, one, 0u};
            mma_bf16(sums[half], a, b[half * 2], b[half * 2 + 1]);
        }
    }
    return make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
}

// A block of errors, and the sums of its columns over the warp's rows.
__device__ __forceinline__ void put_errors(Staging& staging, const u32 (&packed)[16], u8* to, float* sums) {
    staging.write(packed);
    const float2 own = sum_rows(staging);
    *(float2*)(sums + (threadIdx.x & 31) * 2) = own;
    staging.send(to);
}
