// The network as the compiler knows it, for kernels made for one network.
//
// Macros: WIDTHS all widths, comma separated; ACTIVATIONS one per layer (codes.cuh).
#pragma once
#include "types.cuh"

#define SHAPE_FN __host__ __device__ constexpr

namespace network {

// An integer expression that is certainly evaluated by the compiler.
template <int VALUE>
struct Fixed {
    static constexpr int value = VALUE;
};
#define FIXED(...) (network::Fixed<(__VA_ARGS__)>::value)

// Lists are local to functions: device code may not refer to a constant array of the namespace.
SHAPE_FN int count_widths() {
    constexpr int widths[] = {WIDTHS};
    return sizeof(widths) / sizeof(int);
}
SHAPE_FN int width(int i) {
    constexpr int widths[] = {WIDTHS};
    return widths[i];
}
SHAPE_FN int activation(int layer) {
    constexpr int kinds[] = {ACTIVATIONS};
    return kinds[layer];
}
constexpr int LAYERS = count_widths() - 1;

// Flat parameter layout, as distmlp/network.py.
SHAPE_FN int aligned(int n) { return (n + 31) / 32 * 32; }
SHAPE_FN int flat_weight(int layer) {
    int at = 0;
    for (int i = 0; i < layer; ++i) at = aligned(aligned(at + width(i) * width(i + 1)) + width(i + 1));
    return at;
}
SHAPE_FN int flat_bias(int layer) { return aligned(flat_weight(layer) + width(layer) * width(layer + 1)); }

}  // namespace network
