// What the narrow kernel knows at compile time: widths, where everything lies in shared memory, and which
// warpgroup sums which weight gradient.
//
// Macros (from plan_narrow.py):
//   WIDTHS        all widths, comma separated            ACTIVATIONS   one per layer (codes.cuh)
//   NARROW_ITEMS  {layer, block, out_major, group, offset}, …: see `Item`
//   NARROW_GROUPS warpgroups of a block; a tile has 64 rows per warpgroup
//   NARROW_SUMS   floats a thread keeps for weight gradients
//
// Every matrix in shared memory is cut into blocks of 8 x 8 bf16 (128 bytes, rows of 16 bytes), and blocks
// follow each other along the row first. One layout serves all: a warp stores and loads it without bank
// conflicts, `ldmatrix` reads it as it is or transposed, and it is the layout without swizzle of `wgmma`,
// whose descriptors then cover every width that is a multiple of 16.
#pragma once
#include "types.cuh"

namespace narrow {

// Lists are local to functions: device code may not refer to a constant array of the namespace.
#define CONSTEXPR __host__ __device__ constexpr
CONSTEXPR int count_widths() {
    constexpr int widths[] = {WIDTHS};
    return sizeof(widths) / sizeof(int);
}
CONSTEXPR int width(int i) {
    constexpr int widths[] = {WIDTHS};
    return widths[i];
}
CONSTEXPR int activation(int layer) {
    constexpr int kinds[] = {ACTIVATIONS};
    return kinds[layer];
}
// An integer expression that is certainly evaluated by the compiler.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};
#define CONSTANT(...) (narrow::Constant<(__VA_ARGS__)>::value)

constexpr int LAYERS = count_widths() - 1;
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
CONSTEXPR int count_items() {
    constexpr Item items[] = {NARROW_ITEMS};
    return sizeof(items) / sizeof(Item);
}
CONSTEXPR Item item(int i) {
    constexpr Item items[] = {NARROW_ITEMS};
    return items[i];
}
constexpr int ITEM_COUNT = count_items();

CONSTEXPR int padded(int i) { return (width(i) + 15) / 16 * 16; }
CONSTEXPR int columns(int i) { return padded(i) / 8; }  // blocks in a row of activation or dZ `i`

CONSTEXPR bool out_major(int layer) {
    for (int i = 0; i < ITEM_COUNT; ++i)
        if (item(i).layer == layer) return item(i).out_major;
    return true;
}
// Blocks in a row of activation `i`, the block of ones included.
CONSTEXPR int activation_columns(int i) { return columns(i) + (out_major(i) ? 1 : 0); }

CONSTEXPR int weight_bytes(int layer) { return columns(layer) * columns(layer + 1) * BLOCK_BYTES; }
CONSTEXPR int weight_at(int layer) {  // bytes into shared memory, and into the image in global memory
    int at = 0;
    for (int i = 0; i < layer; ++i) at += weight_bytes(i);
    return at;
}
CONSTEXPR int bias_at(int layer) {  // float32
    int at = weight_at(LAYERS);
    for (int i = 0; i < layer; ++i) at += padded(i + 1) * 4;
    return at;
}
constexpr int IMAGE_BYTES = bias_at(LAYERS);

CONSTEXPR int activation_at(int i) {  // input of layer i, 0 <= i < LAYERS
    int at = (IMAGE_BYTES + 127) / 128 * 128;
    for (int k = 0; k < i; ++k) at += TILE / 8 * activation_columns(k) * BLOCK_BYTES;
    return at;
}
CONSTEXPR int delta_at(int i) {  // gradient at the output of layer i - 1, 1 <= i <= LAYERS
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

// Flat parameter layout, as distmlp/network.py.
CONSTEXPR int aligned(int n) { return (n + 31) / 32 * 32; }
CONSTEXPR int flat_weight(int layer) {
    int at = 0;
    for (int i = 0; i < layer; ++i) at = aligned(aligned(at + width(i) * width(i + 1)) + width(i + 1));
    return at;
}
CONSTEXPR int flat_bias(int layer) { return aligned(flat_weight(layer) + width(layer) * width(layer + 1)); }

}  // namespace narrow
