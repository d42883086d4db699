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

#define GATHER_COLUMNS 512  // of a row that a warp takes at a time

// Columns [from, to) of one row by one warp; returns the largest magnitude this lane wrote, as bits. `Wide` is what
// the mean is taken from: float64 for types that float32 does not hold.
template <class T, class Wide>
__device__ __forceinline__ u32 gather_inputs(const T* raw, Element* out, int from, int to, int features) {
    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low, *factor = ENGINE.input_factor;
    const int lane = threadIdx.x & 31;
    u32 largest = 0;
    if constexpr (sizeof(T) == 4 && sizeof(Wide) == 4) {
        if (features % 8 == 0) {  // a lane's four columns exist or not as one
            float4 v[GATHER_COLUMNS / 128];
#pragma unroll
            for (int i = 0; i < GATHER_COLUMNS / 128; ++i)
                if (from + i * 128 + lane * 4 < to) v[i] = *(const float4*)(raw + from + i * 128 + lane * 4);
#pragma unroll
            for (int i = 0; i < GATHER_COLUMNS / 128; ++i) {
                const int c = from + i * 128 + lane * 4;
                if (c >= to) break;
                if (high) {
                    const float4 h = *(const float4*)(high + c), l = *(const float4*)(low + c);
                    const float4 f = *(const float4*)(factor + c);
                    v[i].x = ((v[i].x - h.x) - l.x) * f.x;
                    v[i].y = ((v[i].y - h.y) - l.y) * f.y;
                    v[i].z = ((v[i].z - h.z) - l.z) * f.z;
                    v[i].w = ((v[i].w - h.w) - l.w) * f.w;
                }
                store_quad(out + c, v[i]);
                largest = max(largest, magnitude_bits(v[i]));
            }
            return largest;
        }
    }
#pragma unroll 4
    for (int c = from + lane; c < to; c += 32) {
        const float value = c < features ? standardize((Wide)raw_to_float(raw[c]), high, low, factor, c) : 0.f;
        largest = max(largest, magnitude_bits(value));
        out[c] = to_element(value);
    }
    return largest;
}

template <int TYPE>
__device__ __forceinline__ u32 gather_any(
    const void* raw, i64 row, Element* out, int from, int to, int features) {
#define RAW_CASE(code, type)    \
    if constexpr (TYPE == code) \
    return gather_inputs<type, float>((const type*)raw + row * features, out, from, to, features)
#define EXACT_CASE(code, type)  \
    if constexpr (TYPE == code) \
    return gather_inputs<type, double>((const type*)raw + row * features, out, from, to, features)
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

// Row r of those that begin at position `first`. `LANE`: of one stream, the others' lie between.
template <bool LANE = LANES>
__device__ __forceinline__ i64 raw_row(const Raw& raw, i64 first, int r) {
    return raw_row(raw, first + (LANE ? (i64)r * ENGINE.lane_stride : r));
}

// `rows` rows from position `first` on into `batch`, by all warps of the grid. Writes every element of those rows,
// padding included. `largest`, if not null, collects the inputs' magnitude.
template <int TYPE, bool LANE = LANES>
__device__ __noinline__ void gather_rows(const Raw& raw, i64 first, int rows, const Batch& batch, u32* largest) {
    const Layer& bottom = LAYER(0);
    const u32 pieces = (bottom.ld_in + GATHER_COLUMNS - 1) / GATHER_COLUMNS, warps = gridDim.x * (blockDim.x >> 5);
    u32 seen = 0;
    // 32 bits count the units of any batch that fits a device.
    for (u32 unit = blockIdx.x + gridDim.x * (threadIdx.x >> 5); unit < rows * pieces; unit += warps) {
        const int r = unit / pieces, from = unit % pieces * GATHER_COLUMNS;
        const i64 row = raw_row<LANE>(raw, first, r);
        const u32 found = gather_any<TYPE>(
            raw.inputs, row, batch.inputs + (i64)r * bottom.ld_in, from, min(bottom.ld_in, from + GATHER_COLUMNS),
            bottom.fan_in);
        seen = max(seen, found);
        if (from == 0 && (threadIdx.x & 31) == 0) {
            if (raw.labels) batch.labels[r] = raw.labels[row];
            if (raw.weights) batch.weights[r] = raw.weights[row];
        }
    }
    if (largest) block_largest(largest, seen);
}
