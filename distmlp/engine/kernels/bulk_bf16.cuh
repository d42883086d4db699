// How results leave the registers of `wgmma`, in bfloat16.
#pragma once

typedef u32 Pair;  // two neighbours of a row

// A warpgroup's way out to memory: 64 rows of a block of columns, as they will lie there, through one of two places in
// shared memory, 16 rows a warp. A helping thread sends a place by a bulk store once its four warps have told so
// (send_chain in bulk.cu), while these go on: the fence between has little to wait for as long as a warp stores nothing else
// meanwhile.
constexpr bool SENDS = true;
constexpr u32 PLACE_BYTES = 4 * STAGING_BYTES;
struct Writer {
    Ring& ring;
    u32 written;  // barrier of this warpgroup's first place
    u32 first;    // this warp's part of that place
    u32 anchor;   // and this lane's row in it, for stmatrix and ldmatrix

    __device__ __forceinline__ explicit Writer(Ring& ring) : ring(ring) {
        const int thread = thread_anew(), lane = thread & 31, row = (lane & 7) + (lane >> 3 & 1) * 8, group = thread >> 7;
        written = ring.written(group, 0);
        first = ring.base + STAGING_AT + group * 2 * PLACE_BYTES + (thread >> 5 & 3) * STAGING_BYTES;
        anchor = first + row * 128 + ((lane >> 4 ^ row) & 7) * 16;
    }
    __device__ __forceinline__ u32 place() const { return ring.sent & 1; }
    __device__ __forceinline__ u32 offset() const { return place() * PLACE_BYTES; }
    // This warp's part of the place that comes next, once it has been read.
    __device__ __forceinline__ u32 spare() const {
        barrier_wait(written + 16 + place() * 8, (ring.sent >> 1 & 1) ^ 1);
        return first + offset();
    }
    // Address for stmatrix and ldmatrix of groups 2 * pair and 2 * pair + 1: their chunks lie by the bits of the row.
    __device__ __forceinline__ u32 address(int pair) const { return (anchor ^ pair * 32) + offset(); }
    // packed[2 * j], packed[2 * j + 1]: group j of the two rows.
    __device__ __forceinline__ void write(const Pair (&packed)[PAIRS_OF_BLOCK]) const {
        spare();
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            store_matrices(
                address(pair), packed[pair * 4], packed[pair * 4 + 1], packed[pair * 4 + 2], packed[pair * 4 + 3]);
        fence_async_shared();
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        barrier_arrive(written + place() * 8, (thread_anew() & 31) == 0);
        ++ring.sent;
    }
};

// The largest magnitude of bfloat16 pairs, NaN above all: as integers they have the same order.
struct Largest {
    u32 pair = 0;

    __device__ __forceinline__ void see(Pair packed) {
        asm("max.u16x2 %0, %0, %1;" : "+r"(pair) : "r"(packed & 0x7fff7fffu));
    }
    __device__ __forceinline__ u32 bits() const { return max(pair << 16, pair & 0xffff0000u); }
};

// Two outputs of ReLU.
__device__ __forceinline__ Pair pack_relu(float low, float high) {
    u32 pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Bits that say which outputs of a block are positive, a pair at a time: pair i of 16 ends at bits i and 16 + i.
__device__ __forceinline__ u32 add_signs(u32 signs, Pair packed, int) {
    u32 positive;  // in the highest bits of the two
    if (HIDDEN_ACTIVATION == RELU) positive = packed + 0x7fff7fffu;  // none is negative
    else asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(positive) : "r"(0u), "r"(packed));
    return signs >> 1 | (positive & 0x80008000u);
}
// What of pair i belongs to positive outputs.
__device__ __forceinline__ Pair keep_positive(Pair packed, u32 signs, int i) {
    u32 mask;
    asm("prmt.b32 %0, %1, %1, 0xBB99;" : "=r"(mask) : "r"(signs << (15 - i)));  // every byte the sign of the upper one
    return packed & mask;
}

// Sums over the 16 rows of a warp of the columns that lie at `address`: this lane gets columns 2 * lane and 2 * lane + 1.
// Products with a matrix that is one in row g alone and else zero add up group g there.
__device__ __forceinline__ float2 sum_rows(u32 address) {
    const int own = (thread_anew() & 31) >> 2;
    float sums[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        u32 b[4];
        load_matrices_transposed(address ^ pair * 32, b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 one = own == pair * 2 + half ? 0x3f803f80u : 0u;
            const u32 a[4] = {one, 0u, one, 0u};
            mma_bf16(sums[half], a, b[half * 2], b[half * 2 + 1]);
        }
    }
    return make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
}

// Where the sums of the columns of a tile's errors over the warp's rows go.
struct ColumnSums {
    float* to;

    __device__ __forceinline__ explicit ColumnSums(float* sums) : to(sums + (thread_anew() & 31) * 2) {}
};

// A block of outputs on its way; behind the last one, when all lies in shared memory, `beside` stores what is read together
// with the tile.
template <class F>
__device__ __forceinline__ void put_outputs(
    Writer& writer, const Pair (&packed)[PAIRS_OF_BLOCK], const Blocked&, int, int, bool last, const F& beside) {
    writer.write(packed);
    if (last) beside();
    writer.release();
}
// A block of errors, and the sums of its columns over the warp's rows.
__device__ __forceinline__ void put_errors(
    Writer& writer, const Pair (&packed)[PAIRS_OF_BLOCK], const Blocked&, int, int, const ColumnSums& sums, int number) {
    writer.write(packed);
    const u32 address = writer.address(0);
    writer.release();
    __stcg((float2*)(sums.to + number * COLUMNS), sum_rows(address));  // this warp alone writes there again
}

// Slopes of a block of hidden outputs, where they are not told by signs: from the outputs, or from where the errors
// will lie. Loaded a block ahead.
struct StoredSlopes {
    const Blocked& known;
    int row0, block0;
    uint4 chunks[4];

    __device__ __forceinline__ void load(const Writer&, int block) {
        const uint4* from = (const uint4*)known.at(row0, min(block0 + block, known.blocks - 1)) + (threadIdx.x & 31);
#pragma unroll
        for (int i = 0; i < 4; ++i) chunks[i] = __ldcg(from + i * 32);
    }
    __device__ __forceinline__ void take(const Writer& writer) {
        const u32 to = writer.spare() + (threadIdx.x & 31) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 512),
                         "r"(chunks[i].x), "r"(chunks[i].y), "r"(chunks[i].z), "r"(chunks[i].w)
                         : "memory");
        __syncwarp();
    }
    // Of pairs 4 * four to 4 * four + 3 of the block taken last.
    __device__ __forceinline__ void get(const Writer& writer, int four, Pair (&slopes)[4]) const {
        load_matrices(writer.address(four), slopes);
    }
};
__device__ __forceinline__ float low_of(Pair pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(Pair pair) { return __uint_as_float(pair & 0xffff0000u); }

// The copy of weight (r, c), or of it and its three neighbours.
__device__ __forceinline__ void copy_weight(const Matrices& m, int r, int c, float value) {
    *(Element*)m.weight.place(r, c) = to_element(value);
}
__device__ __forceinline__ void copy_weights(const Matrices& m, int r, int c, const float4& values) {
    store_quad((Element*)m.weight.place(r, c), values);
}
// As the second operand of a forward product, from column `column` on.
__device__ __forceinline__ Source weight_columns(const Matrices& m, int column) {
    return blocks_of(m.weight, 0, column / COLUMNS);
}
