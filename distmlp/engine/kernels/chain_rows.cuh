// A block's rows of a batch to their place in shared memory, by the warps that help, while the others multiply.
#pragma once
#include "chain_ring.cuh"
#include "epilogue.cuh"

namespace chain {

constexpr int RAW_BYTES = RAW_TYPE == RAW_U8 || RAW_TYPE == RAW_I8                          ? 1
                          : RAW_TYPE == RAW_U16 || RAW_TYPE == RAW_I16 || RAW_TYPE == RAW_F16 ? 2
                          : RAW_TYPE == RAW_U32 || RAW_TYPE == RAW_I32 || RAW_TYPE == RAW_F32 ? 4
                                                                                              : 8;

// Four columns of a raw row, standardized; zero beyond the features.
template <class T, class Wide>
__device__ __forceinline__ float4 raw_columns(const void* inputs, i64 row, int c) {
    const T* from = (const T*)inputs + row * width(0) + c;
    const auto finish = [&](Wide x, int k) {
        return standardize(x, ENGINE.input_mean_high, ENGINE.input_mean_low, ENGINE.input_factor, c + k);
    };
    float4 v = zeros();
    if constexpr (sizeof(T) == 4 && sizeof(Wide) == 4 && width(0) % 4 == 0) {
        v = __ldg((const float4*)from);
        v = make_float4(finish(v.x, 0), finish(v.y, 1), finish(v.z, 2), finish(v.w, 3));
    } else {
        if (c < width(0)) v.x = finish((Wide)raw_to_float(from[0]), 0);
        if (c + 1 < width(0)) v.y = finish((Wide)raw_to_float(from[1]), 1);
        if (c + 2 < width(0)) v.z = finish((Wide)raw_to_float(from[2]), 2);
        if (c + 3 < width(0)) v.w = finish((Wide)raw_to_float(from[3]), 3);
    }
    return v;
}
__device__ __forceinline__ float4 raw_columns(const void* inputs, i64 row, int c) {
    if (RAW_TYPE == RAW_U8) return raw_columns<u8, float>(inputs, row, c);
    if (RAW_TYPE == RAW_I8) return raw_columns<signed char, float>(inputs, row, c);
    if (RAW_TYPE == RAW_U16) return raw_columns<u16, float>(inputs, row, c);
    if (RAW_TYPE == RAW_I16) return raw_columns<short, float>(inputs, row, c);
    if (RAW_TYPE == RAW_F16) return raw_columns<Half, float>(inputs, row, c);
    if (RAW_TYPE == RAW_U32) return raw_columns<u32, double>(inputs, row, c);
    if (RAW_TYPE == RAW_I32) return raw_columns<int, double>(inputs, row, c);
    if (RAW_TYPE == RAW_U64) return raw_columns<u64, double>(inputs, row, c);
    if (RAW_TYPE == RAW_I64) return raw_columns<i64, double>(inputs, row, c);
    if (RAW_TYPE == RAW_F64) return raw_columns<double, double>(inputs, row, c);
    return raw_columns<float, float>(inputs, row, c);
}

// Lines of rows of `bytes` each towards L2, by all helpers but the first; `at` gives a row's place in the raw store.
template <class At>
__device__ __forceinline__ void prefetch_rows(const void* from, int bytes, int rows, const At& at) {
    const int lines = bytes / 128 + 1;
    for (int i = threadIdx.x - 32 * (FIRST_HELPER + 1); i < ROWS * lines; i += 32 * (HELPERS - 1)) {
        const int r = i / lines, within = min(i % lines * 128, bytes - 1);
        if ((int)(blockIdx.x * ROWS) + r < rows)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)from + at(r) * bytes + within));
    }
}
// What the loss of this step and the next step's gathering will ask for.
__device__ __noinline__ void prefetch(int s, int end) {
    const Raw& raw = context.raw;
    if (!LABELS)
        prefetch_rows(raw.targets, width(LAYERS) * 4, ENGINE.steps[s].rows, [&](int r) { return shared<i64>(ROWS_AT)[r]; });
    if (s + 1 == end) return;
    const StepInfo next = ENGINE.steps[s + 1];
    prefetch_rows(raw.inputs, width(0) * RAW_BYTES, next.rows, [&](int r) {
        return raw_row(raw, next.first + blockIdx.x * ROWS + r);
    });
}

// Every row, padding included, by the helpers; the largest magnitude to the place of the warp.
__device__ __noinline__ void gather(int s) {
    const Raw& raw = context.raw;
    const StepInfo info = ENGINE.steps[s];
    constexpr int QUADS = 16 * panels(0), ITEMS = ROWS * QUADS, AHEAD = 8;
    const int helper = threadIdx.x - 32 * FIRST_HELPER, first = blockIdx.x * ROWS;
    if (helper < ROWS) {
        const bool there = first + helper < info.rows;
        const i64 row = there ? raw_row(raw, info.first + first + helper) : -1;
        shared<i64>(ROWS_AT)[helper] = row;
        shared<float>(WEIGHTS_AT)[helper] = !there ? 0.f : raw.weights ? raw.weights[row] : 1.f;
        shared<int>(LABELS_AT)[helper] = LABELS && there ? raw.labels[row] : 0;
    }
    meet(HELPERS_MEET, 32 * HELPERS);
    u32 largest = 0;
#pragma unroll 1
    for (int from = helper; from < ITEMS; from += AHEAD * 32 * HELPERS) {
        float4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = from + i * 32 * HELPERS, r = item / QUADS, c = item % QUADS * 4;
            const i64 row = item < ITEMS && c < width(0) ? shared<i64>(ROWS_AT)[r] : -1;
            v[i] = row >= 0 ? raw_columns(raw.inputs, row, c) : zeros();
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = from + i * 32 * HELPERS, r = item / QUADS, c = item % QUADS * 4;
            if (item >= ITEMS) break;
            largest = max(largest, magnitude_bits(v[i]));
            const int chunk = (c >> 3 & 7) ^ (r & 7);
            store_quad(
                (Element*)(dynamic_shared + BUFFERS_AT + (c >> 6) * PANEL_BYTES + r * 128 + chunk * 16 + (c & 4) * 2), v[i]);
        }
    }
    largest = __reduce_max_sync(~0u, largest);
    if (lane_id() == 0) shared<float4>(WARPS_AT)[warp_id()] = make_float4(0.f, __uint_as_float(largest), 0.f, 0.f);
    fence_copies();
}

}  // namespace chain
