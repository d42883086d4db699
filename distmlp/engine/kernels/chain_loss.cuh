// Loss and its derivative at the output layer's sums.
#pragma once
#include "chain_layers.cuh"

namespace chain {

constexpr int OUTPUTS = width(LAYERS);
static_assert(LOSS != SOFTMAX_CROSS_ENTROPY || OUTPUTS <= 64 * GROUPS, "a row's logits are in registers at once");

// Index of the block's row of sum i (of either feature).
__device__ __forceinline__ int row_of_sum(const Place& place, int i) { return 8 * (i >> 2) + 2 * place.q + (i & 1); }

// Targets of a thread's sums, standardized; zero beyond the outputs and the batch.
struct Targets {
    float x[LABELS ? 1 : SUMS];

    __device__ __forceinline__ void load(const Place& place, const RowTable& table, int feature) {
        if (LABELS) return;
#pragma unroll
        for (int i = 0; i < SUMS; i += i & 1 ? 3 : 1) {  // of the rows' first feature; the second one is two further
            const int r = row_of_sum(place, i);
            const float* from = context.raw.targets + (i64)table.row[r] * OUTPUTS + feature;
            x[LABELS ? 0 : i] = feature < OUTPUTS && table.has(r) ? __ldg(from) : 0.f;
            x[LABELS ? 0 : i + 2] = feature + 8 < OUTPUTS && table.has(r) ? __ldg(from + 8) : 0.f;
        }
    }
    __device__ __forceinline__ void finish(int feature) {
        if (LABELS || !ENGINE.target_mean_high) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = min(feature + 8 * h, OUTPUTS - 1);
            const float high = ENGINE.target_mean_high[f], low = ENGINE.target_mean_low[f], factor = ENGINE.target_factor[f];
#pragma unroll
            for (int i = 2 * h; i < SUMS; i += i & 1 ? 3 : 1) {
                float& of = x[LABELS ? 0 : i];
                of = ((of - high) - low) * factor;
            }
        }
    }
    __device__ __forceinline__ float at(int i) const { return LABELS ? 0.f : x[LABELS ? 0 : i]; }
};

// Sums without bias to errors, in place; returns the thread's part of the weighted loss.
__device__ __forceinline__ float errors_of_sums(
    const Place& place, const RowTable& table, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS]) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < SUMS; i += i & 1 ? 3 : 1) {
        const int r = row_of_sum(place, i);
        const float weight = table.weight[r] * (1.f / OUTPUTS);
        const bool there = table.has(r);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int j = i + 2 * h;
            float of_activation, of_loss;
            const float y = activate(OUTPUT_ACTIVATION, sums[j] + (h ? b1 : b0), of_activation);
            const float loss = output_loss(y, targets.at(j), ENGINE.huber_delta, of_loss);
            const bool counts = there && feature + 8 * h < OUTPUTS;
            total += counts ? weight * loss : 0.f;
            sums[j] = counts ? weight * of_loss * of_activation : 0.f;
        }
    }
    return total;
}

// The same for softmax; a row's classes are spread over lanes, warps and warpgroups, which meet at `scratch`.
__device__ __forceinline__ float softmax_of_sums(
    const Place& place, const RowTable& table, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS],
    float* scratch) {
    constexpr int ROW_SUMS = SUMS / 2;  // rows of a thread
    const int warp = 4 * place.group + place.warp;
    float4* of_warps = (float4*)scratch;  // (ROWS, 16): largest, then sums
    const auto over_features = [](float x, bool largest) {
#pragma unroll
        for (int mask = 4; mask < 32; mask <<= 1) {
            const float y = __shfl_xor_sync(~0u, x, mask);
            x = largest ? fmaxf(x, y) : x + y;
        }
        return x;
    };
    const float lowest = -__int_as_float(0x7f800000);
    float total_loss = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {  // sums 4 (i / 2) + i % 2 and 2 further
        const int at = 4 * (i >> 1) + (i & 1);
        sums[at] += b0, sums[at + 2] += b1;
        float largest = feature < OUTPUTS ? sums[at] : lowest;
        if (feature + 8 < OUTPUTS) largest = fmaxf(largest, sums[at + 2]);
        largest = over_features(largest, true);
        if (place.lane < 4) of_warps[row_of_sum(place, at) * 16 + warp].x = largest;
    }
    meet(ROWS_MEET, WORKERS);
    float shift[ROW_SUMS];
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1);
        float largest = lowest;
#pragma unroll 4
        for (int w = 0; w < 16; ++w) largest = fmaxf(largest, of_warps[row_of_sum(place, at) * 16 + w].x);
        shift[i] = largest;
    }
    meet(ROWS_MEET, WORKERS);
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1), label = table.label[row_of_sum(place, at)];
        float total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = feature + 8 * h, j = at + 2 * h;
            if (f >= OUTPUTS) continue;
            const float shifted = sums[j] - shift[i], goal = LABELS ? (f == label ? 1.f : 0.f) : targets.at(j);
            sums[j] = expf(shifted);
            total += sums[j];
            mass += goal;
            inner += goal != 0.f ? goal * shifted : 0.f;
        }
        total = over_features(total, false);
        mass = over_features(mass, false);
        inner = over_features(inner, false);
        if (place.lane < 4) of_warps[row_of_sum(place, at) * 16 + warp] = make_float4(total, mass, inner, 0.f);
    }
    meet(ROWS_MEET, WORKERS);
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1), r = row_of_sum(place, at), label = table.label[r];
        float total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll 4
        for (int w = 0; w < 16; ++w) {
            const float4 part = of_warps[r * 16 + w];
            total += part.x, mass += part.y, inner += part.z;
        }
        if (LABELS) mass = label < 0 || label >= OUTPUTS ? __int_as_float(0x7fc00000) : 1.f;
        const bool there = table.has(r);
        const float scale = mass / total, weight = table.weight[r];
        if (there && place.lane < 4 && warp == 0) total_loss += weight * (mass * logf(total) - inner);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = feature + 8 * h, j = at + 2 * h;
            const float goal = LABELS ? (f == label ? 1.f : 0.f) : targets.at(j);
            sums[j] = there && f < OUTPUTS ? weight * (sums[j] * scale - goal) : 0.f;
        }
    }
    meet(ROWS_MEET, WORKERS);  // before the errors take the place of the sums
    return total_loss;
}

}  // namespace chain
