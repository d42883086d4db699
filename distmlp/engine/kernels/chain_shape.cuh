// What the chain kernel knows at compile time, and the table of layers that its loops read.
//
// Macros (from plan_chain.py):
//   WIDTHS               all widths, comma separated
//   CHAIN_ROWS           rows of a block: 16, 32 or 64
//   CHAIN_STAGES         of the ring of operands in shared memory
//   CHAIN_TILES          gradient tiles of all layers, each of a pair of blocks
//   CHAIN_SPLITS         parts of the batch that a tile is summed in
//   CHAIN_DEPTH          steps of 64 rows in the buffers
//   CHAIN_MEAN           whether the average of the parameters is kept
//   CHAIN_SHARED_BYTES   dynamic shared memory
//   CHAIN_PEERS          the ranks of a host sum inside the kernel: see chain_ranks.cuh; then
//   CHAIN_BLOCKS         of the grid
//
// All matrices that products read are cut into panels of 64 columns (128 bytes a row, in the 128-byte swizzle of
// `wgmma`), in device memory as in shared memory, so that plain bulk copies move them. A piece is 64 rows of a panel.
#pragma once
#include "network_shape.cuh"
#include "params.cuh"

#ifndef CHAIN_PEERS
#define CHAIN_PEERS 0
#endif

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

namespace chain {

using network::LAYERS;
using network::width;

constexpr int ROWS = CHAIN_ROWS, STAGES = CHAIN_STAGES, SPLITS = CHAIN_SPLITS, DEPTH = CHAIN_DEPTH;
constexpr int BLOCKS_OF_PAIR = 2;     // blocks of a cluster: what one copies of weights, the other gets as well
constexpr int GROUPS = 4;   // warpgroups that multiply
constexpr int WORKERS = 128 * GROUPS;
constexpr int BLOCK_THREADS = WORKERS + 128;  // then a warp that copies, then three that help
constexpr int HELPERS = 3, FIRST_HELPER = WORKERS / 32 + 1;
constexpr int PIECE_BYTES = 64 * 128, STAGE_BYTES = GROUPS * PIECE_BYTES;
constexpr int PANEL_BYTES = ROWS * 128;  // of a block's own rows
constexpr int BLOCKS8 = ROWS / 8;        // column blocks of a product of 64 features by a block's rows
constexpr int SUMS = 4 * BLOCKS8;        // of it, a thread
constexpr int PAIRS = SUMS / 2;

SHAPE_FN int panels(int i) { return (width(i) + 63) / 64; }
SHAPE_FN int most_panels() {
    int most = 0;
    for (int i = 0; i <= LAYERS; ++i) most = panels(i) > most ? panels(i) : most;
    return most;
}
SHAPE_FN int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Gradient tiles of a layer: 256 inputs by 128 outputs, or the other way round; each block of the pair takes a half of
// the longer side.
SHAPE_FN bool along_outputs(int l) {
    return ceil_div(panels(l), 2) * ceil_div(panels(l + 1), 4) < ceil_div(panels(l), 4) * ceil_div(panels(l + 1), 2);
}
SHAPE_FN int tiles_across(int l) { return ceil_div(panels(l + 1), along_outputs(l) ? 4 : 2); }
SHAPE_FN int tiles_of(int l) { return tiles_across(l) * ceil_div(panels(l), along_outputs(l) ? 2 : 4); }
SHAPE_FN int first_tile(int l) {
    int at = 0;
    for (int i = 0; i < l; ++i) at += tiles_of(i);
    return at;
}
constexpr int TILES = first_tile(LAYERS);
static_assert(TILES == CHAIN_TILES, "as plan_chain.py");

// In pieces: weights of layers, (panels of inputs, panels of outputs); then inputs of layers and errors of their
// outputs, (DEPTH, panels).
SHAPE_FN int weight_piece(int l) {
    int at = 0;
    for (int i = 0; i < l; ++i) at += panels(i) * panels(i + 1);
    return at;
}
SHAPE_FN int input_piece(int l) {
    int at = weight_piece(LAYERS);
    for (int i = 0; i < l; ++i) at += DEPTH * (panels(i) + panels(i + 1));
    return at;
}
SHAPE_FN int error_piece(int l) { return input_piece(l) + DEPTH * panels(l); }
// The inputs of the network are there twice: those of the next step are written while this one's are in use.
SHAPE_FN int network_inputs(int parity) { return input_piece(parity ? LAYERS : 0); }
SHAPE_FN int first_feature(int l) {  // of a layer's outputs among those of all
    int at = 0;
    for (int i = 0; i < l; ++i) at += 64 * panels(i + 1);
    return at;
}
constexpr int ARRIVALS = TILES * BLOCKS_OF_PAIR * GROUPS, COUNTERS = ARRIVALS + LAYERS * SPLITS + 1 + LAYERS + 1;
constexpr int FEATURES = first_feature(LAYERS);

constexpr int BUFFER_BYTES = most_panels() * PANEL_BYTES;
constexpr int BUFFERS_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = BUFFERS_AT + 2 * BUFFER_BYTES;
constexpr int INPUTS_BARRIER_AT = BARRIERS_AT + 2 * STAGES * 8;
constexpr int ROWS_AT = INPUTS_BARRIER_AT + 16;         // (2,) tables of rows, of this step and the next
constexpr int WARPS_AT = ROWS_AT + 2 * ROWS * 12;       // (warps,) float4: loss, magnitudes
constexpr int TABLE_AT = WARPS_AT + BLOCK_THREADS / 32 * 16;

// Where the largest inputs are, of each of the warps that gather: behind the workers' places.
SHAPE_FN int input_record(int parity) { return WORKERS / 32 + 2 * parity; }

struct RowTable {
    u32 row[ROWS];       // in the raw store, NOWHERE beyond the batch
    float weight[ROWS];  // 0 beyond the batch
    int label[ROWS];

    static constexpr u32 NOWHERE = ~0u;
    __device__ __forceinline__ bool has(int r) const { return row[r] != NOWHERE; }
};
static_assert(sizeof(RowTable) == ROWS * 12, "as ROWS_AT");

struct Part {  // of the table: a layer
    int fan_in, fan_out, in, out;  // `in` and `out`: panels
    int bias, weight;              // into the flat buffers
    int pieces, inputs, errors;    // first ones
    int activation;
    int first_tile, across, along_outputs;
    int feature;
};
constexpr int SHARED_BYTES = TABLE_AT + LAYERS * (int)sizeof(Part);
static_assert(SHARED_BYTES == CHAIN_SHARED_BYTES, "as plan_chain.py");
static_assert(16 * 4 * ROWS * 4 <= BUFFER_BYTES, "softmax keeps its sums in a buffer");

struct Buffers {
    u8* pieces;          // weights, inputs of layers, errors: see above
    u32* kept;           // what slopes are told from, (blocks, layers, panels / 4, words, WORKERS)
    float* column_sums;  // of errors, (FEATURES, blocks)
    uint4* records;      // (blocks,): loss, weight, largest magnitude of activations and of errors
    float4* partials;    // (tiles, BLOCKS_OF_PAIR, GROUPS, splits, 8, 128)
    u32* arrivals;       // of splits, (tiles, BLOCKS_OF_PAIR, GROUPS)
    u32* chained;        // blocks whose errors of a layer are written, (layers, splits); behind it, blocks that are done
    u32* updated;        // (layers + 1,): warpgroups done with weights of a layer, blocks done with biases

    __device__ __forceinline__ u8* piece(int i) const { return pieces + (i64)i * PIECE_BYTES; }
};

// What all of a block's threads need all the time. The phases are functions of their own, so that each has the registers
// to itself.
__shared__ struct {
    Raw raw;
    Buffers buffers;
    Hyper hyper;   // of the update
    bool sure[2];  // of both parities of steps: that it may be done at once
    u32 blocks, blocks_of_split;  // that were to arrive up to this step
    u32 fetches;   // of inputs
} context;

template <class T>
__device__ __forceinline__ T* shared(int at) {
    return (T*)(dynamic_shared + at);
}
__device__ __forceinline__ RowTable& row_table(int parity) { return shared<RowTable>(ROWS_AT)[parity]; }
__device__ __forceinline__ const Part& part_of(int l) { return shared<const Part>(TABLE_AT)[l]; }

__device__ __noinline__ void fill_table() {
    if (threadIdx.x < LAYERS) {
        const int l = threadIdx.x;
        const Layer& layer = ENGINE.layer[l];
        shared<Part>(TABLE_AT)[l] = Part{
            width(l), width(l + 1), panels(l), panels(l + 1), (int)layer.bias_offset, (int)layer.weight_offset,
            weight_piece(l), input_piece(l), error_piece(l), layer.activation, first_tile(l), tiles_across(l),
            along_outputs(l), first_feature(l)};
    }
}

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
// Steps of 64 rows of a batch, and blocks that have rows of them.
__device__ __forceinline__ int steps_of_64(int rows) { return (rows + 63) / 64; }
__device__ __forceinline__ int blocks_at_work(int rows) {
    return ceil_div(steps_of_64(rows) * (64 / ROWS), BLOCKS_OF_PAIR) * BLOCKS_OF_PAIR;
}
// Part `split` of a batch begins with this step.
__device__ __forceinline__ int split_begin(int steps, int split) { return steps * split / SPLITS; }

}  // namespace chain
