// What the resident kernel knows at compile time: who computes and who owns what, and where everything lies in shared
// memory and in the exchange buffer.
//
// Macros (from plan_resident.py), beside those of network_shape.cuh:
//   RESIDENT_BLOCKS, RESIDENT_WARPS   of the grid, of a block
//   RESIDENT_GROUPS, RESIDENT_GROUP_TILES  groups of rows of a batch, tiles of 16 rows in each
//   RESIDENT_COLUMN_BLOCKS  blocks of 16 columns of every hidden layer that a block of the grid computes for its group
//   RESIDENT_PATCH_IN, RESIDENT_PATCH_OUT  blocks of 16 inputs and outputs in a patch of a layer's weights, one per layer
//   RESIDENT_MEAN    1: the average of the parameters is kept, too
//   RESIDENT_SHARED_BYTES, RESIDENT_EXCHANGE_BYTES  the same sums as here, for comparison
//   RESIDENT_RANKS   of a host that train together, see resident_ranks.cuh (default: 1); then
//   RESIDENT_SENT_BYTES  of a step, to each of them
//
// Activation i is the input of layer i (0: the batch), error i the loss's derivative by its pre-activation (i > 0; LAYERS: the
// network's output). Matrices (rows, features) and weights (outputs, inputs) are exchanged in tiles of 16 x 16 as a
// warp's operand registers of mma.m16n8k16 hold them, 16 bytes a lane: pairs of the 8 x 8 at rows 0 and 8 of the first
// eight columns, then of the last eight. With floats for elements it is 16 bytes a lane of the first eight columns, and as
// many of the last eight behind them: mma.m16n8k8 takes columns 2 i and 2 i + 1 for i and i + 4, in both operands.
#pragma once
#include "network_shape.cuh"
#include "optimizers.cuh"

#ifndef RESIDENT_RANKS
#define RESIDENT_RANKS 1
#endif

namespace resident {

using namespace network;

constexpr int HIDDEN = LAYERS - 1;
constexpr int OUTPUTS = width(LAYERS), OUTPUT_TILES = (OUTPUTS + 7) / 8;
constexpr int BLOCKS = RESIDENT_BLOCKS, WARPS = RESIDENT_WARPS, BLOCK_THREADS = 32 * WARPS;
constexpr int GROUPS = RESIDENT_GROUPS, GROUP_TILES = RESIDENT_GROUP_TILES, GROUP_ROWS = 16 * GROUP_TILES;
constexpr int TILES = GROUPS * GROUP_TILES, ROWS = 16 * TILES;
constexpr int COLUMN_BLOCKS = RESIDENT_COLUMN_BLOCKS, COLUMNS = 16 * COLUMN_BLOCKS;
constexpr int TILE_BYTES = PRODUCT == BF16 ? 512 : 1024;  // of operands
constexpr int SUMS_BYTES = 512;                           // 16 x 8 float sums of a warp, a float4 a lane
constexpr int RANKS = RESIDENT_RANKS, ALL_TILES = RANKS * TILES;  // of the rows of all ranks

SHAPE_FN int divided(int n, int by) { return (n + by - 1) / by; }
SHAPE_FN int depth(int i) { return divided(width(i), 16); }  // blocks of 16 features of activation i
SHAPE_FN int turns(int blocks) { return divided(blocks, WARPS); }  // blocks that a warp takes of so many
SHAPE_FN int workers(int blocks) { return blocks < WARPS ? blocks : WARPS; }

SHAPE_FN int widest() {
    int most = 0;
    for (int i = 1; i <= HIDDEN; ++i) most = depth(i) > most ? depth(i) : most;
    return most;
}

// A patch of a layer's weights belongs to one block for good; patches are dealt out in turn.
SHAPE_FN int patch_in(int layer) {
    constexpr int sizes[] = {RESIDENT_PATCH_IN};
    return sizes[layer];
}
SHAPE_FN int patch_out(int layer) {
    constexpr int sizes[] = {RESIDENT_PATCH_OUT};
    return sizes[layer];
}
SHAPE_FN int patches_in(int layer) { return divided(depth(layer), patch_in(layer)); }
SHAPE_FN int patches(int layer) { return patches_in(layer) * divided(depth(layer + 1), patch_out(layer)); }
SHAPE_FN int first_patch(int layer) {  // the block that has patch 0
    int at = 0;
    for (int i = 0; i < layer; ++i) at += patches(i);
    return at % BLOCKS;
}

// Parameter, first and second slot, average: what there is of them, in this order.
constexpr int FIRST = 1, SECOND = FIRST + has_first_slot(), MEAN = SECOND + has_second_slot();
constexpr int STATES = MEAN + RESIDENT_MEAN;

// Shared memory, bytes. First the block's patches: for every 16 x 16 the STATES kinds of (half, lane) float4: outputs lane / 4
// and 8 more, inputs 2 (lane % 4), 2 (lane % 4) + 1, in half 1 eight more.
SHAPE_FN int state_at(int layer) {
    int at = 0;
    for (int i = 0; i < layer; ++i) at += patch_in(i) * patch_out(i) * STATES * 1024;
    return at;
}
// Every warp's share of sums: (warp, tile, lane) float4; at other times errors that patches are multiplied with.
constexpr int SHARE_TILES = GROUP_TILES * (2 * COLUMN_BLOCKS > OUTPUT_TILES ? 2 * COLUMN_BLOCKS : OUTPUT_TILES);
SHAPE_FN int staged_bytes(int layer) { return patch_out(layer) * ALL_TILES * TILE_BYTES; }
SHAPE_FN int staged_bytes(int from, int to) {
    int at = 0;
    for (int i = from; i < to; ++i) at += staged_bytes(i);
    return at;
}
constexpr int AT_ONCE = HIDDEN < 2 ? HIDDEN : 2;  // layers whose update ends a step; the next step begins with the others'
SHAPE_FN int larger(int a, int b) { return a > b ? a : b; }
SHAPE_FN int scratch_bytes() {
    return larger(WARPS * SHARE_TILES * SUMS_BYTES, larger(staged_bytes(0, AT_ONCE), staged_bytes(AT_ONCE, LAYERS)));
}
constexpr int SCRATCH_AT = state_at(LAYERS);
// Slopes of the block's own outputs, of all hidden layers but the last: (layer, tile, lane) float4.
constexpr int OWN_TILES = GROUP_TILES * 2 * COLUMN_BLOCKS;
constexpr int SLOPE_AT = SCRATCH_AT + scratch_bytes();
// Network outputs of the group, then their errors: (group rows, OUTPUT_STRIDE); targets (group rows, OUTPUTS), labels
// (group rows), sample weights (rows).
constexpr int OUTPUT_STRIDE = 8 * OUTPUT_TILES + 2;
constexpr int OUTPUT_AT = SLOPE_AT + (HIDDEN - 1) * OWN_TILES * SUMS_BYTES;
constexpr int TARGETS_AT = OUTPUT_AT + GROUP_ROWS * OUTPUT_STRIDE * 4;
constexpr int LABELS_AT = TARGETS_AT + GROUP_ROWS * OUTPUTS * 4;
constexpr int WEIGHTS_AT = LABELS_AT + GROUP_ROWS * 4;
// Biases, kept by every block that adds them: (STATES, FEW): of its columns (HIDDEN, COLUMNS), of the outputs.
constexpr int FEW_AT = WEIGHTS_AT + ROWS * 4;
constexpr int OUTPUT_BIASES = HIDDEN * COLUMNS, FEW = OUTPUT_BIASES + OUTPUTS;
constexpr int SHARED_BYTES = FEW_AT + STATES * FEW * 4;

// Exchange buffer, bytes. What many blocks wait for says itself whether it is written (see resident_exchange.cuh): each
// of its words is UNWRITTEN before. Activations and errors of that kind go round in a ring of three; what is read behind
// a grid barrier alternates.
constexpr int RING = 3;
SHAPE_FN int matrix_bytes(int i) { return depth(i) * TILES * TILE_BYTES; }  // tile (block, row tile)
SHAPE_FN int sums_bytes(int i) { return TILES * 16 * depth(i) * 4; }
SHAPE_FN int activation_at(int i) {  // i <= HIDDEN: the ring
    int at = 0;
    for (int k = 0; k < i; ++k) at += RING * matrix_bytes(k);
    return at;
}
constexpr int LAST_SLOPE_AT = activation_at(HIDDEN + 1);  // of the last hidden layer: a ring
SHAPE_FN int error_at(int i) {                            // 1 < i < HIDDEN: a ring
    int at = LAST_SLOPE_AT + RING * matrix_bytes(HIDDEN);
    for (int k = 2; k < i; ++k) at += RING * matrix_bytes(k);
    return at;
}
// With every 8 x 8 transposed, for gradients of weights: a ring of three of the batch, activations, errors, two each.
SHAPE_FN int activation_turned_at(int i) {
    int at = error_at(HIDDEN > 2 ? HIDDEN : 2);
    for (int k = 0; k < i; ++k) at += (k ? 2 : RING) * matrix_bytes(k);
    return at;
}
SHAPE_FN int error_turned_at(int i) {  // i > 0
    int at = activation_turned_at(HIDDEN + 1);
    for (int k = 1; k < i; ++k) at += 2 * matrix_bytes(k);
    return at;
}
SHAPE_FN int sums_at(int i) {  // i > 0: sums of error i over 16 rows: (row tile, column) float, two
    int at = error_turned_at(LAYERS + 1);
    for (int k = 1; k < i; ++k) at += 2 * sums_bytes(k);
    return at;
}
// Weights as operands of the forward product: tile (block of outputs, block of inputs). Those of layer 0 alternate.
SHAPE_FN int weight_bytes(int layer) { return depth(layer) * depth(layer + 1) * TILE_BYTES; }
SHAPE_FN int weight_at(int layer) {
    int at = sums_at(LAYERS + 1);
    for (int k = 0; k < layer; ++k) at += (k ? 1 : 2) * weight_bytes(k);
    return at;
}
constexpr int LOSSES_AT = weight_at(LAYERS);  // of every warp of every group: (group, warp) double, two
constexpr int LOSSES = GROUPS * WARPS;
constexpr int COUNTERS_AT = LOSSES_AT + 2 * 8 * LOSSES;  // see resident_exchange.cuh
constexpr int COUNTERS = 4, COUNTER_BYTES = 128;
constexpr int FLAGS_AT = COUNTERS_AT + COUNTERS * COUNTER_BYTES;  // whether a step is not finite: a ring of four
constexpr int EXCHANGE_BYTES = FLAGS_AT + 16;

// The same as numbers that are certainly the compiler's.
template <int I>
constexpr int DEPTH = depth(I);
template <int I>
constexpr int WIDTH = width(I);
template <int I>
constexpr int MATRIX_BYTES = matrix_bytes(I);
template <int L>
constexpr int WEIGHT_BYTES = weight_bytes(L);

// As long as nothing exceeds these, no gradient of a step, nor its square, can overflow: then nobody needs to wait for anybody else's
// sums before the update. Else the step takes the slow way, which looks at them first.
SHAPE_FN int exponent(int n) { return n <= 1 ? 0 : 1 + exponent((n + 1) / 2); }
constexpr int LARGE_ACTIVATION = 12, LARGE_ERROR = 6;
SHAPE_FN int large_weight() {  // a power of two, as the others
    int left = 60 - LARGE_ACTIVATION - LARGE_ERROR - exponent(RANKS * ROWS);
    for (int l = 1; l < LAYERS; ++l) left -= exponent(width(l + 1)) + 1;
    return left / HIDDEN < 20 ? left / HIDDEN : 20;
}
constexpr int LARGE_WEIGHT = large_weight();
__device__ __forceinline__ bool exceeds(float x, int power) { return magnitude_bits(x) > (u32)(127 + power) << 23; }

// The rows and columns that a block computes. Blocks beyond them only own weights.
struct Place {
    int group, block;  // of rows; first block of 16 columns, for any hidden layer

    __device__ __forceinline__ Place() : group(blockIdx.x % GROUPS), block(blockIdx.x / GROUPS * COLUMN_BLOCKS) {}
    template <int I>
    __device__ __forceinline__ bool has_columns() const {  // of activation I
        return block < DEPTH<I>;
    }
    __device__ __forceinline__ bool computes() const { return block < FIXED(widest()); }
    __device__ __forceinline__ int tile(int t) const { return group * GROUP_TILES + t; }
};

}  // namespace resident
