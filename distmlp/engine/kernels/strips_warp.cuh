// A warp of the strips kernel and its rows: sums of the products that take them from layer to layer.
#pragma once
#include "strips_rows.cuh"

namespace strips {

// Sums of a warp for TILES x 16 rows and COLUMNS columns. The thread (g, t) has of rows 16 m + g and 16 m + g + 8 the
// eight columns from 32 q + 8 t on.
template <int COLUMNS>
struct Sums {
    float z[TILES][COLUMNS / 8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) z[m][j][i] = 0.f;
    }
    // Column 32 q + 8 t + e of row 16 m + 8 half + g.
    __device__ __forceinline__ float& at(int m, int half, int q, int e) {
        return z[m][4 * q + (e & 3)][2 * half + (e >> 2)];
    }
    __device__ __forceinline__ float4 four(int m, int half, int q, int upper) const {
        const int i = 2 * half + upper;
        return make_float4(z[m][4 * q][i], z[m][4 * q + 1][i], z[m][4 * q + 2][i], z[m][4 * q + 3][i]);
    }
};

struct Strip {
    u32 shared;
    float* kept;
    const float* image;
    float* partial;
    int warp, lane;

    // The same, but what follows from it is not computed ahead of all phases, each piece in a register.
    __device__ __forceinline__ Strip here() const {
        Strip strip = *this;
        asm volatile("" : "+r"(strip.warp), "+r"(strip.lane), "+r"(strip.shared));
        return strip;
    }
    __device__ __forceinline__ int g() const { return lane >> 2; }
    __device__ __forceinline__ int t() const { return lane & 3; }

    // Where layer `l`'s weights lie in the image, and how many floats they are.
    template <int L = 0>
    __device__ __forceinline__ static int2 weights_of(int l) {
        if constexpr (L + 1 < LAYERS)
            if (l > L) return weights_of<L + 1>(l);
        return make_int2(FIXED(weight_at(L)), FIXED(weight_floats(L)));
    }
    __device__ __forceinline__ u32 shared_weights(int l) const {
        return shared + WEIGHTS_AT + 4 * (ALL_WEIGHTS ? weights_of(l).x : l % WEIGHT_COPIES * FIXED(most_weight_floats()));
    }
    __device__ __forceinline__ void ask_weights(int l) const {
        const int2 where = weights_of(l);
        const u32 to = shared_weights(l);
#pragma unroll 2
        for (int i = threadIdx.x * 4; i < where.y; i += BLOCK_THREADS * 4) copy16(to + 4 * i, image + where.x + i);
    }
    template <int L>
    __device__ __forceinline__ const float* biases(int n) const {  // of layer L + n
        return (const float*)(dynamic_shared + BIASES_AT) + FIXED(bias_at(L) - bias_at(0)) + n * padded(L + 1);
    }
    // Row `r` of matrix I + n, which is like I.
    template <int I>
    __device__ __forceinline__ u32 row_address(int n, int r) const {
        return shared + FIXED(rows_at(I)) + (KEEPS ? n * FIXED(STRIP_ROWS * row_bytes(I)) : 0) + r * FIXED(row_bytes(I));
    }

    // Operand of 16 rows that begin at `rows` and of eight columns from `k` on.
    template <int I>
    __device__ __forceinline__ void load_rows(Operand<4>& a, u32 rows, int k) const {
        u32 r[4];
        load_matrices(r, rows + (lane & 15) * FIXED(row_bytes(I)) + 4 * k + (lane >> 4) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) a.set(i, r[i]);
    }

    // Warps that take the same rows, where one makes its columns in the place of what the others read.
    template <int ACROSS>
    __device__ __forceinline__ void meet() const {
        if (KEEPS || ACROSS == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / ACROSS), "n"(32 * ACROSS) : "memory");
    }

    // z = a W for the rows of a piece and columns from `from` on; W is layer `l`'s, which is like L. (Sums that began with the biases would be moved
    // from where these are loaded as vectors, with every product.)
    template <int L, int MINE>
    __device__ __forceinline__ void products_up(int first, int from, int l, Sums<MINE>& sums) const {
        constexpr int COLUMNS = padded(L + 1);
        const u32 rows = row_address<L>(l - L, first);
        sums.clear();
        const u32 weights = shared_weights(l) + t() * (COLUMNS * 4) + 4 * from;
        const int vector = g() ^ 2 * t();
#pragma unroll 2
        for (int k = 0; k < FIXED((width(L) + 7) / 8); ++k) {
            Operand<4> a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m) load_rows<L>(a[m], rows + 16 * m * FIXED(row_bytes(L)), 8 * k);
            const u32 row = weights + k * (8 * COLUMNS * 4);
            const u32 low = row + (vector ^ (2 * k & 7)) * 16;
            const u32 high = row + 4 * COLUMNS * 4 + (vector ^ (2 * k + 1 & 7)) * 16;
#pragma unroll
            for (int q = 0; q < MINE / 32; ++q) {
                u32 v[4], w[4];
                load_vector(v, low + q * 128);
                load_vector(w, high + q * 128);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    Operand<2> b;
                    b.set(0, v[j]);
                    b.set(1, w[j]);
#pragma unroll
                    for (int m = 0; m < TILES; ++m) multiply(sums.z[m][4 * q + j], a[m], b);
                }
            }
        }
        meet<COLUMNS / MINE>();  // its rows have been read
    }

    // d = dz W^T for the rows of a piece.
    template <int L, int MINE>
    __device__ __forceinline__ void products_down(int first, int from, int l, Sums<MINE>& sums) const {
        constexpr int STRIDE = padded(L + 1) * 4;
        const u32 rows = row_address<L + 1>(l - L, first);
        sums.clear();
        // Lane 8 i + j points to a row of matrix i: W's row 4 j (+ 1 for i > 1), and which of two vectors.
        const int in = 4 * (lane & 7) + (lane >> 4), place = swizzle(in);
        const u32 weights = shared_weights(l) + (from + in) * STRIDE;
#pragma unroll 2
        for (int k = 0; k < FIXED((width(L + 1) + 7) / 8); ++k) {
            Operand<4> a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m) load_rows<L + 1>(a[m], rows + 16 * m * FIXED(row_bytes(L + 1)), 8 * k);
            const int vector = 2 * k + (lane >> 3 & 1) ^ place;
#pragma unroll
            for (int q = 0; q < MINE / 32; ++q) {
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 r[4];
                    load_matrices(r, weights + (32 * q + j) * STRIDE + (vector ^ 2 * j) * 16);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        Operand<2> b;
                        b.set(0, r[2 * i]);
                        b.set(1, r[2 * i + 1]);
#pragma unroll
                        for (int m = 0; m < TILES; ++m) multiply(sums.z[m][4 * q + j + i], a[m], b);
                    }
                }
            }
        }
        meet<padded(L) / MINE>();
    }

    template <int I>
    __device__ __forceinline__ float4 load_row(int n, int r, int column) const {
        u32 v[4];
        load_vector(v, row_address<I>(n, r) + 4 * column);
        return make_float4(__uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2]), __uint_as_float(v[3]));
    }
    template <int I>
    __device__ __forceinline__ void store_row(int n, int r, int column, const float4& v) const {
        store_vector(row_address<I>(n, r) + 4 * column, v);
    }
};

}  // namespace strips
