// The matrices of the bulk kernel, and what a thread has of their tiles.
#pragma once
#define MAX_BULK_LAYERS 12
#define MAX_UPDATE_LAYERS MAX_BULK_LAYERS  // shared memory is scarce
#define APPLY_INLINE __forceinline__
#include "bulk_ring.cuh"
#include "update.cuh"

#define COLUMN_BLOCKS (BULK_N / COLUMNS)
#define PAIRS_OF_BLOCK (COLUMNS / 4)  // neighbours in a row that a thread has of a block
#define SIGN_WORDS COLUMN_BLOCKS  // of a thread's outputs of a tile
#define TELLS_BY_SIGN (HIDDEN_ACTIVATION == RELU || HIDDEN_ACTIVATION == LEAKY_RELU)

// Matrices of a layer, as plan_bulk.py lays them out.
struct Matrices {
    Matrix output, error, weight;
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
__device__ __forceinline__ i64 blocked_bytes(int rows, int columns) { return (i64)rows * (blocks_over(columns) * 128); }
__device__ __forceinline__ int transpose_rows(int columns) { return (columns + 2 * TILE_M - 1) / (2 * TILE_M) * (2 * TILE_M); }
__device__ __forceinline__ i64 matrix_bytes(int rows, int columns) {
    return blocked_bytes(rows, columns) + (TRANSPOSES ? blocked_bytes(transpose_rows(columns), rows) : 0);
}
__device__ __forceinline__ Matrix matrix(u8* base, int rows, int columns) {
    Matrix m;
    (Blocked&)m = {base, (i64)rows * 128, blocks_over(columns)};
#if TRANSPOSES
    const int across = transpose_rows(columns);
    m.transpose = {base + blocked_bytes(rows, columns), (i64)across * 128, blocks_over(rows)};
#endif
    return m;
}
__device__ __forceinline__ int weight_rows(const Layer& layer) { return (layer.fan_in + WIDEST - 1) / WIDEST * WIDEST; }
__device__ __forceinline__ Matrix inputs_of(const Places& places, int parity) {
    const int features = LAYER(0).fan_in;
    return matrix(places.inputs + parity * matrix_bytes(places.rows, features), places.rows, features);
}
__device__ __forceinline__ void place_matrices(const Places& places) {
    if (threadIdx.x == 0) {
        i64 rows_at = 0, weight_at = 0, sums_at = 0, signs_at = 0;
        for (int l = 0; l < ENGINE.layers; ++l) {
            const Layer& layer = LAYER(l);
            Matrices& m = near_matrices[l];
            m.output = matrix(places.outputs + rows_at, places.rows, layer.fan_out);
            m.error = matrix(places.errors + rows_at, places.rows, layer.fan_out);
            m.weight = matrix(places.weights + weight_at, weight_rows(layer), layer.fan_out);
            m.sums = places.sums + sums_at;
            rows_at += matrix_bytes(places.rows, layer.fan_out);
            weight_at += matrix_bytes(weight_rows(layer), layer.fan_out);
            m.signs = places.signs + signs_at;
            sums_at += (i64)(places.rows / 16) * m.error.blocks * COLUMNS;
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

#if PRODUCT == TF32
#include "bulk_tf32.cuh"
#else
#include "bulk_bf16.cuh"
#endif
