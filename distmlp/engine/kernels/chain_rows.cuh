// A block's rows of the next batch, by warps that help while the others take this one's through the layers.
#pragma once
#include "chain_ring.cuh"
#include "epilogue.cuh"

namespace chain {

constexpr int RAW_BYTES = RAW_TYPE == RAW_U8 || RAW_TYPE == RAW_I8                          ? 1
                          : RAW_TYPE == RAW_U16 || RAW_TYPE == RAW_I16 || RAW_TYPE == RAW_F16 ? 2
                          : RAW_TYPE == RAW_U32 || RAW_TYPE == RAW_I32 || RAW_TYPE == RAW_F32 ? 4
                                                                                              : 8;

__device__ __forceinline__ float4 standardized(const float4& v, int c) {
    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low, *factor = ENGINE.input_factor;
    if (!high) return v;
    return make_float4(
        standardize(v.x, high, low, factor, c), standardize(v.y, high, low, factor, c + 1),
        standardize(v.z, high, low, factor, c + 2), standardize(v.w, high, low, factor, c + 3));
}

// Four columns of a raw row, standardized; zero beyond the features.
template <class T, class Wide>
__device__ __forceinline__ float4 raw_columns(const void* inputs, i64 row, int c) {
    const T* from = (const T*)inputs + row * width(0) + c;
    const auto finish = [&](Wide x, int k) {
        return standardize(x, ENGINE.input_mean_high, ENGINE.input_mean_low, ENGINE.input_factor, c + k);
    };
    float4 v = zeros();
    if (c < width(0)) v.x = finish((Wide)raw_to_float(from[0]), 0);
    if (c + 1 < width(0)) v.y = finish((Wide)raw_to_float(from[1]), 1);
    if (c + 2 < width(0)) v.z = finish((Wide)raw_to_float(from[2]), 2);
    if (c + 3 < width(0)) v.w = finish((Wide)raw_to_float(from[3]), 3);
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

constexpr int GATHERERS = 64;  // threads: all helpers but the first warp
__device__ __forceinline__ int gatherer() { return threadIdx.x - 32 * (FIRST_HELPER + 1); }

// The targets' lines towards L2.
__device__ __noinline__ void prefetch_targets(int parity) {
    if (LABELS) return;
    constexpr int BYTES = width(LAYERS) * 4, LINES = BYTES / 128 + 1;
    for (int i = gatherer(); i < ROWS * LINES; i += GATHERERS) {
        const i64 row = row_table(parity).row[i / LINES];
        if (row_table(parity).has(i / LINES))
            asm volatile("prefetch.global.L2 [%0];" ::"l"(
                (const u8*)context.raw.targets + row * BYTES + min(i % LINES * 128, BYTES - 1)));
    }
}

// A block's rows of step `s`, padding included, to device memory; the largest magnitude to the place of the warp.
__device__ __noinline__ void gather(int s, u32 done, int parity) {
    const StepInfo info = ENGINE.steps[s];
    if ((int)blockIdx.x >= blocks_at_work(info.rows)) return;
    const Raw& raw = context.raw;
    RowTable& table = row_table(parity);
    constexpr int QUADS = 16 * panels(0), ITEMS = ROWS * QUADS, AHEAD = 8;
    constexpr bool FOURS = RAW_TYPE == RAW_F32 && width(0) % 4 == 0;
    const int first = blockIdx.x * ROWS;
    if (gatherer() < ROWS) {
        const bool there = first + gatherer() < info.rows;
        const i64 row = there ? raw_row(raw, info.first + first + gatherer()) : 0;
        table.row[gatherer()] = there ? (u32)row : RowTable::NOWHERE;
        table.weight[gatherer()] = !there ? 0.f : raw.weights ? raw.weights[row] : 1.f;
        table.label[gatherer()] = LABELS && there ? raw.labels[row] : 0;
    }
    if (lane_id() == 0) await_update(0, done);  // the place is that of the last step but one
    meet(GATHER_MEETS, GATHERERS);
    u8* const to = context.buffers.piece(network_inputs(parity) + first / 64 * panels(0)) + first % 64 * 128;
    u32 largest = 0;
#pragma unroll 1
    for (int from = gatherer(); from < ITEMS; from += AHEAD * GATHERERS) {
        float4 v[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = from + i * GATHERERS, r = item / QUADS, c = item % QUADS * 4;
            there[i] = item < ITEMS && c < width(0) && table.has(min(r, ROWS - 1));
            const i64 row = there[i] ? table.row[r] : 0;
            // Without branches, so that all loads are under way at once.
            if (FOURS) v[i] = __ldg((const float4*)((const float*)raw.inputs + (there[i] ? row * width(0) + c : 0)));
            else v[i] = there[i] ? raw_columns(raw.inputs, row, c) : zeros();
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = from + i * GATHERERS, r = item / QUADS, c = item % QUADS * 4;
            if (item >= ITEMS) break;
            if (FOURS) v[i] = there[i] ? standardized(v[i], c) : zeros();
            largest = max(largest, magnitude_bits(v[i]));
            const int chunk = (c >> 3 & 7) ^ (r & 7);
            store_quad((Element*)(to + (i64)(c >> 6) * PIECE_BYTES + r * 128 + chunk * 16 + (c & 4) * 2), v[i]);
        }
    }
    largest = __reduce_max_sync(~0u, largest);
    if (lane_id() == 0)
        shared<float4>(WARPS_AT)[input_record(parity) + gatherer() / 32] = make_float4(0.f, __uint_as_float(largest), 0.f, 0.f);
    fence_copies();
}

// What was gathered for step `s` to where the chain begins, by one thread; all of its writes must be known to it. Whether
// there is anything to await.
__device__ __noinline__ bool fetch_inputs(Ring ring, int s, int parity) {
    if ((int)blockIdx.x >= blocks_at_work(ENGINE.steps[s].rows)) return false;
    fence_copies();
    const int row = blockIdx.x * ROWS;
    const u8* from = context.buffers.piece(network_inputs(parity) + row / 64 * panels(0)) + row % 64 * 128;
    expect_bytes(ring.inputs(), panels(0) * PANEL_BYTES);
    for (int p = 0; p < panels(0); ++p)
        copy_in(ring.base + BUFFERS_AT + p * PANEL_BYTES, from + (i64)p * PIECE_BYTES, PANEL_BYTES, ring.inputs());
    return true;
}
__device__ __forceinline__ void await_inputs(const Ring& ring) { await(ring.inputs(), context.fetches++ & 1); }

}  // namespace chain
