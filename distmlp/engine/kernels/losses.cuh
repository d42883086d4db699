// Losses of single outputs and of softmax rows. Means over outputs and weights are the caller's.
#pragma once
#include "activations.cuh"

// Loss of one output `y` (a logit for binary cross-entropy); writes its derivative by `y` to `slope`.
__device__ __forceinline__ float output_loss(float y, float target, float delta, float& slope) {
    const float error = y - target;
    switch (LOSS) {
        case MSE:
            slope = 2.f * error;
            return error * error;
        case MAE:
            slope = error > 0.f ? 1.f : error < 0.f ? -1.f : 0.f;
            return fabsf(error);
        case HUBER: {
            const float clipped = fminf(fmaxf(error, -delta), delta);
            slope = clipped;
            return clipped * (error - 0.5f * clipped);  // e^2 / 2 inside, delta (|e| - delta / 2) outside
        }
        case BINARY_CROSS_ENTROPY:
            slope = logistic(y) - target;
            return (y < 0.f ? 0.f : y) - y * target + log1pf(expf(-fabsf(y)));
    }
    return 0.f;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}

// Softmax cross-entropy of one row by one warp. `logits` (classes) float; `label` or `targets` (classes) as LABELS
// says. Calls `put(column, derivative)` for every column once and returns the loss to every lane. A label outside
// the classes gives NaN: the batch then counts as not finite.
template <class Put>
__device__ __forceinline__ float softmax_row(
    const float* logits, int classes, int label, const float* targets, const Put& put) {
    const int lane = threadIdx.x & 31;
    float largest = -__int_as_float(0x7f800000);
    for (int c = lane; c < classes; c += 32) largest = fmaxf(largest, logits[c]);
    largest = warp_max(largest);
    float total = 0.f, mass = 0.f, inner = 0.f;
    for (int c = lane; c < classes; c += 32) {
        const float shifted = logits[c] - largest;
        total += expf(shifted);
        if (LABELS) {
            if (c == label) inner += shifted;
        } else {
            mass += targets[c];
            inner += targets[c] * shifted;
        }
    }
    total = warp_sum(total);
    inner = warp_sum(inner);
    mass = LABELS ? 1.f : warp_sum(mass);  // 1 for one-hot rows
    if (LABELS && (label < 0 || label >= classes)) mass = __int_as_float(0x7fc00000);
    const float scale = mass / total;
    for (int c = lane; c < classes; c += 32) {
        const float target = LABELS ? (c == label ? 1.f : 0.f) : targets[c];
        put(c, expf(logits[c] - largest) * scale - target);
    }
    return mass * logf(total) - inner;
}
