// How gradients and parameters are cut into chunks for the exchange between blocks.
//
// A chunk is 128 floats as one warp holds them: a block of 8 columns of one item, lane by lane the four registers of
// its fragment, so that sums are written and read 16 bytes a lane. Behind all weights follow the biases, layer by layer.
#pragma once
#include "narrow_shape.cuh"

namespace narrow {

constexpr int CHUNK = 128;

SHAPE_FN int item_columns(int i) {  // blocks of 8 columns that are weights
    return item(i).out_major ? columns(item(i).layer) : columns(item(i).layer + 1);
}
SHAPE_FN int item_chunk(int i) {  // first chunk of an item: four warps, then the next column block
    int at = 0;
    for (int k = 0; k < i; ++k) at += 4 * item_columns(k);
    return at;
}
constexpr int WEIGHT_CHUNKS = item_chunk(ITEM_COUNT);
SHAPE_FN int bias_slot(int layer) {  // floats from the start of the biases
    int at = 0;
    for (int i = 0; i < layer; ++i) at += padded(i + 1);
    return at;
}
constexpr int BIAS_CHUNKS = (bias_slot(LAYERS) + CHUNK - 1) / CHUNK;
constexpr int CHUNKS = WEIGHT_CHUNKS + BIAS_CHUNKS;
constexpr int PARTIAL_STRIDE = CHUNKS * CHUNK;  // floats of a block's partial sums

// Where a parameter stands in the flat buffers and in the image; flat -1: padding.
struct Place {
    int layer, in, out;  // in -1: a bias
    int flat, image;
};

template <int L>
__device__ __forceinline__ Place weight_place(int in, int out) {
    if (in >= width(L) || out >= width(L + 1)) return {0, 0, 0, -1, 0};
    const int block = (in >> 3) * FIXED(columns(L + 1)) + (out >> 3);
    return {
        L, in, out, FIXED(flat_weight(L)) + in * width(L + 1) + out,
        FIXED(weight_at(L)) + block * BLOCK_BYTES + (in & 7) * 16 + (out & 7) * 2};
}

template <int I = 0>
__device__ __forceinline__ Place locate_weight(int chunk, int element) {
    if constexpr (I < ITEM_COUNT) {
        constexpr Item ITEM = item(I);
        const int own = chunk - FIXED(item_chunk(I));
        if (own < FIXED(4 * item_columns(I))) {
            const int lane = element >> 2;
            const int row = 64 * ITEM.block + 16 * (own & 3) + (lane >> 2) + 8 * (element >> 1 & 1);
            const int column = 8 * (own >> 2) + 2 * (lane & 3) + (element & 1);
            return ITEM.out_major ? weight_place<ITEM.layer>(column, row) : weight_place<ITEM.layer>(row, column);
        }
        return locate_weight<I + 1>(chunk, element);
    }
    return {0, 0, 0, -1, 0};
}

template <int L = 0>
__device__ __forceinline__ Place locate_bias(int slot) {
    if constexpr (L < LAYERS) {
        if (slot < FIXED(padded(L + 1)))
            return {
                L, -1, slot, slot < width(L + 1) ? FIXED(flat_bias(L)) + slot : -1, FIXED(bias_at(L)) + slot * 4};
        return locate_bias<L + 1>(slot - FIXED(padded(L + 1)));
    }
    return {0, 0, 0, -1, 0};
}

// Element 0 to 127 of a chunk.
__device__ __forceinline__ Place locate(int chunk, int element) {
    if (chunk < WEIGHT_CHUNKS) return locate_weight(chunk, element);
    return locate_bias((chunk - WEIGHT_CHUNKS) * CHUNK + element);
}

}  // namespace narrow
