// Weight and bias gradients of the bulk kernel, with the update where that is possible.
#pragma once
#include "bulk_layers.cuh"

#define GRADIENT_TASKS_OF(layer) \
    (((layer).fan_in + TILE_M - 1) / TILE_M * (((layer).fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N) * BULK_SPLITS)
#define BIAS_COLUMNS 32

// A share of the batch for a tile of a layer's weight gradient.
struct GradientTask {
    int l, m0, n0, tile, split;  // `tile` counts through all layers
    int first, steps;            // of 64 rows

    __device__ __forceinline__ GradientTask(int number, int rows) {
        int before = 0;
        l = 0;
        while (number - before >= GRADIENT_TASKS_OF(LAYER(l))) before += GRADIENT_TASKS_OF(LAYER(l++));
        const int own = (number - before) / BULK_SPLITS;
        tile = number / BULK_SPLITS;
        split = number % BULK_SPLITS;
        const int across = (LAYER(l).fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N;
        m0 = own / across * TILE_M;
        n0 = own % across * BULK_GRADIENT_N;
        const int all = (rows + 63) / 64;
        first = (int)((i64)all * split / BULK_SPLITS);
        steps = (int)((i64)all * (split + 1) / BULK_SPLITS) - first;
    }
};
__device__ __forceinline__ int gradient_tasks() {
    int tasks = 0;
    for (int l = 0; l < ENGINE.layers; ++l) tasks += GRADIENT_TASKS_OF(LAYER(l));
    return tasks;
}

__device__ __forceinline__ void store_weight_pair(const Blocked& copy, int r, int c, float x, float y) {
    *(u32*)copy.place(r, c) = pack_pair(x, y);
}

// Gradient sums of neighbours (r, c) and (r, c + 1), COUNT such pairs; loads come before stores.
template <int COUNT>
__device__ __forceinline__ void finish_pairs(
    const Layer& layer, const Blocked& copy, const Hyper& h, bool direct, const int (&r)[COUNT], const int (&c)[COUNT],
    const float2 (&sum)[COUNT]) {
    if (layer.fan_out % 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            for (int e = 0; e < 2; ++e) {
                if (!has_weights(layer, r[i], c[i] + e)) continue;
                const i64 at = weight_place(layer, r[i], c[i] + e);
                const float g = e ? sum[i].y : sum[i].x;
                if (direct) *(Element*)copy.place(r[i], c[i] + e) = to_element(update_parameter(h, at, g));
                else ENGINE.gradient[at] = g;
            }
        return;
    }
    if (!direct) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (has_weights(layer, r[i], c[i])) *(float2*)(ENGINE.gradient + weight_place(layer, r[i], c[i])) = sum[i];
        return;
    }
    float2 value[COUNT], first[COUNT], second[COUNT], mean[COUNT];
    const auto load = [](const float* flat, i64 at) { return *(const float2*)(flat + at); };
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (!has_weights(layer, r[i], c[i])) continue;
        const i64 at = weight_place(layer, r[i], c[i]);
        value[i] = load(ENGINE.parameters, at);
        first[i] = has_first_slot() ? load(ENGINE.first_slot, at) : make_float2(0.f, 0.f);
        second[i] = has_second_slot() ? load(ENGINE.second_slot, at) : make_float2(0.f, 0.f);
        if (ENGINE.ema) mean[i] = load(ENGINE.ema, at);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (!has_weights(layer, r[i], c[i])) continue;
        const i64 at = weight_place(layer, r[i], c[i]);
        value[i].x = update_rule(h, value[i].x, sum[i].x, first[i].x, second[i].x);
        value[i].y = update_rule(h, value[i].y, sum[i].y, first[i].y, second[i].y);
        if (has_first_slot()) *(float2*)(ENGINE.first_slot + at) = first[i];
        if (has_second_slot()) *(float2*)(ENGINE.second_slot + at) = second[i];
        *(float2*)(ENGINE.parameters + at) = value[i];
        store_weight_pair(copy, r[i], c[i], value[i].x, value[i].y);
        if (ENGINE.ema)
            *(float2*)(ENGINE.ema + at) = make_float2(
                average(h.ema_decay, mean[i].x, value[i].x), average(h.ema_decay, mean[i].y, value[i].y));
    }
}

// Pair number p of a thread: group p / 2, row p % 2.
__device__ __forceinline__ int pair_row(const GradientTask& task, int p) {
    return task.m0 + (threadIdx.x >> 5) * 16 + (threadIdx.x >> 2 & 7) + p % 2 * 8;
}
__device__ __forceinline__ int pair_column(const GradientTask& task, int p) {
    return task.n0 + p / 2 * 8 + (threadIdx.x & 3) * 2;
}

// All of a tile's sums, from the registers.
__device__ __forceinline__ void finish_tile(
    const float (&c)[WIDEST / 2], const GradientTask& task, bool direct, const Hyper& h) {
    const Layer& layer = LAYER(task.l);
    constexpr int COUNT = 4;
#pragma unroll
    for (int p0 = 0; p0 < BULK_GRADIENT_N / 4; p0 += COUNT) {
        int rows[COUNT], columns[COUNT];
        float2 sums[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            rows[i] = pair_row(task, p0 + i);
            columns[i] = pair_column(task, p0 + i);
            sums[i] = make_float2(c[(p0 + i) * 2], c[(p0 + i) * 2 + 1]);
        }
        finish_pairs<COUNT>(layer, near_matrices[task.l].weight, h, direct, rows, columns, sums);
    }
}

// The same where the batch is split: every split adds up its share of the tile over all splits, in their order, once
// all have put theirs down. `arrived` of a tile grows by one a split and never goes back.
__device__ __forceinline__ void finish_share(
    const float (&c)[WIDEST / 2], const GradientTask& task, bool direct, const Hyper& h, float2* partials, u32* arrived,
    u32 target) {
    constexpr int PAIRS = BULK_GRADIENT_N / 4, COUNT = 4;
    float2* tile = partials + (i64)task.tile * BULK_SPLITS * PAIRS * CONSUMERS + threadIdx.x;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
        __stcg(tile + (task.split * PAIRS + p) * CONSUMERS, make_float2(c[2 * p], c[2 * p + 1]));
    sync_consumers();
    if (threadIdx.x == 0) {
        __threadfence();
        add_release(arrived + task.tile, 1);
        while (load_acquire(arrived + task.tile) < target) {
        }
    }
    sync_consumers();
    const Layer& layer = LAYER(task.l);
    const int end = PAIRS * (task.split + 1) / BULK_SPLITS;
#pragma unroll 1
    for (int p0 = PAIRS * task.split / BULK_SPLITS; p0 < end; p0 += COUNT) {
        int rows[COUNT], columns[COUNT];
        float2 sums[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int p = min(p0 + i, PAIRS - 1);
            rows[i] = p0 + i < end ? pair_row(task, p) : layer.fan_in;  // beyond: nothing there
            columns[i] = pair_column(task, p);
            sums[i] = make_float2(0.f, 0.f);
        }
#pragma unroll
        for (int split = 0; split < BULK_SPLITS; ++split)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const float2 part = __ldcg(tile + (split * PAIRS + min(p0 + i, PAIRS - 1)) * CONSUMERS);
                sums[i].x += part.x;
                sums[i].y += part.y;
            }
        finish_pairs<COUNT>(layer, near_matrices[task.l].weight, h, direct, rows, columns, sums);
    }
}

// Gradients of up to BIAS_COLUMNS biases: every warp adds up its share of the row tiles, then the warps' sums in order.
__device__ __forceinline__ void bias_task(int l, int task, int row_blocks, bool direct, const Hyper& h, float* scratch) {
    const Layer& layer = LAYER(l);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c = task * BIAS_COLUMNS + lane, warps = blockDim.x >> 5;
    const i64 ld = near_matrices[l].error.blocks * 64;
    float sum = 0.f;
    if (c < layer.fan_out)
#pragma unroll 4
        for (int part = warp; part < row_blocks; part += warps) sum += __ldcg(near_matrices[l].sums + part * ld + c);
    scratch[warp * BIAS_COLUMNS + lane] = sum;
    __syncthreads();
    if (warp == 0 && c < layer.fan_out) {
        sum = 0.f;
        for (int w = 0; w < warps; ++w) sum += scratch[w * BIAS_COLUMNS + lane];
        if (direct) update_parameter(h, layer.bias_offset + c, sum);
        else ENGINE.gradient[layer.bias_offset + c] = sum;
    }
    __syncthreads();
}
__device__ __forceinline__ void bias_gradients(int row_blocks, bool direct, const Hyper& h, float* scratch) {
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {
        const int tasks = (LAYER(l).fan_out + BIAS_COLUMNS - 1) / BIAS_COLUMNS;
        for (int task = (blockIdx.x + before) % gridDim.x; task < tasks; task += gridDim.x)
            bias_task(l, tasks - 1 - task, row_blocks, direct, h, scratch);  // the last blocks take them first
        before += tasks;
    }
}
