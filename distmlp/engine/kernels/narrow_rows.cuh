// Rows of the raw store for the narrow kernel: picked by the index table and standardized on their way into registers.
#pragma once
#include "gather.cuh"
#include "narrow_shape.cuh"

#ifndef RAW_TYPE  // of the inputs; known when the kernel is compiled, so that no branch is left
#define RAW_TYPE RAW_F32
#endif

namespace narrow {

// Types of 32 bits and more, float32 apart, are standardized in float64.
template <class T>
__device__ __forceinline__ float raw_widen(T x) { return raw_to_float(x); }
__device__ __forceinline__ double raw_widen(u32 x) { return x; }
__device__ __forceinline__ double raw_widen(int x) { return x; }
__device__ __forceinline__ double raw_widen(u64 x) { return (double)x; }
__device__ __forceinline__ double raw_widen(i64 x) { return (double)x; }
__device__ __forceinline__ double raw_widen(double x) { return x; }

// Mean (high, low) and factor of every input and target column, in shared memory: 0, 0 and 1 where there is none.
constexpr int SCALES = padded(0) + padded(LAYERS);
constexpr int SCALES_AT = EXCHANGE_AT + EXCHANGE_BYTES;
constexpr int SHARED_BYTES = SCALES_AT + 3 * SCALES * 4;

__device__ __forceinline__ void load_scales(float* scales) {
    for (int i = threadIdx.x; i < SCALES; i += BLOCK_THREADS) {
        const bool input = i < CONSTANT(padded(0));
        const int c = input ? i : i - CONSTANT(padded(0));
        const float* high = input ? ENGINE.input_mean_high : ENGINE.target_mean_high;
        const float* low = input ? ENGINE.input_mean_low : ENGINE.target_mean_low;
        const float* factor = input ? ENGINE.input_factor : ENGINE.target_factor;
        const bool some = high && c < (input ? CONSTANT(width(0)) : CONSTANT(width(LAYERS)));
        scales[i] = some ? high[c] : 0.f;
        scales[SCALES + i] = some ? low[c] : 0.f;
        scales[2 * SCALES + i] = some ? factor[c] : 1.f;
    }
}

template <int CODE> struct RawOf { typedef float type; };
template <> struct RawOf<RAW_U8> { typedef u8 type; };
template <> struct RawOf<RAW_I8> { typedef signed char type; };
template <> struct RawOf<RAW_U16> { typedef u16 type; };
template <> struct RawOf<RAW_I16> { typedef short type; };
template <> struct RawOf<RAW_U32> { typedef u32 type; };
template <> struct RawOf<RAW_I32> { typedef int type; };
template <> struct RawOf<RAW_U64> { typedef u64 type; };
template <> struct RawOf<RAW_I64> { typedef i64 type; };
template <> struct RawOf<RAW_F16> { typedef Half type; };
template <> struct RawOf<RAW_F64> { typedef double type; };
typedef RawOf<RAW_TYPE>::type RawInput;

// The two rows that a thread works on: g and g + 8 of its warp's 16 (lane 4 g + t).
struct RowPair {
    i64 row[2];       // in the raw store
    bool there[2];    // else beyond the end of the batch: counts nothing
    float weight[2];  // sample weight, 0 if not there
    int label[2];
};

__device__ __forceinline__ RowPair pick_rows(const Raw& raw, i64 first, int rows, int at) {
    RowPair pair;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = at + 8 * half;
        pair.there[half] = r < rows;
        pair.row[half] = r < rows ? raw_row(raw, first + r) : 0;
        pair.weight[half] = r < rows ? raw.weights ? raw.weights[pair.row[half]] : 1.f : 0.f;
        pair.label[half] = LABELS && r < rows ? raw.labels[pair.row[half]] : 0;
    }
    return pair;
}

__device__ __forceinline__ float scaled(const float* scales, int i, float x) {
    return ((x - scales[i]) - scales[SCALES + i]) * scales[2 * SCALES + i];
}
__device__ __forceinline__ float scaled(const float* scales, int i, double x) {  // before it is rounded
    return (float)((x - (double)scales[i]) - (double)scales[SCALES + i]) * scales[2 * SCALES + i];
}

// Columns `c` and `c + 1` (c even) of a raw row of COUNT columns, standardized by `scales` from `at` on; 0 beyond.
template <int COUNT, class T>
__device__ __forceinline__ float2 load_columns(const T* row, int c, const float* scales, int at) {
    T x[2];
    if constexpr (COUNT % 2 == 0 && sizeof(T) == 4) {
        const uint2 pair = c < COUNT ? __ldg((const uint2*)(row + c)) : make_uint2(0u, 0u);
        x[0] = *(const T*)&pair.x;
        x[1] = *(const T*)&pair.y;
    } else {
        x[0] = row[c < COUNT ? c : 0];
        x[1] = row[c + 1 < COUNT ? c + 1 : 0];
    }
    typedef decltype(raw_widen(x[0])) Wide;
    return make_float2(
        c < COUNT ? scaled(scales, at + c, (Wide)raw_widen(x[0])) : 0.f,
        c + 1 < COUNT ? scaled(scales, at + c + 1, (Wide)raw_widen(x[1])) : 0.f);
}

}  // namespace narrow
