// Weight and bias gradients of all layers in one phase, with the update where that is possible.
#pragma once
#include "joined.cuh"
#include "magnitudes.cuh"
#include "wide_head.cuh"

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

// Which block finishes a tile of several splits differs from rank to rank: blocks that finish several might wait for each
// other in a circle.
__device__ __forceinline__ bool may_join() {
    return ranks_join() && (LAYER(0).splits == 1 || ENGINE.gradient_tasks <= gridDim.x);
}

// What is known of four weights before their gradient is summed.
struct Joined {
    Parameters parameters;
    uint4 seen;  // of another rank's gradient
};

// What becomes of the gradient of a whole tile. With several ranks it is sent as a whole first: what comes back takes a
// while.
__device__ __forceinline__ void finish_weights(const Layer& layer, int m0, int n0, bool direct, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    if (SEVERAL_RANKS && direct) {
        TileExchange ranks(agreed_exchange());
        const bool whole = layer.fan_out % 4 == 0;
        Output::for_each_quad(
            tile, [](int, int) { return 0; },
            [&](int r, int c, const float4& v, int) {
                if (has_weights(layer, m0 + r, n0 + c))
                    ranks.send(weight_place(layer, m0 + r, n0 + c), v, whole, layer.fan_out - n0 - c);
            });
        if (PEER_FORM == SCATTER)
            Output::for_each_quad(
                tile, [](int, int) { return 0; },
                [&](int r, int c, const float4& v, int) {
                    if (has_weights(layer, m0 + r, n0 + c)) ranks.pass_on(weight_place(layer, m0 + r, n0 + c), v, whole);
                });
        Output::for_each_quad(
            tile,
            [&](int r, int c) {
                Joined known = {load_weights(layer, m0 + r, n0 + c)};
                if (has_weights(layer, m0 + r, n0 + c)) 
                    known.seen = ranks.look(weight_place(layer, m0 + r, n0 + c), whole, layer.fan_out - n0 - c);
                return known;
            },
            [&](int r, int c, const float4& v, Joined& known) {
                if (!has_weights(layer, m0 + r, n0 + c)) return;
                const float4 sum =
                    ranks.take(weight_place(layer, m0 + r, n0 + c), v, known.seen, whole, layer.fan_out - n0 - c);
                update_weights(layer, h, m0 + r, n0 + c, sum, known.parameters);
            });
    } else if (direct)
        Output::for_each_quad(
            tile, [&](int r, int c) { return load_weights(layer, m0 + r, n0 + c); },
            [&](int r, int c, const float4& v, Parameters& known) {
                update_weights(layer, h, m0 + r, n0 + c, v, known);
            });
    else
        Output::for_each_quad(
            tile, [](int, int) { return 0; },
            [&](int r, int c, const float4& v, int) { weight_gradient(layer, m0 + r, n0 + c, v); });
}

// The layer of a weight-gradient task; tasks are numbered through all layers, the splits of a tile side by side.
__device__ __forceinline__ int layer_of_task(int task) {
    int l = 0;
    while (l + 1 < ENGINE.layers && task >= LAYER(l + 1).first_task) ++l;
    return l;
}

__device__ PHASE void weight_gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
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
        w.b = View{layer.error, layer.ld_out, w.a.rows, layer.ld_out};
        w.m0 = tile / layer.tiles_n * GRADIENT_M;
        w.n0 = tile % layer.tiles_n * GRADIENT_N;
        return true;
    };
    const auto begin = [](int, const TileWork&) {};
    for_each_tile<Gradient>(dynamic_shared, work, begin, [&](int i, const TileWork& w, Gradient& product) {
        const int task = blockIdx.x + i * gridDim.x;
        const Layer& layer = LAYER(layer_of_task(task));
        const int own = task - layer.first_task;
        product.add_slices(output_tile<Gradient>());
        if (layer.splits > 1 && !add_splits(product, layer, own / layer.splits, own % layer.splits)) return;
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
        if (SEVERAL_RANKS && direct) sum = Exchange(agreed_exchange()).sum(layer.bias_offset + c, sum);
        if (direct) update_parameter(h, layer.bias_offset + c, sum);
        else ENGINE.gradient[layer.bias_offset + c] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ void gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
    weight_gradients(batch, rows, direct, h);
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {  // the last blocks take them first
        const int tasks = ceil_div(LAYER(l).fan_out, BIAS_COLUMNS);
        for (int task = (blockIdx.x + before) % gridDim.x; task < tasks; task += gridDim.x)
            bias_task(l, tasks - 1 - task, rows, direct, h);
        before += tasks;
    }
}
