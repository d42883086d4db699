// Weight and bias gradients of the bulk kernel, with the update where that is possible.
#pragma once
#include "bulk_layers.cuh"
#include "joined.cuh"

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
    uint4 seen;  // of another rank's gradient

    __device__ __forceinline__ void load(const Layer& layer, bool direct, const Exchange& ranks) {
        exists = has_weights(layer, r, c);
        if (SEVERAL_RANKS && direct && exists) seen = ranks.look(weight_place(layer, r, c), layer.fan_out % 4 == 0);
        if (direct && exists && layer.fan_out % 4 == 0) parameters.load(weight_place(layer, r, c));
    }
    __device__ __forceinline__ void finish(
        const Layer& layer, const Blocked& copy, const Hyper& h, bool direct, float4 sum, Exchange& ranks) {
        if (!exists) return;
        const i64 at = weight_place(layer, r, c);
        if (SEVERAL_RANKS && direct) sum = ranks.take(at, sum, seen, layer.fan_out % 4 == 0, layer.fan_out - c);
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

// A tile's sums over a share of the batch are put down, and once all shares are, every block adds up and finishes its
// share of the tile: so many times 16 columns. `arrived` of a tile grows by one a share and never goes back. Where the
// batch is not shared out, the sums only change hands within the block.
__device__ __forceinline__ void finish_share(
    const float (&c)[WIDEST / 2], const GradientTask& task, bool direct, const Hyper& shared, float2* partials,
    u32* arrived, u32 target, Exchange& ranks) {
    const Hyper h = shared;  // in registers
    constexpr int PAIRS = BULK_GRADIENT_N / 4, STRIPES = BULK_GRADIENT_N / 16, SHARE = PAIRS * CONSUMERS;
    const Layer& layer = LAYER(task.l);
    const Blocked& copy = near_matrices[task.l].weight;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float2* tile = partials + (i64)(BULK_SPLITS > 1 ? task.tile * BULK_SPLITS : blockIdx.x) * SHARE;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
        __stcg(tile + task.split * SHARE + p * CONSUMERS + threadIdx.x, make_float2(c[2 * p], c[2 * p + 1]));
    if (SEVERAL_RANKS && BULK_SPLITS == 1 && direct) {
        const int row = task.m0 + warp * 16 + (lane >> 2), column = task.n0 + 2 * (lane & 3);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int r = row + (p & 1) * 8, n = column + (p >> 1) * 8;
            if (has_weights(layer, r, n))
                ranks.send(
                    weight_place(layer, r, n), make_float2(c[2 * p], c[2 * p + 1]), layer.fan_out % 4 == 0,
                    layer.fan_out - n);
        }
    }
    // Two stripes of 16 columns at a time; of each the warp has 16 rows, a lane four columns of two of them.
    Quad quads[4];
    const int begin = STRIPES * task.split / BULK_SPLITS, end = STRIPES * (task.split + 1) / BULK_SPLITS;
    const auto load = [&](int stripe) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = stripe + i / 2;
            quads[i].r = own < end ? task.m0 + warp * 16 + (lane >> 2) + i % 2 * 8 : layer.fan_in;
            quads[i].c = task.n0 + own * 16 + (lane & 3) * 4;
            quads[i].load(layer, direct, ranks);
        }
    };
    load(begin);
    sync_consumers();
    if (BULK_SPLITS > 1) {
        if (threadIdx.x == 0) {
            add_release(arrived + task.tile, 1);
            while (load_acquire(arrived + task.tile) < target) {
            }
        }
        sync_consumers();
    }
    const auto add_up = [&](int stripe, float4 (&sums)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = zeros();
#pragma unroll
        for (int split = 0; split < BULK_SPLITS; ++split)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Fragments hold pairs: those of two lanes are four neighbours, and of 16 columns there are two groups.
                const int pair = min(stripe + i / 2, STRIPES - 1) * 4 + (lane >> 1 & 1) * 2 + i % 2;
                const float2* from = tile + split * SHARE + pair * CONSUMERS + warp * 32 + (lane & ~3) + (lane & 1) * 2;
                add_to(sums[i], __ldcg((const float4*)from));
            }
    };
    if (SEVERAL_RANKS && BULK_SPLITS > 1 && direct) {  // all of it first: what comes back takes a while
#pragma unroll 1
        for (int stripe = begin; stripe < end; stripe += 2) {
            float4 sums[4];
            add_up(stripe, sums);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own = stripe + i / 2, r = task.m0 + warp * 16 + (lane >> 2) + i % 2 * 8;
                const int n = task.n0 + own * 16 + (lane & 3) * 4;
                if (own < end && has_weights(layer, r, n))
                    ranks.send(weight_place(layer, r, n), sums[i], layer.fan_out % 4 == 0, layer.fan_out - n);
            }
        }
    }
#pragma unroll 1
    for (int stripe = begin; stripe < end; stripe += 2) {
        float4 sums[4];
        add_up(stripe, sums);
#pragma unroll
        for (int i = 0; i < 4; ++i) quads[i].finish(layer, copy, h, direct, sums[i], ranks);
        if (stripe + 2 < end) load(stripe + 2);
    }
    if (BULK_SPLITS == 1) sync_consumers();  // the next tile's sums go to the same place
}

// Gradients of the biases, 32 columns at a time: three helping warps of a block take a third of the rows' sums each.
// `thirds`: 96 numbers of shared memory.
__device__ __forceinline__ void bias_gradients(int part, int parts_of_rows, bool direct, const Hyper& h, float* thirds, Exchange& ranks) {
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
                if (SEVERAL_RANKS && direct) sum = ranks.sum(layer.bias_offset + c, sum);
                if (direct) update_parameter(h, layer.bias_offset + c, sum);
                else ENGINE.gradient[layer.bias_offset + c] = sum;
            }
            asm volatile("bar.sync 2, 96;" ::: "memory");
        }
        before += tasks;
    }
}
