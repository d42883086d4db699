// Weight and bias gradients of all layers in one phase, with the update where that is possible.
#pragma once
#include "magnitudes.cuh"
#include "wide_head.cuh"
#ifndef BIASES_APART
#define BIASES_APART 1
#endif

// Adds the splits of a weight-gradient tile in their order; true in the block that came last, which then holds the sum.
__device__ __forceinline__ bool add_splits(Gradient& product, const Layer& layer, int tile, int split) {
    __shared__ u32 arrived;
    constexpr int STRIDE = THREADS / Gradient::SLICES;
    const auto place = [&](int s) {
        return (float2*)ENGINE.partial_tiles +
               ((i64)layer.first_task + (i64)tile * layer.splits + s) * (GRADIENT_M * GRADIENT_N / 2) +
               threadIdx.x % STRIDE;
    };
    if (product.holds_results())
#pragma unroll
        for (int p = 0; p < Gradient::PAIRS; ++p)
            place(split)[p * STRIDE] = make_float2(product.c[2 * p], product.c[2 * p + 1]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = ENGINE.tile_arrivals + layer.first_tile + tile;
        arrived = atomicAdd(counter, 1);
        if (arrived == layer.splits - 1) *counter = 0;
    }
    __syncthreads();
    if (arrived != layer.splits - 1) return false;
    __threadfence();
    product.begin();
    if (product.holds_results())
#pragma unroll 1
        for (int s = 0; s < layer.splits; ++s)
#pragma unroll
            for (int p = 0; p < Gradient::PAIRS; ++p) {
                const float2 part = __ldcg(place(s) + p * STRIDE);
                product.c[2 * p] += part.x;
                product.c[2 * p + 1] += part.y;
            }
    return true;
}

// Updates `rows` × `columns` weights from (m0, n0) on. WHOLE: the layer's outputs come in fours.
template <bool WHOLE>
__device__ __forceinline__ void update_tile(
    const Layer& layer, const Hyper& shared, const float* tile, int m0, int n0, int rows, int columns) {
    const Hyper h = shared;  // in registers, as what follows
    const int fan_out = layer.fan_out, ld = layer.ld_out, count = layer.fan_out - n0;
    const i64 base = weight_place(layer, m0, n0);
    Element* copy = layer.weight + (i64)m0 * ld + n0;
    Gradient::Output::for_each_quad(
        tile, rows, columns, [&](int r, int c) { return load_weights<WHOLE>(base + r * fan_out + c, count - c); },
        [&](int r, int c, const float4& v, Parameters& known, bool own) {
            update_weights<WHOLE>(h, base + r * fan_out + c, copy + r * ld + c, count - c, v, known, own);
        });
}

// What becomes of the gradient of a whole tile.
__device__ __forceinline__ void finish_weights(const Layer& layer, int m0, int n0, bool direct, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    const int rows = min(Output::M, layer.fan_in - m0);
    const int columns = min(layer.fan_out - n0, min(Output::N, layer.tile_columns));
    if (columns <= 0) return;
    if (!direct)
        Output::for_each_quad(
            tile, rows, columns, [](int, int) { return 0; },
            [&](int r, int c, const float4& v, int, bool own) {
                if (own) weight_gradient(layer, m0 + r, n0 + c, v);
            });
    else if (layer.fan_out % 4 == 0) update_tile<true>(layer, h, tile, m0, n0, rows, columns);
    else update_tile<false>(layer, h, tile, m0, n0, rows, columns);
}

// The layer of a weight-gradient task; tasks are numbered through all layers, the splits of a tile side by side.
__device__ __forceinline__ int layer_of_task(int task) {
    int l = 0;
    while (l + 1 < ENGINE.layers && task >= LAYER(l + 1).first_task) ++l;
    return l;
}

// Errors of all layers but the lowest are known; the main loop of their tiles need not wait for the others.
template <class Begin, class Decide>
__device__ PHASE void weight_gradients(
    const Batch& batch, int rows, const Begin& begin_early, const Decide& decide, const Hyper& h) {
    if (layer_of_task(blockIdx.x) == 0) decide();
    else begin_early();
    const int stages = ceil_div(rows, Gradient::DEPTH);
    const auto work = [&](int i, TileWork& w) {
        const int task = blockIdx.x + i * gridDim.x;
        if (task >= ENGINE.gradient_tasks) return false;
        const int l = layer_of_task(task);
        const Layer& layer = LAYER(l);
        const int tile = (task - layer.first_task) / layer.splits, split = (task - layer.first_task) % layer.splits;
        const int depth = ceil_div(stages, layer.splits);
        w.steps = max(0, min(stages - split * depth, depth));
        w.k = split * depth * Gradient::DEPTH;
        w.a = View{layer_input(l, batch), layer.ld_in, min(rows, w.k + w.steps * Gradient::DEPTH), layer.ld_in};
        w.m0 = tile / layer.tiles_n * GRADIENT_M;
        w.n0 = tile % layer.tiles_n * layer.tile_columns;
        w.b = View{layer.error, layer.ld_out, w.a.rows, min(layer.ld_out, w.n0 + layer.tile_columns)};
        return true;
    };
    const auto begin = [](int, const TileWork&, Gradient&) {};
    for_each_tile<Gradient>(dynamic_shared, work, false, begin, [&](int i, const TileWork& w, Gradient& product) {
        const int task = blockIdx.x + i * gridDim.x;
        const Layer& layer = LAYER(layer_of_task(task));
        const int own = task - layer.first_task;
        product.add_slices(output_tile<Gradient>());
        const bool direct = decide();
        if (GRADIENT_SPLIT && !add_splits(product, layer, own / layer.splits, own % layer.splits)) return;
        product.for_each_summed_part(output_tile<Gradient>(), [&](int part) {
            finish_weights(layer, w.m0, w.n0 + part * Gradient::Output::N, direct, h);
        });
    });
}

// Gradients of up to BIAS_COLUMNS biases: every warp adds up its share of the row tiles, then the warps' sums in order.
__device__ __forceinline__ void bias_task(int l, int task, int rows, bool direct, const Hyper& h) {
    __shared__ float sums[THREADS / 32][BIAS_COLUMNS];
    const Layer& layer = LAYER(l);
    const int parts = column_parts(l, rows);
    const int warp = threadIdx.x >> 5, c = task * BIAS_COLUMNS + (threadIdx.x & 31);
    float sum = 0.f;
    if (c < layer.fan_out)
        for (int part = warp; part < parts; part += THREADS / 32) sum += layer.column_sums[(i64)part * layer.ld_out + c];
    sums[warp][threadIdx.x & 31] = sum;
    __syncthreads();
    if (warp == 0 && c < layer.fan_out) {
        sum = 0.f;
        for (int w = 0; w < THREADS / 32; ++w) sum += sums[w][threadIdx.x];
        if (direct) update_parameter(h, layer.bias_offset + c, sum);
        else ENGINE.gradient[layer.bias_offset + c] = sum;
    }
    __syncthreads();
}

// The same of as many biases as a warp has lanes, by a warp.
__device__ __forceinline__ void bias_task_of_warp(int l, int task, int rows, bool direct, const Hyper& h) {
    const Layer& layer = LAYER(l);
    const int parts = column_parts(l, rows), c = task * 32 + (threadIdx.x & 31);
    if (c >= layer.fan_out) return;
    float sum = 0.f;
#pragma unroll 16
    for (int part = 0; part < parts; ++part) sum += layer.column_sums[(i64)part * layer.ld_out + c];
    if (direct) update_parameter(h, layer.bias_offset + c, sum);
    else ENGINE.gradient[layer.bias_offset + c] = sum;
}

// By the blocks that have no tile in the last round, where these are many enough; else true.
__device__ __forceinline__ bool biases_are_left(int rows, bool direct, const Hyper& h) {
    const int busy = ENGINE.gradient_tasks % gridDim.x, warps = (gridDim.x - busy) * (THREADS / 32);
    int tasks = 0;
    for (int l = 0; l < ENGINE.layers; ++l) tasks += ceil_div(LAYER(l).fan_out, 32);
    if (busy == 0 || tasks > 4 * warps) return true;
    if (blockIdx.x < busy) return false;
    int task = (blockIdx.x - busy) * (THREADS / 32) + (threadIdx.x >> 5);
    for (int l = ENGINE.layers - 1; l >= 0; --l) {  // those of most parts first
        const int own = ceil_div(LAYER(l).fan_out, 32);
        for (; task < own; task += warps) bias_task_of_warp(l, task, rows, direct, h);
        task -= own;
    }
    return false;
}

template <class Begin, class Decide>
__device__ __forceinline__ void gradients(
    const Batch& batch, int rows, const Begin& begin_early, const Decide& decide, const Hyper& h) {
    weight_gradients(batch, rows, begin_early, decide, h);
    const bool direct = decide();
    if (BIASES_APART && !biases_are_left(rows, direct, h)) return;
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {  // the last blocks take them first
        const int tasks = ceil_div(LAYER(l).fan_out, BIAS_COLUMNS);
        for (int task = (blockIdx.x + before) % gridDim.x; task < tasks; task += gridDim.x)
            bias_task(l, tasks - 1 - task, rows, direct, h);
        before += tasks;
    }
}
