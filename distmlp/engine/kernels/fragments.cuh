// What becomes of the results of warpgroup products while they are in registers: outputs and errors of hidden layers.
// A warp has 16 rows of them; where the warpgroups split the depth, each takes half the columns. So that rows are read and
// written in whole pieces, up to 64 of their columns at a time pass through shared memory of the warp's own.
#pragma once
#include "epilogue.cuh"
#include "tile_copies.cuh"
#if PRODUCT == BF16

__device__ __forceinline__ void store_matrices(u32 where, const u32* v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(where), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}
__device__ __forceinline__ void load_matrices(u32 where, u32* v) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(where)
                 : "memory");
}

// 16 rows of COLUMNS elements in shared memory, as pieces of 16 bytes that change places with the row.
template <int COLUMNS>
struct Rows {
    static constexpr int PIECES = COLUMNS / 8, BYTES = 16 * COLUMNS * 2, SHARE = 16 * PIECES / 32;  // of a lane
    static_assert(PIECES == 4 || PIECES == 8, "rows of 64 or 128 bytes");
    u32 base;

    __device__ __forceinline__ u32 at(int row, int piece) const {
        return base + row * (COLUMNS * 2) + (piece ^ (PIECES == 8 ? row & 7 : row >> 1 & 3)) * 16;
    }
    // Pairs of columns as the products leave them: groups of eight columns, of each this lane's two rows.
    __device__ __forceinline__ void put(const u32 (&pairs)[PIECES * 2]) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int g = 0; g < PIECES; g += 2) store_matrices(at(lane & 15, g + (lane >> 4)), pairs + g * 2);
    }
    __device__ __forceinline__ void get(u32 (&pairs)[PIECES * 2]) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int g = 0; g < PIECES; g += 2) load_matrices(at(lane & 15, g + (lane >> 4)), pairs + g * 2);
    }
    // f(row, piece, its place in shared memory) for this lane's pieces.
    template <class F>
    __device__ __forceinline__ void for_each_piece(const F& f) const {
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int item = i * 32 + (threadIdx.x & 31), r = item / PIECES, p = item % PIECES;
            f(i, r, p, at(r, p));
        }
    }
    // To rows [row, `rows`) of a matrix with `ld` columns, from column `column` on.
    __device__ __forceinline__ void write(Element* matrix, int ld, int row, int column, int rows) const {
        __syncwarp();
        for_each_piece([&](int, int r, int p, u32 from) {
            uint4 v;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(from)
                         : "memory");
            if (row + r < rows && column + p * 8 < ld) *(uint4*)(matrix + (i64)(row + r) * ld + column + p * 8) = v;
        });
        __syncwarp();
    }
};

// A warp's results: groups of eight columns; of each group this lane has a pair of columns in two rows, eight apart.
template <class P>
struct Fragments {
    static constexpr int GROUPS = P::N / 8 / P::SLICES, COLUMNS = GROUPS * 8;
    static constexpr int BLOCK = COLUMNS < 64 ? COLUMNS : 64, BLOCKS = COLUMNS / BLOCK, PAIRS = BLOCK / 4;
    static constexpr int SUMS_AT = THREADS / 32 * Rows<BLOCK>::BYTES;
    static_assert(P::SLICES <= 2 && SUMS_AT + P::M / 16 * P::N * 4 <= P::TILE_BYTES, "in the memory of the results");
    float z[GROUPS * 4];
    Rows<BLOCK> staged;
    float* sums;      // of columns: (16 rows each, columns of the tile)
    int row, column;  // first ones, in the tile

    // `memory`: of the tile's results.
    __device__ __forceinline__ Fragments(const P& product, float* memory) {
        const int slice = P::SLICES > 1 ? __shfl_sync(~0u, threadIdx.x >> 7, 0) : 0, t = threadIdx.x & 127;
        row = product.warp_m * 16;
        column = slice * COLUMNS;
        sums = (float*)((u8*)memory + SUMS_AT);
        staged.base = (u32)__cvta_generic_to_shared(memory) + (threadIdx.x >> 5) * Rows<BLOCK>::BYTES;
        if (P::SLICES == 1) {
#pragma unroll
            for (int i = 0; i < GROUPS * 4; ++i) z[i] = product.c[i];
            return;
        }
        float* own = memory + slice * GROUPS * 4 * 128 + t;  // what the other warpgroup finishes
        const float* other = memory + (slice ^ 1) * GROUPS * 4 * 128 + t;
#pragma unroll
        for (int i = 0; i < GROUPS * 4; ++i) {
            const float lower = product.c[i], upper = product.c[(P::SLICES - 1) * GROUPS * 4 + i];
            own[i * 128] = slice ? lower : upper;
            z[i] = slice ? upper : lower;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < GROUPS * 4; ++i) z[i] += other[i * 128];
        __syncthreads();
    }
    // Results of pair i of a block.
    __device__ __forceinline__ const float* pair(int block, int i) const { return z + (block * PAIRS + i) * 2; }
    static __device__ __forceinline__ int column_of(int i) { return i / 2 * 8 + (threadIdx.x & 3) * 2; }
    static __device__ __forceinline__ int row_of(int i) { return (threadIdx.x >> 2 & 7) + i % 2 * 8; }
};

// Biases as what products are added to. A tensor's end is padded, so pairs may be read as one.
template <class P>
__device__ __forceinline__ void start_with_biases(P& product, const Layer& layer, const float* flat, int n0) {
    const int end = P::SLICES > 1 && product.warp_k > 0 ? 0 : layer.ld_out;  // one of the warpgroups does
#pragma unroll
    for (int g = 0; g < P::N / 8; ++g) {
        const int column = n0 + g * 8 + (threadIdx.x & 3) * 2;
        const float2 bias =
            column < end ? *(const float2*)(flat + layer.bias_offset + column) : make_float2(0.f, 0.f);
        product.c[g * 4] = product.c[g * 4 + 2] = bias.x;
        product.c[g * 4 + 1] = product.c[g * 4 + 3] = bias.y;
    }
}

// Outputs of a hidden layer (and, where they must be kept, slopes) from the tile at (m0, n0).
template <class P>
__device__ __forceinline__ void finish_outputs(
    const P& product, float* memory, const Layer& layer, int rows, int m0, int n0, u32& largest) {
    typedef Fragments<P> F;
    const F own(product, memory);
    const int kind = hidden_activation(layer), row = m0 + own.row;
#pragma unroll
    for (int b = 0; b < F::BLOCKS; ++b) {
        const int column = n0 + own.column + b * F::BLOCK;
        if (column >= layer.ld_out) break;
        u32 outputs[F::PAIRS], slopes[F::PAIRS];
#pragma unroll
        for (int i = 0; i < F::PAIRS; ++i) {
            const int c = column + F::column_of(i);
            float slope_x, slope_y;
            float x = activate(kind, own.pair(b, i)[0], slope_x), y = activate(kind, own.pair(b, i)[1], slope_y);
            if (c >= layer.fan_out) x = slope_x = 0.f;
            if (c + 1 >= layer.fan_out) y = slope_y = 0.f;
            outputs[i] = pack_pair(x, y);
            slopes[i] = pack_pair(slope_x, slope_y);
            if (row + F::row_of(i) < rows) largest = max(largest, max(magnitude_bits(x), magnitude_bits(y)));
        }
        own.staged.put(outputs);
        own.staged.write(layer.output, layer.ld_out, row, column, rows);
        if (!stores_slope(kind)) continue;
        own.staged.put(slopes);
        own.staged.write(layer.error, layer.ld_out, row, column, rows);
    }
}

// Errors of the layer `below` from the derivative by its outputs, and their sums over the tile's rows to `out`.
template <class P>
__device__ __forceinline__ void finish_errors(
    const P& product, float* memory, const Layer& below, int rows, int m0, int n0, float* out, u32& largest) {
    typedef Fragments<P> F;
    typedef Rows<F::BLOCK> Staged;
    const int kind = hidden_activation(below), lane = threadIdx.x & 31, ld = below.ld_out;
    const Element* known = stores_slope(kind) ? below.error : below.output;
    const F own(product, memory);
    const int row = m0 + own.row;
    uint4 pieces[Staged::SHARE];
    const auto load = [&](int column) {
        own.staged.for_each_piece([&](int i, int r, int p, u32) {
            pieces[i] = make_uint4(0, 0, 0, 0);
            if (row + r < rows && column + p * 8 < ld)
                pieces[i] = *(const uint4*)(known + (i64)(row + r) * ld + column + p * 8);
        });
    };
    load(n0 + own.column);
#pragma unroll
    for (int b = 0; b < F::BLOCKS; ++b) {
        const int column = n0 + own.column + b * F::BLOCK;
        if (column >= ld) break;
        own.staged.for_each_piece([&](int i, int, int, u32 to) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pieces[i].x), "r"(pieces[i].y),
                         "r"(pieces[i].z), "r"(pieces[i].w)
                         : "memory");
        });
        __syncwarp();
        u32 slopes[F::PAIRS], errors[F::PAIRS];
        own.staged.get(slopes);
        if (b + 1 < F::BLOCKS) load(column + F::BLOCK);
        __syncwarp();
        float sums[F::BLOCK / 4] = {};
#pragma unroll
        for (int i = 0; i < F::PAIRS; ++i) {
            const int c = column + F::column_of(i);
            const float kx = __uint_as_float(slopes[i] << 16), ky = __uint_as_float(slopes[i] & 0xffff0000u);
            float x = own.pair(b, i)[0] * (stores_slope(kind) ? kx : slope_of_output(kind, kx));
            float y = own.pair(b, i)[1] * (stores_slope(kind) ? ky : slope_of_output(kind, ky));
            const bool inside = row + F::row_of(i) < rows;
            if (!inside || c >= below.fan_out) x = 0.f;
            if (!inside || c + 1 >= below.fan_out) y = 0.f;
            errors[i] = pack_pair(x, y);
            largest = max(largest, max(magnitude_bits(x), magnitude_bits(y)));
            sums[i / 2 * 2] += x;
            sums[i / 2 * 2 + 1] += y;
        }
        own.staged.put(errors);
        own.staged.write(below.error, ld, row, column, rows);
#pragma unroll
        for (int i = 0; i < F::BLOCK / 4; ++i)
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], mask);
        float* to = own.sums + own.row / 16 * P::N + column - n0 + lane * 2;
        if (lane < 4)
#pragma unroll
            for (int g = 0; g < F::BLOCK / 8; ++g) *(float2*)(to + g * 8) = make_float2(sums[g * 2], sums[g * 2 + 1]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < P::N && n0 + c < ld; c += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int r = 0; r < P::M / 16; ++r) sum += own.sums[r * P::N + c];
        out[c] = sum;
    }
}
#endif
