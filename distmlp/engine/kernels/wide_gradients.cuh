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

#if SEVERAL_RANKS
typedef bool Agreed;
#else
typedef void Agreed;
#endif

// What is known of four weights before their gradient is summed.
struct Joined {
    Parameters parameters;
    uint4 seen;  // of another rank's gradient
};

// What becomes of the gradient of a whole tile where the ranks add up theirs. It is sent as a whole first: what comes back
// takes a while.
__device__ __forceinline__ void join_weights(const Layer& layer, int m0, int n0, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    TileExchange ranks(joining().number);
    const auto place = [&](int r, int c) { return weight_place(layer, m0 + r, n0 + c); };
    const auto exists = [&](int r, int c) { return has_weights(layer, m0 + r, n0 + c); };
    const auto nothing = [](int, int) { return 0; };
    Output::for_each_quad(tile, nothing, [&](int r, int c, const float4& v, int) {
        if (exists(r, c)) ranks.send(place(r, c), v);
    });
    if (PEER_FORM == SCATTER)
        Output::for_each_quad(tile, nothing, [&](int r, int c, const float4& v, int) {
            if (exists(r, c)) ranks.pass_on(place(r, c), v);
        });
    Output::for_each_quad(
        tile,
        [&](int r, int c) {
            Joined known = {};
            if (!exists(r, c)) return known;
            known.parameters.load(place(r, c));
            known.seen = ranks.look(place(r, c));
            return known;
        },
        [&](int r, int c, const float4& v, Joined& known) {
            if (!exists(r, c)) return;
            known.parameters.update(h, ranks.take(place(r, c), v, known.seen));
            known.parameters.store(h, place(r, c));
            store_quad(layer.weight + (i64)(m0 + r) * layer.ld_out + n0 + c, known.parameters.value);
        });
}
// Where outputs do not come in fours: weight by weight, dealt to all threads.
__device__ __noinline__ void join_weights_singly(const Layer& layer, int m0, int n0, const Hyper& h) {
    typedef Gradient::Output Output;
    constexpr int AHEAD = 4;
    const float* tile = output_tile<Gradient>();
    Exchange ranks(joining().number);
    const int columns = min(Output::N, layer.fan_out - n0), count = columns * min(Output::M, layer.fan_in - m0);
    const auto place = [&](int i) { return weight_place(layer, m0 + i / columns, n0 + i % columns); };
    const auto value = [&](int i) { return tile[i / columns * Output::STRIDE + i % columns]; };
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) ranks.send(place(i), value(i));
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += AHEAD * THREADS) {
        float parameter[AHEAD], first_slot[AHEAD], second_slot[AHEAD];
        u32 seen[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = min(first + a * THREADS, count - 1);
            parameter[a] = ENGINE.parameters[place(i)];
            first_slot[a] = has_first_slot() ? ENGINE.first_slot[place(i)] : 0.f;
            second_slot[a] = has_second_slot() ? ENGINE.second_slot[place(i)] : 0.f;
            seen[a] = ranks.look(place(i));
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = first + a * THREADS;
            if (i >= count) break;
            const i64 at = place(i);
            const float sum = ranks.take(at, value(i), seen[a]);
            const float p = update_rule(h, parameter[a], sum, first_slot[a], second_slot[a]);
            if (has_first_slot()) ENGINE.first_slot[at] = first_slot[a];
            if (has_second_slot()) ENGINE.second_slot[at] = second_slot[a];
            ENGINE.parameters[at] = p;
            if (EMA) ENGINE.ema[at] = average(h.ema_decay, ENGINE.ema[at], p);
            layer.weight[(i64)(m0 + i / columns) * layer.ld_out + n0 + i % columns] = to_element(p);
        }
    }
}

// What becomes of the gradient of a whole tile.
__device__ __forceinline__ void finish_weights(const Layer& layer, int m0, int n0, bool direct, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    if (SEVERAL_RANKS && direct) {
        if (n0 >= layer.fan_out) return;
        if (layer.fan_out % 4 == 0) join_weights(layer, m0, n0, h);
        else join_weights_singly(layer, m0, n0, h);
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

// With other ranks: as far as the agreement with them is not there yet, it is awaited here, behind the first products.
__device__ PHASE Agreed weight_gradients(const Batch& batch, int rows, bool direct, Hyper& h) {
    bool pending = may_join();
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
            if (pending) direct = finish_agreement(h), pending = false;
            finish_weights(layer, w.m0, w.n0 + part * Gradient::Output::N, direct, h);
        });
    });
#if SEVERAL_RANKS
    return pending ? finish_agreement(h) : direct;
#endif
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
        if (SEVERAL_RANKS && direct) sum = Exchange(joining().number).sum(layer.bias_offset + c, sum);
        if (direct) update_parameter(h, layer.bias_offset + c, sum);
        else ENGINE.gradient[layer.bias_offset + c] = sum;
    }
    __syncthreads();
}

// Returns `direct`, or, with other ranks, what was agreed.
__device__ __forceinline__ bool gradients(const Batch& batch, int rows, bool direct, Hyper& h) {
#if SEVERAL_RANKS
    direct = weight_gradients(batch, rows, direct, h);
#else
    weight_gradients(batch, rows, direct, h);
#endif
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {  // the last blocks take them first
        const int tasks = ceil_div(LAYER(l).fan_out, BIAS_COLUMNS);
        for (int task = (blockIdx.x + before) % gridDim.x; task < tasks; task += gridDim.x)
            bias_task(l, tasks - 1 - task, rows, direct, h);
        before += tasks;
    }
    return direct;
}
