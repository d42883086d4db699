// The matrices of the bulk kernel, and what a thread has of their tiles.
#pragma once
#define MAX_BULK_LAYERS 12
#define MAX_UPDATE_LAYERS MAX_BULK_LAYERS  // shared memory is scarce
#define RARELY __forceinline__
#include "bulk_ring.cuh"
#include "update.cuh"

#define COLUMN_BLOCKS (BULK_N / COLUMNS)
#define PAIRS_OF_BLOCK (COLUMNS / 4)  // neighbours in a row that a thread has of a block
#define SIGN_WORDS (BULK_N / 64)      // a thread has so many times 32 outputs of a tile
#define TELLS_BY_SIGN (HIDDEN_ACTIVATION == RELU || HIDDEN_ACTIVATION == LEAKY_RELU)

// Matrices of a layer, as plan_bulk.py lays them out.
struct Matrices {
    Blocked output, error, weight;
#if PRODUCT == TF32
    Blocked weight_transpose;
#endif
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
__device__ __forceinline__ Blocked blocked(u8* base, int rows, int columns) {
    return {base, (i64)rows * 128, blocks_over(columns)};
}
// Of a batch: inputs, outputs or errors.
__device__ __forceinline__ i64 batch_bytes(int rows, int columns) {
    return TRANSPOSED ? blocked_bytes(transpose_rows(columns), rows) : blocked_bytes(rows, columns);
}
__device__ __forceinline__ Blocked batch_matrix(u8* base, int rows, int columns) {
    return TRANSPOSED ? blocked(base, transpose_rows(columns), rows) : blocked(base, rows, columns);
}
// That a batch of a layer's outputs has, with those that fill its last block.
__device__ __forceinline__ int padded_columns(const Layer& layer) { return blocks_over(layer.fan_out) * COLUMNS; }
__device__ __forceinline__ Source batch_rows(const Blocked& m, int row) {
    return TRANSPOSED ? blocks_of(m, 0, row / COLUMNS) : rows_of(m, row);
}
// Columns from `column` on, and of them rows from `block` blocks on in turn.
__device__ __forceinline__ Source batch_columns(const Blocked& m, int block, int column) {
    if (TRANSPOSED) return {m.at(column, block), m.block_bytes, 0, 0};
    return blocks_of(m, block * COLUMNS, column / COLUMNS);
}
__device__ __forceinline__ int weight_rows(const Layer& layer) { return (layer.fan_in + WIDEST - 1) / WIDEST * WIDEST; }
__device__ __forceinline__ Blocked inputs_of(const Places& places, int parity) {
    const int features = LAYER(0).fan_in;
    return batch_matrix(places.inputs + parity * batch_bytes(places.rows, features), places.rows, features);
}
__device__ __forceinline__ void place_matrices(const Places& places) {
    if (threadIdx.x == 0) {
        i64 rows_at = 0, weight_at = 0, sums_at = 0, signs_at = 0;
        for (int l = 0; l < ENGINE.layers; ++l) {
            const Layer& layer = LAYER(l);
            Matrices& m = near_matrices[l];
            m.output = batch_matrix(places.outputs + rows_at, places.rows, layer.fan_out);
            m.error = batch_matrix(places.errors + rows_at, places.rows, layer.fan_out);
            m.weight = blocked(places.weights + weight_at, weight_rows(layer), layer.fan_out);
            weight_at += blocked_bytes(weight_rows(layer), layer.fan_out);
#if PRODUCT == TF32
            m.weight_transpose = blocked(places.weights + weight_at, transpose_rows(layer.fan_out), layer.fan_in);
            weight_at += blocked_bytes(transpose_rows(layer.fan_out), layer.fan_in);
#endif
            m.sums = places.sums + sums_at;
            rows_at += batch_bytes(places.rows, layer.fan_out);
            m.signs = places.signs + signs_at;
            sums_at += (i64)(places.rows / 16) * padded_columns(layer);
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
        : warp(thread_anew() >> 5), lane(thread_anew() & 31), row(m0 + warp * 16 + (lane >> 2)),
          inside{row < rows, row + 8 < rows} {}
    __device__ __forceinline__ int column(int j) const { return j * 8 + (lane & 3) * 2; }  // of group j
    __device__ __forceinline__ u32 mask(int half) const { return inside[half] ? ~0u : 0u; }
};

#if PRODUCT == TF32
#include "bulk_tf32.cuh"
#else
#include "bulk_bf16.cuh"
#endif
