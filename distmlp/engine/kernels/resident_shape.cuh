// What the resident kernel knows at compile time: who owns what, and where everything lies in shared memory and in the
// exchange buffer.
//
// Macros (from plan_resident.py), beside those of network_shape.cuh:
//   RESIDENT_TILES   tiles of 16 rows that a batch may have: 1, or even
//   RESIDENT_WARPS   of a block           RESIDENT_MEAN  1: the average of the parameters is kept, too
//   RESIDENT_SHARED_BYTES, RESIDENT_EXCHANGE_BYTES  the same sums as here, for comparison
//
// Activation i is the input of layer i (0: the batch). Hidden layers are 0 to HIDDEN - 1; block b owns the eight outputs
// from 8 b on of each. Matrices (rows, features) are exchanged in tiles of 16 x 16 as a warp's operand registers of
// mma.m16n8k16 hold them, 16 bytes a lane: tile (k, t) of row tile t stands at (k * TILES + t) * 512 bytes.
#pragma once
#include "network_shape.cuh"
#include "optimizers.cuh"

namespace resident {

using namespace network;

constexpr int HIDDEN = LAYERS - 1;
constexpr int OUTPUTS = width(LAYERS);
constexpr int WARPS = RESIDENT_WARPS, BLOCK_THREADS = 32 * WARPS;
constexpr int TILES = RESIDENT_TILES, ROWS = 16 * TILES;
constexpr int CHUNK = TILES == 1 ? 1 : 2;  // row tiles that a warp works on at a time
constexpr int TILE_BYTES = 512;

SHAPE_FN int depth(int i) { return (width(i) + 15) / 16; }  // blocks of 16 features of activation i
SHAPE_FN int groups(int i) { return (width(i) + 7) / 8; }
SHAPE_FN int turns(int blocks) { return (blocks + WARPS - 1) / WARPS; }  // blocks that a warp takes of so many
SHAPE_FN int workers(int blocks) { return blocks < WARPS ? blocks : WARPS; }
constexpr int LAST_TURNS = turns(depth(HIDDEN));
constexpr int OUTPUT_TILES = (OUTPUTS + 7) / 8;
static_assert(OUTPUT_TILES <= 2 && HIDDEN >= 1 && (TILES == 1 || TILES % 2 == 0) && TILES <= WARPS);

// Parameter, first and second slot, average: what there is of them, in this order.
constexpr int FIRST = 1, SECOND = FIRST + has_first_slot(), MEAN = SECOND + has_second_slot();
constexpr int STATES = MEAN + RESIDENT_MEAN;

// Shared memory, bytes. First the block's weights of every hidden layer: for every block of 16 inputs the STATES
// kinds of (lane) float4: output lane / 4, inputs 2 (lane % 4) + {0, 1, 8, 9}; as an operand of the forward product.
SHAPE_FN int state_at(int layer) {
    int at = 0;
    for (int i = 0; i < layer; ++i) at += depth(i) * STATES * TILE_BYTES;
    return at;
}
// Every warp's share of a sum: (warp, row tile, output tile, lane) float4.
constexpr int SHARES_AT = state_at(HIDDEN);
constexpr int SHARES_BYTES = WARPS * TILES * OUTPUT_TILES * TILE_BYTES;
// Of the block's eight outputs of every hidden layer: error as an operand (row tile, half, lane) of the weight gradient,
// slope (row tile, lane) float4, column sums of the error (row tile, 8).
constexpr int DELTA_AT = SHARES_AT + SHARES_BYTES;
constexpr int SLOPE_AT = DELTA_AT + HIDDEN * TILES * 256;
constexpr int SUMS_AT = SLOPE_AT + HIDDEN * TILES * TILE_BYTES;
constexpr int OWN_AT = SUMS_AT + HIDDEN * TILES * 32;  // the block's outputs of the last hidden layer: (rows, 8)
// Network outputs, then their errors: (rows, OUTPUT_STRIDE); targets (rows, OUTPUTS); sample weights, labels.
constexpr int OUTPUT_STRIDE = 8 * OUTPUT_TILES + 2;
constexpr int OUTPUT_AT = OWN_AT + ROWS * 32;
constexpr int TARGETS_AT = OUTPUT_AT + ROWS * OUTPUT_STRIDE * 4;
constexpr int WEIGHTS_AT = TARGETS_AT + ROWS * OUTPUTS * 4;
constexpr int LABELS_AT = WEIGHTS_AT + ROWS * 4;
// The rest of the block's parameters (STATES, FEW): weights of the output layer (8, OUTPUTS), biases (HIDDEN, 8), output
// biases (OUTPUTS), which every block keeps.
constexpr int FEW_AT = LABELS_AT + ROWS * 4;
constexpr int HIDDEN_BIASES = 8 * OUTPUTS, OUTPUT_BIASES = HIDDEN_BIASES + 8 * HIDDEN, FEW = OUTPUT_BIASES + OUTPUTS;
constexpr int SHARED_BYTES = FEW_AT + STATES * FEW * 4;

// Exchange buffer, bytes. Batches in a ring of three, activations alternating; both also with every 8 x 8 transposed,
// as operands of weight gradients.
SHAPE_FN int matrix_bytes(int i) { return depth(i) * TILES * TILE_BYTES; }
SHAPE_FN int activation_at(int i, int turn) {
    int at = 0;
    for (int k = 0; k < i; ++k) at += (k ? 4 : 6) * matrix_bytes(k);
    return at + 2 * turn * matrix_bytes(i);
}
SHAPE_FN int transposed_at(int i, int turn) { return activation_at(i, turn) + matrix_bytes(i); }
constexpr int LAST_SLOPE_AT = activation_at(HIDDEN + 1, 0);  // of the last hidden layer, alternating
SHAPE_FN int error_at(int layer) {                           // of hidden layer `layer`
    int at = LAST_SLOPE_AT + 2 * matrix_bytes(HIDDEN);
    for (int i = 0; i < layer; ++i) at += matrix_bytes(i + 1);
    return at;
}
// Weights of hidden layer l > 0 for the backward product: (group of inputs, group of outputs, lane) pairs, alternating.
SHAPE_FN int backward_bytes(int l) { return 4 * depth(l) * depth(l + 1) * 128; }
SHAPE_FN int backward_at(int l, int turn) {
    int at = error_at(HIDDEN);
    for (int i = 1; i < l; ++i) at += 2 * backward_bytes(i);
    return at + turn * backward_bytes(l);
}
// Weights of the output layer: (block of 16 features, output tile, half, lane) pairs, alternating.
constexpr int LAST_WEIGHT_BYTES = depth(HIDDEN) * OUTPUT_TILES * 256;
constexpr int LAST_WEIGHT_AT = backward_at(HIDDEN, 0);
constexpr int FLAGS_AT = LAST_WEIGHT_AT + 2 * LAST_WEIGHT_BYTES;  // a ring of four `Flags`
constexpr int EXCHANGE_BYTES = FLAGS_AT + 32;

// As long as nothing exceeds these, no gradient of a step, nor its square, can overflow: then nobody needs to wait for anybody else's
// sums before the update. Else the step takes the slow way, which looks at them first.
SHAPE_FN int exponent(int n) { return n <= 1 ? 0 : 1 + exponent((n + 1) / 2); }
constexpr int LARGE_ACTIVATION = 12, LARGE_ERROR = 6;
SHAPE_FN int large_weight() {  // a power of two, as the others
    int left = 60 - LARGE_ACTIVATION - LARGE_ERROR - exponent(ROWS);
    for (int l = 1; l < LAYERS; ++l) left -= exponent(width(l + 1)) + 1;
    return left / HIDDEN < 20 ? left / HIDDEN : 20;
}
constexpr int LARGE_WEIGHT = large_weight();
__device__ __forceinline__ bool exceeds(float x, int power) { return magnitude_bits(x) > (u32)(127 + power) << 23; }

}  // namespace resident
