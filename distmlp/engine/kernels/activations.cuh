// Activation functions and their slopes. Semantics are PyTorch's (gelu is the exact one, elu has alpha 1).
#pragma once
#include "types.cuh"

#define LEAKY_SLOPE 0.01f

__device__ __forceinline__ float logistic(float z) { return __fdividef(1.f, 1.f + expf(-z)); }

// f(z); writes f'(z) to `slope`. `kind` is a constant where the kernel is specialised. NaN goes through.
__device__ __forceinline__ float activate(int kind, float z, float& slope) {
    switch (kind) {
        case RELU:
            slope = z > 0.f ? 1.f : 0.f;
            return z < 0.f ? 0.f : z;
        case LEAKY_RELU:
            slope = z > 0.f ? 1.f : LEAKY_SLOPE;
            return z * slope;
        case ELU: {
            const float below = expm1f(z);
            slope = z > 0.f ? 1.f : below + 1.f;
            return z > 0.f ? z : below;
        }
        case GELU: {
            const float cdf = normcdff(z);
            slope = cdf + z * (expf(-0.5f * z * z) * 0.3989422804f);  // 1 / sqrt(2 pi)
            return z * cdf;
        }
        case SILU: {
            const float s = logistic(z);
            slope = s * (1.f + z * (1.f - s));
            return z * s;
        }
        case TANH: {
            const float y = tanhf(z);
            slope = 1.f - y * y;
            return y;
        }
        case SIGMOID: {
            const float y = logistic(z);
            slope = y * (1.f - y);
            return y;
        }
        case SOFTPLUS:
            slope = logistic(z);
            return (z < 0.f ? 0.f : z) + log1pf(expf(-fabsf(z)));
        case SINE:
            slope = cosf(z);
            return sinf(z);
    }
    slope = 1.f;
    return z;
}

// Whether the slope is stored in the forward pass. It is where the output does not tell it, or where it would
// come from the difference of an output rounded to bfloat16 and 1.
__device__ __forceinline__ bool stores_slope(int kind) {
    if (kind == GELU || kind == SILU || kind == SINE) return true;
    return PRODUCT == BF16 && (kind == TANH || kind == SIGMOID || kind == SOFTPLUS || kind == ELU);
}

// f'(z) from y = f(z), for the kinds that do not store it.
__device__ __forceinline__ float slope_of_output(int kind, float y) {
    switch (kind) {
        case RELU: return y > 0.f ? 1.f : 0.f;
        case LEAKY_RELU: return y > 0.f ? 1.f : LEAKY_SLOPE;
        case ELU: return y > 0.f ? 1.f : y + 1.f;
        case TANH: return 1.f - y * y;
        case SIGMOID: return y * (1.f - y);
        case SOFTPLUS: return -expm1f(-y);  // logistic(z) = 1 - exp(-softplus(z))
    }
    return 1.f;
}
