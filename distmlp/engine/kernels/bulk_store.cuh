// The matrices of the bulk kernel, and how results leave the registers of `wgmma` for them.
#pragma once
#include "bulk_ring.cuh"
#include "update.cuh"

#define MAX_BULK_LAYERS 16
#define COLUMN_BLOCKS (BULK_N / 64)

// Matrices of a layer, as plan_bulk.py lays them out.
struct Matrices {
    Blocked output, error, weight;
    float* sums;  // of the errors' columns, (row blocks, padded columns)
};
__shared__ Matrices near_matrices[MAX_BULK_LAYERS];

struct Places {  // of all layers' matrices
    u8 *inputs, *outputs, *errors, *weights;
    float* sums;
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
        i64 rows_at = 0, weight_at = 0, sums_at = 0;
        for (int l = 0; l < ENGINE.layers; ++l) {
            const Layer& layer = LAYER(l);
            Matrices& m = near_matrices[l];
            m.output = blocked(places.outputs + rows_at, places.rows, layer.fan_out);
            m.error = blocked(places.errors + rows_at, places.rows, layer.fan_out);
            m.weight = blocked(places.weights + weight_at, weight_rows(layer), layer.fan_out);
            m.sums = places.sums + sums_at;
            rows_at += padded_bytes(places.rows, layer.fan_out);
            weight_at += padded_bytes(weight_rows(layer), layer.fan_out);
            sums_at += (i64)(places.rows / TILE_M) * m.error.blocks * 64;
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
};

// A warp's way out to memory: 16 rows of a column block at a time through one of two places in shared memory.
struct Staging {
    u32 base, next;

    __device__ __forceinline__ explicit Staging(u32 shared)
        : base(shared + STAGING_AT + (threadIdx.x >> 5) * 2 * STAGING_BYTES), next(0) {}
    __device__ __forceinline__ u32 place() const { return base + next; }
    // Address for stmatrix and ldmatrix of groups 2 * pair and 2 * pair + 1.
    __device__ __forceinline__ u32 address(int pair) const {
        const int lane = threadIdx.x & 31, row = (lane & 7) + (lane >> 3 & 1) * 8, chunk = pair * 2 + (lane >> 4);
        return place() + row * 128 + ((chunk ^ row) & 7) * 16;
    }
    __device__ __forceinline__ void open() const {  // the place may be written again
        if ((threadIdx.x & 31) == 0) bulk_wait_read<1>();
        __syncwarp();
    }
    // packed[2 * j], packed[2 * j + 1]: group j of the two rows.
    __device__ __forceinline__ void write(const u32 (&packed)[16]) const {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            store_matrices(
                address(pair), packed[pair * 4], packed[pair * 4 + 1], packed[pair * 4 + 2], packed[pair * 4 + 3]);
    }
    __device__ __forceinline__ void send(u8* to) {
        fence_async_shared();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            bulk_store(to, place(), STAGING_BYTES);
            bulk_commit();
        }
        next ^= STAGING_BYTES;
    }
    __device__ __forceinline__ void put(const u32 (&packed)[16], u8* to) {
        open();
        write(packed);
        send(to);
    }
};

// Sums over the 16 rows of a warp: v[2 * j + e] column e of group j; this lane gets those of group lane / 4.
__device__ __forceinline__ float2 sum_rows(float (&v)[16]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 8; half >= 2; half /= 2) {
        const bool upper = lane & half * 2;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? v[i] : v[i + half];
            v[i] = (upper ? v[i + half] : v[i]) + __shfl_xor_sync(~0u, sent, half * 2);
        }
    }
    return make_float2(v[0], v[1]);
}

// Column sums of a tile from the warps' sums, in their order; the first `columns` go to `out`.
__device__ __forceinline__ void put_column_sums(
    const Staging& staging, const float2 (&sums)[COLUMN_BLOCKS], float* out, int columns) {
    const int lane = threadIdx.x & 31;
    staging.open();
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(staging.place() + (block * 64 + lane * 2) * 4),
                     "f"(sums[block].x), "f"(sums[block].y)
                     : "memory");
    sync_consumers();
    if (threadIdx.x < BULK_N && (int)threadIdx.x < columns) {
        const u32 first = staging.place() - (threadIdx.x >> 5) * 2 * STAGING_BYTES + threadIdx.x * 4;
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < CONSUMER_WARPS; ++warp) {
            float part;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(first + warp * 2 * STAGING_BYTES) : "memory");
            sum += part;
        }
        out[threadIdx.x] = sum;
    }
    sync_consumers();
}
