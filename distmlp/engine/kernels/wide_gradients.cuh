// Weight and bias gradients of all layers in one phase, with the update where that is possible.
#pragma once
#include "wide_head.cuh"

// True in every block or in none: no gradient of this step can be NaN or too large, as told from the magnitudes.
__device__ __forceinline__ bool surely_finite(const Flags& flags, int rows) {
    bool sure = true;
    const float largest = fminf(largest_sum(flags.weight), 1e38f);
    for (int l = threadIdx.x; l < ENGINE.layers; l += THREADS) {
        const float product = __uint_as_float(flags.output[l]) * __uint_as_float(flags.error[l]) * (float)rows;
        const float sum = __uint_as_float(flags.error[l]) * (float)rows;
        sure = sure && product < largest && sum < largest;
    }
    sure = sure && __uint_as_float(flags.loss) * 1e6f < 1e38f && is_finite(flags.weight) && flags.weight != 0.f;
    return __syncthreads_and(sure);
}

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

// A weight-gradient task: the place of its tile, and its share of the batch. Tasks are numbered through all layers, the
// splits of a tile side by side; where two blocks have columns in common, tiles one below the other are neighbours.
struct GradientTask {
    int l, tile, split, m0, n0;

    __device__ __forceinline__ explicit GradientTask(int task) : l(0) {
        while (l + 1 < ENGINE.layers && task >= LAYER(l + 1).first_task) ++l;
        const Layer& layer = LAYER(l);
        const int own = task - layer.first_task;
        constexpr int PAIR = Gradient::COPIED ? 2 : 1;
        const int place = own / PAIR / layer.splits;
        split = own / PAIR % layer.splits;
        tile = place * PAIR + own % PAIR;
        m0 = (place / layer.tiles_n * PAIR + own % PAIR) * GRADIENT_M;
        n0 = place % layer.tiles_n * GRADIENT_N;
    }
};

// Brings what the update of a task's tile reads nearer: from device memory to L2.
__device__ __forceinline__ void prefetch_task(int number) {
    if (number >= ENGINE.gradient_tasks) return;
    const GradientTask task(number);
    const Layer& layer = LAYER(task.l);
    if (task.split) return;
    constexpr int LINE = 32, LINES = GRADIENT_N / LINE + 1;  // of 128 bytes; rows begin anywhere in one
    const int rows = min(GRADIENT_M, layer.fan_in - task.m0), last = min(GRADIENT_N, layer.fan_out - task.n0) - 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * LINES; i += THREADS) {
        const i64 at = weight_place(layer, task.m0 + i / LINES, task.n0 + min(i % LINES * LINE, last));
        const auto prefetch = [&](const float* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at)); };
        prefetch(ENGINE.parameters);
        if (has_first_slot()) prefetch(ENGINE.first_slot);
        if (has_second_slot()) prefetch(ENGINE.second_slot);
    }
}

// What becomes of the gradient of a whole tile.
__device__ __forceinline__ void finish_weights(const Layer& layer, int m0, int n0, bool direct, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    if (direct) {
        Parameters known[Output::ITEM_STEP];
        const auto load = [&](int r, int c) { return load_weights(layer, m0 + r, n0 + c); };
        Output::load_quads(known, 0, load);
        Output::for_each_quad(tile, known, load, [&](int r, int c, const float4& v, Parameters& p) {
            update_weights(layer, h, m0 + r, n0 + c, v, p);
        });
    } else {
        int none[Output::ITEM_STEP];
        Output::for_each_quad(
            tile, none, [](int, int) { return 0; },
            [&](int r, int c, const float4& v, int) { weight_gradient(layer, m0 + r, n0 + c, v); });
    }
}

__device__ PHASE void weight_gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
    const int stages = ceil_div(rows, Gradient::DEPTH);
    const auto work = [&](int i, TileWork& w) {
        const int number = blockIdx.x + i * gridDim.x;
        if (number >= ENGINE.gradient_tasks) return false;
        const GradientTask task(number);
        const int depth = ceil_div(stages, LAYER(task.l).splits);
        w.steps = max(0, min(stages - task.split * depth, depth));
        w.k = task.split * depth * Gradient::DEPTH;
        w.a = input_view(task.l, batch, min(rows, w.k + w.steps * Gradient::DEPTH));
        w.b = error_view(task.l, w.a.rows);
        w.m0 = task.m0;
        w.n0 = task.n0;
        return true;
    };
    for_each_tile<Gradient>(dynamic_shared, work, [](int, const TileWork&) {}, [&](int i, const TileWork& w, Gradient& product) {
        const GradientTask task(blockIdx.x + i * gridDim.x);
        const Layer& layer = LAYER(task.l);
        if (direct) prefetch_task(blockIdx.x + (i + 1) * gridDim.x);
        product.add_slices(output_tile<Gradient>());
        if (layer.splits > 1 && !add_splits(product, layer, task.tile, task.split)) return;
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

// By the blocks without a weight-gradient task where these are enough, else by all, the last ones first.
__device__ __forceinline__ void bias_gradients(int rows, bool direct, const Hyper& h) {
    constexpr int ENOUGH = 8;  // tasks of a block that take no longer than a tile
    int tasks = 0;
    for (int l = 0; l < ENGINE.layers; ++l) tasks += ceil_div(LAYER(l).fan_out, BIAS_COLUMNS);
    const int spare = (int)gridDim.x - ENGINE.gradient_tasks;
    const int workers = spare * ENOUGH >= tasks ? spare : gridDim.x;
    const int worker = gridDim.x - 1 - blockIdx.x;
    if (worker >= workers) return;
    for (int task = worker; task < tasks; task += workers) {
        int l = 0, own = task;
        while (own >= ceil_div(LAYER(l).fan_out, BIAS_COLUMNS)) own -= ceil_div(LAYER(l++).fan_out, BIAS_COLUMNS);
        bias_task(l, own, rows, direct, h);
    }
}
