// What the narrow kernel knows at compile time: widths, where everything lies in shared memory, and which
// warpgroup sums which weight gradient.
//
// Macros (from plan_narrow.py), beside those of network_shape.cuh:
//   NARROW_ITEMS  {layer, block, out_major, group, offset}, …: see `Item`
//   NARROW_GROUPS warpgroups of a block; a tile has 64 rows per warpgroup
//   NARROW_SUMS   floats a thread keeps for weight gradients
//
// Every matrix in shared memory is cut into blocks of 8 x 8 bf16 (128 bytes, rows of 16 bytes), and blocks
// follow each other along the row first. One layout serves all: a warp stores and loads it without bank
// conflicts, `ldmatrix` reads it as it is or transposed, and it is the layout without swizzle of `wgmma`,
// whose descriptors then cover every width that is a multiple of 16.
#pragma once
#include "network_shape.cuh"

namespace narrow {

using namespace network;

constexpr int CHAINS = NARROW_CHAINS;
constexpr int GROUPS = NARROW_GROUPS;
constexpr int WARPS = 4 * GROUPS;
constexpr int BLOCK_THREADS = 128 * GROUPS;
constexpr int TILE = 64 * CHAINS;  // rows of a tile
constexpr int BLOCK_BYTES = 128;   // 8 x 8 bf16

// A part of a weight gradient: 64 rows of `out_major ? dZ^T A : A^T dZ`, summed by warpgroup `group` in
// `sums[offset]` onwards. With out_major the bias gradient is one more column: A carries a block whose
// first column is one.
struct Item {
    int layer, block, out_major, group, offset;
};
SHAPE_FN int count_items() {
    constexpr Item items[] = {NARROW_ITEMS};
    return sizeof(items) / sizeof(Item);
}
SHAPE_FN Item item(int i) {
    constexpr Item items[] = {NARROW_ITEMS};
    return items[i];
}
constexpr int ITEM_COUNT = count_items();

SHAPE_FN int padded(int i) { return (width(i) + 15) / 16 * 16; }
SHAPE_FN int columns(int i) { return padded(i) / 8; }  // blocks in a row of activation or dZ `i`

SHAPE_FN bool out_major(int layer) {
    for (int i = 0; i < ITEM_COUNT; ++i)
        if (item(i).layer == layer) return item(i).out_major;
    return true;
}
// Blocks in a row of activation `i`, the block of ones included.
SHAPE_FN int activation_columns(int i) { return columns(i) + (out_major(i) ? 1 : 0); }

SHAPE_FN int weight_bytes(int layer) { return columns(layer) * columns(layer + 1) * BLOCK_BYTES; }
SHAPE_FN int weight_at(int layer) {  // bytes into shared memory, and into the image in global memory
    int at = 0;
    for (int i = 0; i < layer; ++i) at += weight_bytes(i);
    return at;
}
SHAPE_FN int bias_at(int layer) {  // float32
    int at = weight_at(LAYERS);
    for (int i = 0; i < layer; ++i) at += padded(i + 1) * 4;
    return at;
}
constexpr int IMAGE_BYTES = bias_at(LAYERS);

SHAPE_FN int activation_at(int i) {  // input of layer i, 0 <= i < LAYERS
    int at = (IMAGE_BYTES + 127) / 128 * 128;
    for (int k = 0; k < i; ++k) at += TILE / 8 * activation_columns(k) * BLOCK_BYTES;
    return at;
}
SHAPE_FN int delta_at(int i) {  // gradient at the output of layer i - 1, 1 <= i <= LAYERS
    int at = activation_at(LAYERS);
    for (int k = 1; k < i; ++k) at += TILE / 8 * columns(k) * BLOCK_BYTES;
    return at;
}
// A 64-row operand may begin near the end of the last matrix and read past it (rows that are not used).
constexpr int OVERREAD = 8 * BLOCK_BYTES;
constexpr int EXCHANGE_AT = delta_at(LAYERS + 1) + OVERREAD;
// Scratch of the exchange between blocks: sums of a warp over a chunk, or its tally and its output biases.
constexpr int WARP_SUMS = 128 + 4 + padded(LAYERS);  // floats
constexpr int EXCHANGE_BYTES = WARPS * WARP_SUMS * 4 + 64;

}  // namespace narrow
