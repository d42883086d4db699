// Which layers a pass is about, and where in shared memory lies what it needs.
//
// Macro NARROW_PASSES (from plan_passes.py), beside those of narrow_shape.cuh: {low, high}, …, the upmost layers first.
// A pass sums the weight gradients of layers low to high - 1. It has their inputs and the errors of their outputs in
// shared memory; all passes share the place, behind the weights and the network's inputs.
#pragma once
#include "narrow_slots.cuh"

namespace narrow {

struct Pass {
    int low, high;
};
SHAPE_FN int count_passes() {
    constexpr Pass passes[] = {NARROW_PASSES};
    return sizeof(passes) / sizeof(Pass);
}
SHAPE_FN Pass pass(int p) {
    constexpr Pass passes[] = {NARROW_PASSES};
    return passes[p];
}
constexpr int PASSES = count_passes();

// The slope of activation `i` is stored on the way up, as stores_slope says.
SHAPE_FN bool slope_waits(int i) {
    const int kind = activation(i - 1);
    return kind != RELU && kind != LEAKY_RELU && kind != IDENTITY;
}
SHAPE_FN int larger(int a, int b) { return a > b ? a : b; }

constexpr int PASS_AT = activation_at(1);
SHAPE_FN int input_at(int p, int i) {  // input of layer i, low <= i < high
    if (i == 0) return activation_at(0);
    int at = PASS_AT;
    for (int k = larger(pass(p).low, 1); k < i; ++k) at += TILE / 8 * activation_columns(k) * BLOCK_BYTES;
    return at;
}
// Errors at the output of layers; those that leave for the next pass have a place only where a slope waits in it.
SHAPE_FN int first_error(int p) { return pass(p).low + (pass(p).low > 0 && slope_waits(pass(p).low) ? 0 : 1); }
SHAPE_FN int error_at(int p, int i) {  // dZ of layer i - 1, first_error <= i <= high
    int at = input_at(p, pass(p).high - 1) + TILE / 8 * activation_columns(pass(p).high - 1) * BLOCK_BYTES;
    if (pass(p).high == 1) at = PASS_AT;
    for (int k = first_error(p); k < i; ++k) at += TILE / 8 * columns(k) * BLOCK_BYTES;
    return at;
}
SHAPE_FN int pass_end() {
    int end = PASS_AT + EXCHANGE_BYTES;  // the exchange's scratch takes the place of what the passes had
    for (int p = 0; p < PASSES; ++p) end = larger(end, error_at(p, pass(p).high + 1) + OVERREAD);
    return end;
}
constexpr int SCRATCH_AT = PASS_AT;
constexpr int PASS_SCALES_AT = pass_end();
constexpr int TALLY_AT = PASS_SCALES_AT + 3 * (padded(0) + padded(LAYERS)) * 4;
constexpr int TALLY_FLOATS = 4 + padded(LAYERS);  // of a warp
constexpr int ROWS_AT = TALLY_AT + WARPS * TALLY_FLOATS * 4;
constexpr int PASSES_BYTES = ROWS_AT + TILE * 16;  // number, weight and label of a tile's rows

SHAPE_FN int pass_sums(int p) {  // floats a thread keeps
    int most = 0;
    for (int i = 0; i < ITEM_COUNT; ++i)
        if (item(i).layer >= pass(p).low && item(i).layer < pass(p).high)
            most = larger(
                most, item(i).offset + 4 * (item(i).out_major ? columns(item(i).layer) + 1 : columns(item(i).layer + 1)));
    return most;
}
// Chunks of the gradients of pass `p` and those before it: items are in their order.
SHAPE_FN int pass_chunks(int p) {
    int chunks = 0;
    for (int i = 0; i < ITEM_COUNT; ++i)
        if (item(i).layer >= pass(p).low) chunks += 4 * item_columns(i);
    return chunks;
}

// The input that pass `p` begins with: its lowest one, or the network's where what lies in between is cheaper to compute
// anew than to leave in device memory and fetch.
SHAPE_FN int begins_with(int p) {
    int products = 0;
    for (int i = 0; i < pass(p).low; ++i) products += padded(i) * padded(i + 1);
    return p == 0 || NARROW_DIRECT && products < 200 * padded(pass(p).low) ? 0 : pass(p).low;
}
// A thread's share of a tile's rows on their way from one pass to another, in vectors of 16 bytes: the inputs that passes
// begin with, and the slope where that waits; then the errors, in one place for all.
SHAPE_FN int input_vectors(int p) { return columns(begins_with(p)) / 2; }
SHAPE_FN bool keeps_slope(int p) { return begins_with(p) > 0 && slope_waits(begins_with(p)); }
SHAPE_FN int begins_first(int p) {  // the first pass that begins with the same input
    for (int k = 1; k < p; ++k)
        if (begins_with(k) == begins_with(p)) return k;
    return p;
}
SHAPE_FN int input_vector_at(int p) {
    int at = 0;
    for (int k = 1; k < (p < PASSES ? begins_first(p) : p); ++k)
        if (begins_first(k) == k) at += input_vectors(k) * (keeps_slope(k) ? 2 : 1);
    return at;
}
SHAPE_FN int error_vectors() {
    int most = 0;
    for (int p = 0; p < PASSES; ++p) most = larger(most, pass(p).low > 0 ? columns(pass(p).low) / 2 : 0);
    return most;
}
constexpr int ERRORS_VECTOR_AT = input_vector_at(PASSES), KEPT_VECTORS = ERRORS_VECTOR_AT + error_vectors();
// The first pass that begins with input `i`, or 0.
SHAPE_FN int pass_from(int i) {
    for (int p = 1; p < PASSES; ++p)
        if (begins_with(p) == i) return p;
    return 0;
}

}  // namespace narrow
