// Whether gradients can be told to be finite from the magnitudes of a step.
#pragma once
#include "params.cuh"

// A thread's share of `surely_finite`, that of thread `own` of `threads`.
__device__ __forceinline__ bool surely_finite_share(
    const Flags& flags, u32 inputs, float weight, int rows, int own, int threads) {
    bool sure = true;
    const float largest = fminf(largest_sum(weight), 1e38f);
    for (int l = own; l < ENGINE.layers; l += threads) {
        const float product = __uint_as_float(l ? flags.output[l] : inputs) * __uint_as_float(flags.error[l]) * (float)rows;
        const float sum = __uint_as_float(flags.error[l]) * (float)rows;
        sure = sure && product < largest && sum < largest;
    }
    return sure && __uint_as_float(flags.loss) * 1e6f < 1e38f && is_finite(weight) && weight != 0.f;
}

// True in every block or in none: no gradient of this step can be NaN or too large, as told from the magnitudes.
// `inputs`: that of the inputs.
__device__ __forceinline__ bool surely_finite(const Flags& flags, u32 inputs, float weight, int rows) {
    return __syncthreads_and(surely_finite_share(flags, inputs, weight, rows, threadIdx.x, blockDim.x));
}
