// What the strips kernel knows at compile time: how matrices lie in shared memory, in the image of the weights and
// among the partial sums.
//
// Macros (from plan_strips.py), beside those of network_shape.cuh:
//   STRIP_WARPS   warps of a block
//   STRIP_TILES   tiles of 16 rows that a warp takes through a layer at a time
//   STRIP_ROWS    rows that a block holds at a time
//   STAGE_ROWS    rows of a stage: inputs of a layer on their way to its weight gradient
//   STRIP_STAGES  of these stages
//   STRIP_KEEPS   1: what is met again on the way down stays in shared memory; there are no stages then, but
//   STRIP_SCRATCH bytes in their place, for sums that warps share
//   STRIP_ACROSS  warps that take the same rows, each some columns, where these are whole blocks of 32
//   WEIGHT_COPIES layers whose weights are in shared memory at a time: one, two, or all
//
// Widths are padded to 32 columns. A warp meets a matrix of float32 in two ways: eight rows of 16 bytes each
// (`ldmatrix`, which gives operands whose sums go over columns), and four columns each of rows 2 t or 2 t + 1 (sums go
// over rows), or of rows t (weights on the way up). Rows of activations are padded by 16 bytes, so that neither meets a
// bank twice; weights lie in groups of eight vectors, vector v of a row in the place of v ^ swizzle(row).
#pragma once
#include "network_shape.cuh"

namespace strips {

using namespace network;

constexpr int WARPS = STRIP_WARPS, BLOCK_THREADS = 32 * WARPS;
constexpr int TILES = STRIP_TILES;  // of 16 rows that a warp takes through a layer at a time
constexpr int PIECE = 16 * TILES;

SHAPE_FN int padded(int i) { return (width(i) + 31) / 32 * 32; }
SHAPE_FN int larger(int a, int b) { return a > b ? a : b; }
SHAPE_FN int most_padded() {
    int most = 0;
    for (int i = 0; i <= LAYERS; ++i) most = larger(padded(i), most);
    return most;
}
SHAPE_FN int weight_floats(int layer) { return padded(layer) * padded(layer + 1); }
SHAPE_FN int most_weight_floats() {
    int most = 0;
    for (int i = 0; i < LAYERS; ++i) most = larger(weight_floats(i), most);
    return most;
}
// In the image and among the partial sums, floats: all weights, then all biases.
SHAPE_FN int weight_at(int layer) {
    int at = 0;
    for (int i = 0; i < layer; ++i) at += weight_floats(i);
    return at;
}
SHAPE_FN int bias_at(int layer) {
    int at = weight_at(LAYERS);
    for (int i = 0; i < layer; ++i) at += padded(i + 1);
    return at;
}
// Layers that are alike share their code, which else would be fetched anew for each: how many there are from `layer` on
// upwards, and from it on downwards. Neither the output layer nor, downwards, the lowest one is among them.
SHAPE_FN bool alike(int a, int b) { return width(a) == width(b) && width(a + 1) == width(b + 1); }
SHAPE_FN int run_up(int layer) {
    int n = 1;
    while (layer + n < LAYERS - 1 && alike(layer, layer + n) && activation(layer) == activation(layer + n)) ++n;
    return n;
}
SHAPE_FN int run_down(int layer) {
    int n = 1;
    while (layer < LAYERS - 1 && layer - n > 0 && alike(layer, layer - n) &&
           activation(layer - 1) == activation(layer - n - 1))
        ++n;
    return n;
}
constexpr int CHUNK = 128;  // parameters that are added up and updated together
constexpr int PARAMETERS = bias_at(LAYERS);
constexpr int CHUNKS = (PARAMETERS + CHUNK - 1) / CHUNK;
constexpr int PARTIAL_STRIDE = CHUNKS * CHUNK;

// What is met again on the way down, floats of a block: inputs of layers, then slopes.
SHAPE_FN int kept_at(int i) {
    int at = 0;
    for (int k = 0; k < i; ++k) at += STRIP_ROWS * padded(k);
    return at;
}
constexpr int KEPT_FLOATS = kept_at(LAYERS);
// Of layer L + n, which is like L.
template <int L>
__device__ __forceinline__ int kept_of(int n) {
    return Fixed<kept_at(L)>::value + n * (STRIP_ROWS * padded(L));
}

constexpr int ROW_FLOATS = most_padded() + 4;  // of activations, errors and stages in shared memory
constexpr int STAGE_FLOATS = STAGE_ROWS * ROW_FLOATS;
constexpr bool KEEPS = STRIP_KEEPS;
SHAPE_FN int across(int columns) { return columns % (32 * STRIP_ACROSS) == 0 ? STRIP_ACROSS : 1; }

// Matrix I of a strip in shared memory: inputs of layer I, on the way down the errors there. If they are kept each has a
// place of its own, else one is made in the place of the other.
SHAPE_FN int row_bytes(int i) { return 4 * (KEEPS ? padded(i) + 4 : ROW_FLOATS); }
SHAPE_FN int kept_bytes(int i) {  // of the first `i`
    int at = 0;
    for (int k = 0; k < i; ++k) at += STRIP_ROWS * row_bytes(k);
    return at;
}

constexpr bool ALL_WEIGHTS = WEIGHT_COPIES >= LAYERS;
// Bytes into shared memory.
constexpr int WEIGHTS_AT = KEEPS ? kept_bytes(LAYERS) : STRIP_ROWS * ROW_FLOATS * 4;
constexpr int WEIGHTS_BYTES = 4 * (ALL_WEIGHTS ? weight_at(LAYERS) : WEIGHT_COPIES * most_weight_floats());
constexpr int STAGES_AT = WEIGHTS_AT + WEIGHTS_BYTES;
constexpr int STAGES_BYTES = KEEPS ? STRIP_SCRATCH : STRIP_STAGES * STAGE_FLOATS * 4;
constexpr int ERRORS_AT = STAGES_AT + STAGES_BYTES;  // at the outputs, where activations are kept
constexpr int ERRORS_BYTES = KEEPS ? STRIP_ROWS * row_bytes(LAYERS) : 0;
constexpr int BIASES_AT = ERRORS_AT + ERRORS_BYTES;
SHAPE_FN int rows_at(int i) { return !KEEPS ? 0 : i < LAYERS ? kept_bytes(i) : ERRORS_AT; }
constexpr int INDEX_AT = BIASES_AT + (PARAMETERS - bias_at(0)) * 4;  // rows in the raw store
constexpr int SHARED_BYTES = INDEX_AT + STRIP_ROWS * 8;

// Weight gradients are cut into units of 32 x 32. Where there are fewer than warps, several share the rows of a unit.
SHAPE_FN int units(int layer) { return weight_floats(layer) / 1024; }
constexpr int SHARE_FLOATS = 36 * 32;  // of a unit's sums and its biases
SHAPE_FN int shares(int layer) {  // a power of two: half of them are added to the others, as often as there are halves
    const int room = STAGES_BYTES + (layer + 1 < LAYERS ? ERRORS_BYTES : 0);
    int n = 1;
    while (2 * n * units(layer) <= WARPS && 2 * n <= STAGE_ROWS / 8 && n * units(layer) * SHARE_FLOATS * 4 <= room) n *= 2;
    return n;
}

static_assert(STRIP_ROWS % PIECE == 0 && STRIP_ROWS % STAGE_ROWS == 0 && STAGE_ROWS % 8 == 0, "whole pieces");
static_assert(SHARED_BYTES == STRIP_SHARED_BYTES, "plan_strips.py and strips_shape.cuh agree");

// 0 to 7, different for rows r to r + 3 of any four in their upper bits, and for r, r + 4, .. r + 28.
__device__ __forceinline__ constexpr int swizzle(int row) { return ((row & 3) << 1) ^ (row >> 2 & 7); }
// Floats into a matrix of weights.
__device__ __forceinline__ constexpr int weight_place(int in, int out, int columns) {
    return in * columns + ((out >> 2 ^ swizzle(in)) << 2 | (out & 3));
}

}  // namespace strips
