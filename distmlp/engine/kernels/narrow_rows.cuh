// Rows of the raw store for the narrow kernel: picked by the index table and standardized on their way into registers.
#pragma once
#include "gather.cuh"
#include "narrow_shape.cuh"

namespace narrow {

// Mean (high, low) and factor of every input and target column, in shared memory: 0, 0 and 1 where there is none.
constexpr int SCALES = padded(0) + padded(LAYERS);
constexpr int SCALES_AT = EXCHANGE_AT + EXCHANGE_BYTES;
constexpr int SHARED_BYTES = SCALES_AT + 3 * SCALES * 4;

__device__ __forceinline__ void load_scales(float* scales) {
    for (int i = threadIdx.x; i < SCALES; i += BLOCK_THREADS) {
        const bool input = i < FIXED(padded(0));
        const int c = input ? i : i - FIXED(padded(0));
        const float* high = input ? ENGINE.input_mean_high : ENGINE.target_mean_high;
        const float* low = input ? ENGINE.input_mean_low : ENGINE.target_mean_low;
        const float* factor = input ? ENGINE.input_factor : ENGINE.target_factor;
        const bool some = high && c < (input ? FIXED(width(0)) : FIXED(width(LAYERS)));
        scales[i] = some ? high[c] : 0.f;
        scales[SCALES + i] = some ? low[c] : 0.f;
        scales[2 * SCALES + i] = some ? factor[c] : 1.f;
    }
}

// The two rows that a thread works on: g and g + 8 of its warp's 16 (lane 4 g + t).
struct RowPair {
    i64 row[2];       // in the raw store
    bool there[2];    // else beyond the end of the batch: counts nothing
    float weight[2];  // sample weight, 0 if not there
    int label[2];

    // First `row`, which everything else is loaded by; `at`: position of the first of the two in the batch.
    __device__ __forceinline__ void pick(const Raw& raw, const StepInfo& info, int at) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            there[half] = at + 8 * half < info.rows;
            row[half] = there[half] ? raw_row(raw, info.first + at + 8 * half) : 0;
        }
    }
    __device__ __forceinline__ void load(const Raw& raw) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weight[half] = there[half] ? raw.weights ? raw.weights[row[half]] : 1.f : 0.f;
            label[half] = LABELS && there[half] ? raw.labels[row[half]] : 0;
        }
    }
};

__device__ __forceinline__ float scaled(const float* scales, int i, float x) {
    return ((x - scales[i]) - scales[SCALES + i]) * scales[2 * SCALES + i];
}
__device__ __forceinline__ float scaled(const float* scales, int i, double x) {  // before it is rounded
    return (float)((x - (double)scales[i]) - (double)scales[SCALES + i]) * scales[2 * SCALES + i];
}

// Columns `c` and `c + 1` (c even) of a float32 row of COUNT columns; anything beyond.
template <int COUNT>
__device__ __forceinline__ float2 load_columns(const float* row, int c) {
    if constexpr (COUNT % 2 == 0)
        return c < COUNT ? __ldg((const float2*)(row + c)) : make_float2(0.f, 0.f);
    else
        return make_float2(row[c < COUNT ? c : 0], row[c + 1 < COUNT ? c + 1 : 0]);
}
// The same two standardized by `scales` from `at` on; 0 beyond.
template <int COUNT>
__device__ __forceinline__ float2 scale_columns(float2 x, int c, const float* scales, int at) {
    return make_float2(
        c < COUNT ? scaled(scales, at + c, x.x) : 0.f, c + 1 < COUNT ? scaled(scales, at + c + 1, x.y) : 0.f);
}

// Column `c` of input row `row` of any type. 32 bits and more are standardized before they are rounded.
__device__ __forceinline__ float raw_column(const void* inputs, i64 row, int c, const float* scales) {
    const i64 at = row * width(0) + c;
    switch (ENGINE.raw_type) {
        case RAW_U8: return scaled(scales, c, (float)((const u8*)inputs)[at]);
        case RAW_I8: return scaled(scales, c, (float)((const signed char*)inputs)[at]);
        case RAW_U16: return scaled(scales, c, (float)((const u16*)inputs)[at]);
        case RAW_I16: return scaled(scales, c, (float)((const short*)inputs)[at]);
        case RAW_F16: return scaled(scales, c, half_to_float(((const u16*)inputs)[at]));
        case RAW_F32: return scaled(scales, c, ((const float*)inputs)[at]);
        case RAW_U32: return scaled(scales, c, (double)((const u32*)inputs)[at]);
        case RAW_I32: return scaled(scales, c, (double)((const int*)inputs)[at]);
        case RAW_U64: return scaled(scales, c, (double)((const u64*)inputs)[at]);
        case RAW_I64: return scaled(scales, c, (double)((const i64*)inputs)[at]);
        case RAW_F64: return scaled(scales, c, ((const double*)inputs)[at]);
    }
    return 0.f;
}

}  // namespace narrow
