// The output layer of a strip: from the last sums to the loss and its errors.
#pragma once
#include "losses.cuh"
#include "strips_warp.cuh"

namespace strips {

constexpr int OUTPUTS = width(LAYERS);

// What a thread adds up over its rows.
struct Totals {
    float loss, weight;
};

__device__ __forceinline__ int output_column(const Strip& strip, int i) {
    return 32 * (i >> 3) + 8 * strip.t() + (i & 7);
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A thread's quarter of the targets of a row, as they were read.
template <int COUNT>
__device__ __forceinline__ void load_targets(const Strip& strip, const Raw& raw, i64 row, float (&goal)[COUNT]) {
    const float* from = raw.targets + row * OUTPUTS;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const int c = output_column(strip, i);
        if (OUTPUTS % 4 == 0) {
            const float4 v = row >= 0 && c < OUTPUTS ? *(const float4*)(from + c) : make_float4(0.f, 0.f, 0.f, 0.f);
            goal[i] = v.x, goal[i + 1] = v.y, goal[i + 2] = v.z, goal[i + 3] = v.w;
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) goal[i + k] = row >= 0 && c + k < OUTPUTS ? from[c + k] : 0.f;
        }
    }
}
template <int COUNT>
__device__ __forceinline__ void standardize_targets(const Strip& strip, float (&goal)[COUNT]) {
    if (!ENGINE.target_mean_high) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (output_column(strip, i) < OUTPUTS)
            goal[i] = standardize(
                goal[i], ENGINE.target_mean_high, ENGINE.target_mean_low, ENGINE.target_factor,
                output_column(strip, i));
}

// From a row's sums without bias to errors; a row is spread over the four lanes of a quad.
template <int COUNT>
__device__ __forceinline__ void output_row(
    const Strip& strip, const Raw& raw, i64 row, float weight, float (&z)[COUNT], float (&goal)[COUNT], Totals& totals) {
    const bool there = row >= 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) z[i] += strip.biases<LAYERS - 1>(0)[output_column(strip, i)];
    if (LOSS != SOFTMAX_CROSS_ENTROPY) {
        float loss = 0.f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float of_loss, of_activation;
            const float y = activate(OUTPUT_ACTIVATION, z[i], of_activation);
            const float l = output_loss(y, goal[i], ENGINE.huber_delta, of_loss);
            const bool counts = there && output_column(strip, i) < OUTPUTS;
            loss += counts ? l : 0.f;
            z[i] = counts ? weight * (1.f / OUTPUTS) * of_loss * of_activation : 0.f;
        }
        totals.loss += weight * loss * (1.f / OUTPUTS);
        return;
    }
    const int label = LABELS && there ? raw.labels[row] : 0;
    float largest = -__int_as_float(0x7f800000), total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (output_column(strip, i) < OUTPUTS) largest = fmaxf(largest, z[i]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool counts = output_column(strip, i) < OUTPUTS;
        if (LABELS) goal[i] = output_column(strip, i) == label ? 1.f : 0.f;
        const float shifted = z[i] - largest;
        z[i] = counts ? expf(shifted) : 0.f;
        total += z[i];
        mass += counts ? goal[i] : 0.f;
        inner += counts && goal[i] != 0.f ? goal[i] * shifted : 0.f;
    }
    total = quad_sum(total);
    mass = quad_sum(mass);
    inner = quad_sum(inner);
    if (LABELS && (label < 0 || label >= OUTPUTS)) mass = __int_as_float(0x7fc00000);
    const float scale = mass / total;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        z[i] = there && output_column(strip, i) < OUTPUTS ? weight * (z[i] * scale - goal[i]) : 0.f;
    if (there && strip.t() == 0) totals.loss += weight * (mass * logf(total) - inner);
}

// Loss of the warp's pieces, and the errors at the output layer's sums.
__device__ __forceinline__ void output(const Strip& at_large, const Raw& raw, int rows, Totals& totals) {
    const Strip strip = at_large.here();
    constexpr int COLUMNS = padded(LAYERS);
    constexpr bool EARLY = !LABELS && COLUMNS == 32;  // targets are asked for ahead of the products
#pragma unroll 1
    for (int first = strip.warp * PIECE; first < rows; first += WARPS * PIECE) {
        float early[TILES][2][EARLY ? COLUMNS / 4 : 1];
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i)
                load_targets(strip, raw, row_numbers()[first + 8 * i + strip.g()], early[i >> 1][i & 1]);
        }
        Sums<COLUMNS> sums;
        strip.products_up<LAYERS - 1>(first, 0, LAYERS - 1, sums);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = first + 16 * m + 8 * half + strip.g();
                const i64 row = row_numbers()[r];
                const float weight = row < 0 ? 0.f : raw.weights ? raw.weights[row] : 1.f;
                if (strip.t() == 0) totals.weight += weight;
                float z[COLUMNS / 4], goal[COLUMNS / 4];
                if (!LABELS && !EARLY) load_targets(strip, raw, row, goal);
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; ++i) {
                    z[i] = sums.at(m, half, i >> 3, i & 7);
                    if (EARLY) goal[i] = early[m][half][EARLY ? i : 0];
                }
                if (!LABELS) standardize_targets(strip, goal);
                output_row(strip, raw, row, weight, z, goal, totals);
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; i += 4)
                    strip.store_row<LAYERS>(
                        0, r, output_column(strip, i), to_elements(z[i], z[i + 1], z[i + 2], z[i + 3]));
            }
    }
}

}  // namespace strips
