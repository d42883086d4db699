// Rows of the raw store → a batch: picked by the index table, standardized, rounded, padded. Targets are read where
// the loss needs them.
#pragma once
#include "params.cuh"
#include "reduce.cuh"

__device__ __forceinline__ float raw_to_float(float x) { return x; }
struct Half {
    u16 bits;
};
__device__ __forceinline__ float raw_to_float(Half x) { return half_to_float(x.bits); }
template <class T>
__device__ __forceinline__ float raw_to_float(T x) {
    return (float)x;
}

// (x - mean) / deviation with the mean in two floats, so that a mean much larger than the deviation costs no digits.
__device__ __forceinline__ float standardize(float x, const float* high, const float* low, const float* factor, int c) {
    return high ? ((x - high[c]) - low[c]) * factor[c] : x;
}
__device__ __forceinline__ float standardize(double x, const float* high, const float* low, const float* factor, int c) {
    return high ? (float)((x - (double)high[c]) - (double)low[c]) * factor[c] : (float)x;
}

// One row by one warp; returns the largest magnitude this lane wrote, as bits.
template <class T, class Wide>
__device__ __forceinline__ u32 gather_inputs(const T* raw, Element* out, int features, int padded) {
    u32 largest = 0;
    if constexpr (sizeof(T) == 4) {
        if (features == padded) {  // rows of whole 32-byte pieces
            for (int c = (threadIdx.x & 31) * 4; c < features; c += 128) {
                float4 v = *(const float4*)(raw + c);
                if (ENGINE.input_mean_high) {
                    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low;
                    const auto scale = [&](float& x, int k) {
                        x = standardize(x, high, low, ENGINE.input_factor, c + k);
                    };
                    scale(v.x, 0), scale(v.y, 1), scale(v.z, 2), scale(v.w, 3);
                }
                largest = max(largest, magnitude_bits(v));
                store_quad(out + c, v);
            }
            return largest;
        }
    }
    for (int c = threadIdx.x & 31; c < padded; c += 32) {
        float value = 0.f;
        if (c < features)
            value = standardize(
                (Wide)raw_to_float(raw[c]), ENGINE.input_mean_high, ENGINE.input_mean_low, ENGINE.input_factor, c);
        largest = max(largest, magnitude_bits(value));
        out[c] = to_element(value);
    }
    return largest;
}
template <class T>
__device__ __forceinline__ u32 gather_exact(const T* raw, Element* out, int features, int padded) {
    u32 largest = 0;  // 8-byte types: standardized before they are rounded
    for (int c = threadIdx.x & 31; c < padded; c += 32) {
        float value = 0.f;
        if (c < features)
            value = standardize(
                (double)raw[c], ENGINE.input_mean_high, ENGINE.input_mean_low, ENGINE.input_factor, c);
        largest = max(largest, magnitude_bits(value));
        out[c] = to_element(value);
    }
    return largest;
}

template <int TYPE>
__device__ __forceinline__ u32 gather_any(const void* raw, i64 row, Element* out, int features, int padded) {
#define RAW_CASE(code, type) \
    if constexpr (TYPE == code) return gather_inputs<type, float>((const type*)raw + row * features, out, features, padded)
#define EXACT_CASE(code, type) \
    if constexpr (TYPE == code) return gather_exact<type>((const type*)raw + row * features, out, features, padded)
    RAW_CASE(RAW_U8, u8);
    RAW_CASE(RAW_I8, signed char);
    RAW_CASE(RAW_U16, u16);
    RAW_CASE(RAW_I16, short);
    RAW_CASE(RAW_F16, Half);
    RAW_CASE(RAW_F32, float);
    EXACT_CASE(RAW_U32, u32);
    EXACT_CASE(RAW_I32, int);
    EXACT_CASE(RAW_U64, u64);
    EXACT_CASE(RAW_I64, i64);
    EXACT_CASE(RAW_F64, double);
#undef RAW_CASE
#undef EXACT_CASE
    return 0;
}

__device__ __forceinline__ i64 raw_row(const Raw& raw, i64 position) {
    return raw.index ? (i64)raw.index[position] : position;
}

// `rows` rows from position `first` on into `batch`, one warp a row, the grid's warps in turn.
// Writes every element of those rows, padding included. `largest`, if not null, collects the inputs' magnitude.
template <int TYPE>
__device__ __noinline__ void gather_rows(const Raw& raw, i64 first, int rows, const Batch& batch, u32* largest) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const Layer& bottom = ENGINE.layer[0];
    u32 seen = 0;
    for (int r = blockIdx.x + gridDim.x * (threadIdx.x >> 5); r < rows; r += gridDim.x * warps) {
        const i64 row = raw_row(raw, first + r);
        seen = max(seen, gather_any<TYPE>(
                             raw.inputs, row, batch.inputs + (i64)r * bottom.ld_in, bottom.fan_in, bottom.ld_in));
        if (raw.labels && lane == 0) batch.labels[r] = raw.labels[row];
        if (raw.weights && lane == 0) batch.weights[r] = raw.weights[row];
    }
    if (largest) warp_largest(largest, seen);
}
