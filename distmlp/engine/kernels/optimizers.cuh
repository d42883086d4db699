// Update rules for one parameter. Semantics are PyTorch's; lamb is that of You et al. 2020.
#pragma once
#include "types.cuh"

// What the rules need besides the parameter, the same for all parameters of a step.
struct Hyper {
    float rate;            // learning rate of this step
    float scale;           // gradient sums are multiplied by this: 1 / sum of weights, and clipping
    float weight_decay;
    float momentum, beta1, beta2, rho, epsilon;
    float rest1, rest2, rest_rho;  // 1 - beta1 and so on: in float32 the difference would lose five digits
    float correction1;     // 1 / (1 - beta1^step)
    float correction2;     // 1 / sqrt(1 - beta2^step)
    float ema_decay;
};

__device__ __forceinline__ constexpr bool has_first_slot() { return OPTIMIZER != SGD && OPTIMIZER != RMSPROP; }
__device__ __forceinline__ constexpr bool has_second_slot() { return OPTIMIZER == RMSPROP || OPTIMIZER >= ADAM; }

#ifndef LARGE_EPSILON  // whether it outweighs the root of any number that has lost digits below float32's normal range
#define LARGE_EPSILON 0
#endif

// Within two units in the last place, at a fraction of the instructions of the exact ones.
__device__ __forceinline__ float root(float x) {
    float y;
#if LARGE_EPSILON
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
#endif
    return y;
}
// x / y for a y to which epsilon has been added.
__device__ __forceinline__ float quotient(float x, float y) {
#if LARGE_EPSILON
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(y));
    return x * y;
#else
    return __fdividef(x, y);
#endif
}

// The Adam direction m^ / (sqrt(v^) + eps); updates both moments.
__device__ __forceinline__ float adam_direction(const Hyper& h, float g, float& first, float& second) {
    first = h.beta1 * first + h.rest1 * g;
    second = h.beta2 * second + h.rest2 * g * g;
    return quotient(h.correction1 * first, root(second) * h.correction2 + h.epsilon);
}

// New value of parameter `p` for the sum of gradients `sum`; `first` and `second` are its optimizer slots.
// For LAMB returns the direction instead: the caller scales it by the trust ratio of the tensor.
__device__ __forceinline__ float update_rule(const Hyper& h, float p, float sum, float& first, float& second) {
    float g = sum * h.scale;
    switch (OPTIMIZER) {
        case ADAMW: {
            const float step = h.rate * adam_direction(h, g, first, second);
            return p * (1.f - h.rate * h.weight_decay) - step;
        }
        case LAMB: return adam_direction(h, g, first, second) + h.weight_decay * p;
    }
    g += h.weight_decay * p;
    switch (OPTIMIZER) {
        case SGD: return p - h.rate * g;
        case MOMENTUM:
            first = h.momentum * first + g;
            return p - h.rate * first;
        case NESTEROV:
            first = h.momentum * first + g;
            return p - h.rate * (g + h.momentum * first);
        case RMSPROP:
            second = h.rho * second + h.rest_rho * g * g;
            return p - h.rate * quotient(g, root(second) + h.epsilon);
    }
    return p - h.rate * adam_direction(h, g, first, second);
}

__device__ __forceinline__ float average(float decay, float mean, float value) {
    return decay * mean + (1.f - decay) * value;
}

// beta^step by squaring in float64: 1 - beta2^step keeps its digits from the first step on.
__device__ __forceinline__ double power(double base, u64 exponent) {
    double result = 1.;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}
__device__ __forceinline__ void set_corrections(Hyper& h, double beta1, double beta2, u64 step) {
    h.correction1 = (float)(1. / (1. - power(beta1, step)));
    h.correction2 = (float)(1. / sqrt(1. - power(beta2, step)));
}
