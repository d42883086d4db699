// Weight and bias gradients of the bulk kernel, with the update where that is possible.
#pragma once
#include "bulk_layers.cuh"

// Of a layer, in units of a share of two tiles, one above the other, for a cluster.
__device__ __forceinline__ int gradient_tasks(const Layer& layer) {
    return (layer.fan_in + 2 * TILE_M - 1) / (2 * TILE_M) *
           ((layer.fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N) * BULK_SPLITS;
}
__device__ __forceinline__ int gradient_tasks() {
    int tasks = 0;
    for (int l = 0; l < ENGINE.layers; ++l) tasks += gradient_tasks(LAYER(l));
    return tasks;
}

// A share of the batch for a tile of a layer's weight gradient.
struct GradientTask {
    int l, m0, n0, tile, split;  // `tile` counts through all layers
    int first, steps;            // of 64 rows

    __device__ __forceinline__ GradientTask(int number, int rank, int rows) {
        int own = number;
        for (l = 0; own >= gradient_tasks(LAYER(l)); ++l) own -= gradient_tasks(LAYER(l));
        own /= BULK_SPLITS;
        tile = number / BULK_SPLITS * 2 + rank;
        split = number % BULK_SPLITS;
        const int across = (LAYER(l).fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N;
        m0 = (own / across * 2 + rank) * TILE_M;
        n0 = own % across * BULK_GRADIENT_N;
        const int all = (rows + 63) / 64;
        first = (int)((i64)all * split / BULK_SPLITS);
        steps = (int)((i64)all * (split + 1) / BULK_SPLITS) - first;
    }
};

// Four neighbours of a row of a weight matrix, and what becomes of their gradient.
struct Quad {
    int r, c;
    bool exists;  // as a whole: layers whose outputs come in fours
    Parameters parameters;

    __device__ __forceinline__ void load(const Layer& layer, bool direct) {
        exists = has_weights(layer, r, c);
        if (direct && exists && layer.fan_out % 4 == 0) parameters.load(weight_place(layer, r, c));
    }
    __device__ __forceinline__ void finish(
        const Layer& layer, const Blocked& copy, const Hyper& h, bool direct, const float4& sum) {
        if (!exists) return;
        const i64 at = weight_place(layer, r, c);
        if (!direct) {
            weight_gradient(layer, r, c, sum);
        } else if (layer.fan_out % 4 == 0) {
            parameters.update(h, sum);
            parameters.store(h, at);
            store_quad((Element*)copy.place(r, c), parameters.value);
        } else {
#pragma unroll 1
            for (int k = 0; k < 4 && c + k < layer.fan_out; ++k)
                *(Element*)copy.place(r, c + k) = to_element(update_parameter(h, at + k, part(sum, k)));
        }
    }
};

// Where the sums of a tile are put down: for every share of the batch those of all pairs of columns of all threads that
// multiply. Without shares they only change hands within the block, by one of two places in turn.
constexpr int PAIRS_OF_TILE = BULK_GRADIENT_N / 4, SHARE = PAIRS_OF_TILE * CONSUMERS;
__device__ __forceinline__ float2* place_of_sums(float2* partials, const GradientTask& task, int turn) {
    return partials + (i64)(BULK_SPLITS > 1 ? task.tile * BULK_SPLITS : blockIdx.x * 2 + (turn & 1)) * SHARE;
}
__device__ __forceinline__ void put_sums(const float (&c)[WIDEST / 2], const GradientTask& task, float2* place) {
#pragma unroll
    for (int p = 0; p < PAIRS_OF_TILE; ++p)
        __stcg(place + task.split * SHARE + p * CONSUMERS + threadIdx.x, make_float2(c[2 * p], c[2 * p + 1]));
}

// Adds up this block's share of a tile over all shares of the batch, in their order, and finishes it: so many times 16
// columns, of which a warp takes 16 rows at a time and a lane four columns of two of them. By `warps` warps, QUADS / 2
// such pieces of each at once.
template <int QUADS>
__device__ __forceinline__ void finish_sums(
    const float2* place, const GradientTask& task, bool direct, const Hyper& shared, int warp, int warps) {
    constexpr int STRIPES = BULK_GRADIENT_N / 16;
    const Hyper h = shared;  // in registers
    const Layer& layer = LAYER(task.l);
    const Blocked& copy = near_matrices[task.l].weight;
    const int lane = threadIdx.x & 31;
    const int first = STRIPES * task.split / BULK_SPLITS, end = STRIPES * (task.split + 1) / BULK_SPLITS;
    const int pieces = (end - first) * CONSUMER_WARPS;
#pragma unroll 1
    for (int piece = warp; piece < pieces; piece += warps * (QUADS / 2)) {
        Quad quads[QUADS];
        float4 sums[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int own = piece + i / 2 * warps;
            quads[i].r = own < pieces ? task.m0 + own % CONSUMER_WARPS * 16 + (lane >> 2) + i % 2 * 8 : layer.fan_in;
            quads[i].c = task.n0 + (first + own / CONSUMER_WARPS) * 16 + (lane & 3) * 4;
            quads[i].load(layer, direct);
            sums[i] = zeros();
        }
#pragma unroll
        for (int split = 0; split < BULK_SPLITS; ++split)
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                // Fragments hold pairs: those of two lanes are four neighbours, and of 16 columns there are two groups.
                const int own = min(piece + i / 2 * warps, pieces - 1);
                const int pair = (first + own / CONSUMER_WARPS) * 4 + (lane >> 1 & 1) * 2 + i % 2;
                const float2* from = place + split * SHARE + pair * CONSUMERS + own % CONSUMER_WARPS * 32;
                add_to(sums[i], __ldcg((const float4*)(from + (lane & ~3) + (lane & 1) * 2)));
            }
#pragma unroll
        for (int i = 0; i < QUADS; ++i) quads[i].finish(layer, copy, h, direct, sums[i]);
    }
}

// Gradients of the biases, 32 columns at a time: three helping warps of a block take a third of the rows' sums each.
// `thirds`: 96 numbers of shared memory.
__device__ __forceinline__ void bias_gradients(int part, int parts_of_rows, bool direct, const Hyper& h, float* thirds) {
    const int lane = threadIdx.x & 31, first = parts_of_rows * part / 3, end = parts_of_rows * (part + 1) / 3;
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        const int tasks = (layer.fan_out + 31) / 32, blocks = gridDim.x;
        const i64 ld = near_matrices[l].error.blocks * 64;
        for (int task = (blockIdx.x + blocks - before % blocks) % blocks; task < tasks; task += blocks) {
            const int c = task * 32 + lane;
            float sum = 0.f;
#pragma unroll 8
            for (int i = first; i < end; ++i) sum += __ldcg(near_matrices[l].sums + i * ld + c);
            thirds[part * 32 + lane] = sum;
            asm volatile("bar.sync 2, 96;" ::: "memory");
            if (part == 0 && c < layer.fan_out) {
                sum = thirds[lane] + thirds[32 + lane] + thirds[64 + lane];
                if (direct) update_parameter(h, layer.bias_offset + c, sum);
                else ENGINE.gradient[layer.bias_offset + c] = sum;
            }
            asm volatile("bar.sync 2, 96;" ::: "memory");
        }
        before += tasks;
    }
}
