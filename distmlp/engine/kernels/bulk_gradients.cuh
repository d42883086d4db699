// Weight and bias gradients of the bulk kernel, with the update where that is possible.
#pragma once
#include "bulk_layers.cuh"
#include "joined.cuh"

// Of a layer: two tiles, one above the other, for a cluster.
__device__ __forceinline__ int gradient_pairs(const Layer& layer) {
    return (layer.fan_in + 2 * TILE_M - 1) / (2 * TILE_M) * ((layer.fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N);
}
// Of all layers those that are a task as a whole: as many rounds of all clusters as the plan says. Of the others a task is a share
// of the batch.
__device__ __forceinline__ int whole_pairs() { return BULK_WHOLE_ROUNDS * (gridDim.x / 2); }
__device__ __forceinline__ int gradient_tasks() {
    int pairs = 0;
    for (int l = 0; l < ENGINE.layers; ++l) pairs += gradient_pairs(LAYER(l));
    return whole_pairs() + (pairs - whole_pairs()) * BULK_SPLITS;
}

// With other ranks what they have of a tile is taken behind the products of the next one, so that it has time to come.
constexpr int LATER = SEVERAL_RANKS;

// Task number i of this block's cluster.
__device__ __forceinline__ int gradient_task(int i) { return block_anew() / 2 + i * (gridDim.x / 2); }

// A tile of a layer's weight gradient, or a share of the batch for it.
struct GradientTask {
    int l, m0, n0, tile, split;  // `tile` counts through all layers
    bool whole;                  // the tile is not shared out
    int turn;                    // of the block's places for whole tiles
    int first, steps;            // of COLUMNS rows

    __device__ __forceinline__ GradientTask(int number, int rank, int rows) {
        const int behind = number - whole_pairs();
        whole = BULK_SPLITS == 1 || behind < 0;
        turn = LATER * (number / (gridDim.x / 2) & 1);
        split = whole ? 0 : behind % BULK_SPLITS;
        int own = whole ? number : whole_pairs() + behind / BULK_SPLITS;
        tile = own * 2 + rank;
        for (l = 0; own >= gradient_pairs(LAYER(l)); ++l) own -= gradient_pairs(LAYER(l));
        const int across = (LAYER(l).fan_out + BULK_GRADIENT_N - 1) / BULK_GRADIENT_N;
        m0 = (own / across * 2 + rank) * TILE_M;
        n0 = own % across * BULK_GRADIENT_N;
        const int all = blocks_over(rows);
        first = whole ? 0 : (int)((i64)all * split / BULK_SPLITS);
        steps = (whole ? all : (int)((i64)all * (split + 1) / BULK_SPLITS)) - first;
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
        const Layer& layer, const Matrices& m, const Hyper& h, bool direct, float4 sum, TileExchange& ranks, i64 sent) {
        if (!exists) return;
        const i64 at = weight_place(layer, r, c);
        if (SEVERAL_RANKS && direct) sum = ranks.take(sent, sum, ranks.look(sent));
        if (!direct) {
            weight_gradient(layer, r, c, sum);
        } else if (layer.fan_out % 4 == 0) {
            parameters.update(h, sum);
            parameters.store(h, at);
            copy_weights(m, r, c, parameters.value);
        } else {
#pragma unroll 1
            for (int k = 0; k < 4 && c + k < layer.fan_out; ++k)
                copy_weight(m, r, c + k, update_parameter(h, at + k, part(sum, k)));
        }
    }
};

// Where the sums of tiles are put down, for every share of the batch. `arrived` of a tile grows by one a share and never
// goes back; once it is at `target`, every block adds up and finishes its share of the tile: so many stripes of 16
// columns, of which a warp has 16 rows and a lane four columns of two of them. Where the batch is not shared out, the
// sums only change hands within the block.
struct Sums {
    static constexpr int PAIRS = BULK_GRADIENT_N / 4, STRIPES = BULK_GRADIENT_N / 16, SHARE = PAIRS * CONSUMERS;
    float2* places;
    u32* arrived;
    u32 target;

    __device__ __forceinline__ float2* of(const GradientTask& task) const {
        if (task.whole) return places + (i64)((1 + LATER) * block_anew() + task.turn) * SHARE;
        const int first = BULK_WHOLE_ROUNDS ? (1 + LATER) * gridDim.x : 0;  // behind those of whole tiles
        return places + (i64)(first + (task.tile - 2 * whole_pairs()) * BULK_SPLITS) * SHARE;
    }
    __device__ __forceinline__ void put(const float (&c)[WIDEST / 2], const GradientTask& task) const {
        float2* to = of(task) + task.split * SHARE + thread_anew();
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) __stcg(to + p * CONSUMERS, make_float2(c[2 * p], c[2 * p + 1]));
    }
    // Until all shares of the tile are there.
    __device__ __forceinline__ void await(const GradientTask& task) const {
        sync_consumers();
        if (task.whole) return;
        if (thread_anew() == 0) {
            add_release(arrived + task.tile, 1);
            while ((int)(load_acquire(arrived + task.tile) - target) < 0) {  // they wrap
            }
        }
        sync_consumers();
    }
    // Place in a share of this lane's four columns of a stripe in row `half`. Fragments hold pairs: those of two lanes are
    // four neighbours, and of 16 columns there are two groups.
    static __device__ __forceinline__ int quad(int stripe, int half) {
        const int lane = thread_anew() & 31, pair = stripe * 4 + (lane >> 1 & 1) * 2 + half;
        return pair * CONSUMERS + (thread_anew() & ~31) + (lane & ~3) + (lane & 1) * 2;
    }
    // These, over all shares in their order.
    template <int SPLITS>
    __device__ __forceinline__ float4 add_up(const float2* tile, int stripe, int half) const {
        const float2* from = tile + quad(stripe, half);
        float4 sum = __ldcg((const float4*)from);
#pragma unroll
        for (int split = 1; split < SPLITS; ++split) add_to(sum, __ldcg((const float4*)(from + split * SHARE)));
        return sum;
    }
};

// Where ranks find what others have of a tile: as it lies in a share, so that a warp sends 256 bytes side by side. Behind all that
// lies flat and behind the tallies.
__device__ __forceinline__ i64 sent_place(const GradientTask& task) {
    return ((ENGINE.size + TALLY * (1 + (i64)gridDim.x) + 63) & ~(i64)63) + (i64)task.tile * (2 * Sums::SHARE);
}
// Sends the other ranks what this block has of a tile. What no other block adds to leaves the registers of the products.
__device__ __forceinline__ void send_products(
    const float (&c)[WIDEST / 2], const GradientTask& task, const TileExchange& ranks) {
    const Layer& layer = LAYER(task.l);
    const int row = task.m0 + (thread_anew() >> 5) * 16 + (thread_anew() >> 2 & 7), column = task.n0 + 2 * (thread_anew() & 2);
    const i64 sent = sent_place(task) + 2 * thread_anew();
#pragma unroll
    for (int p = 0; p < Sums::PAIRS; ++p)
        if (has_weights(layer, row + (p & 1) * 8, column + (p >> 1) * 8))
            ranks.send(sent + 2 * p * CONSUMERS, make_float2(c[2 * p], c[2 * p + 1]));
}
template <int SPLITS, class F>
__device__ __forceinline__ void for_each_own_quad(const GradientTask& task, const Sums& sums, const F& f) {
    const Layer& layer = LAYER(task.l);
    const float2* tile = sums.of(task);
    const int begin = Sums::STRIPES * task.split / SPLITS, end = Sums::STRIPES * (task.split + 1) / SPLITS;
    const int row = task.m0 + (thread_anew() >> 5) * 16 + (thread_anew() >> 2 & 7), column = task.n0 + (thread_anew() & 3) * 4;
#pragma unroll 1
    for (int stripe = begin; stripe < end; ++stripe)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (has_weights(layer, row + half * 8, column + stripe * 16))
                f(sent_place(task) + 2 * Sums::quad(stripe, half), sums.add_up<SPLITS>(tile, stripe, half));
}

// The stripes of a tile that are this block's, two at a time: four quads a lane. WHOLE: the tile lies in the layer, the update
// is made at once, and nothing is asked about a single quad.
template <bool WHOLE, int SPLITS>
__device__ __forceinline__ void finish_stripes(
    const GradientTask& task, bool direct, const Hyper& shared, const Sums& sums) {
    TileExchange ranks(SEVERAL_RANKS ? agreed_exchange() : 0);
    const Hyper h = shared;  // in registers
    const Layer& layer = LAYER(task.l);
    const Matrices& m = near_matrices[task.l];
    const float2* tile = sums.of(task);
    const int begin = Sums::STRIPES * task.split / SPLITS, end = Sums::STRIPES * (task.split + 1) / SPLITS;
    if (Sums::STRIPES < SPLITS && begin == end) {
        if (!LATER) sums.await(task);
        return;
    }
    const i64 sent = SEVERAL_RANKS ? sent_place(task) : 0;
    if (PEER_FORM == SCATTER && direct)
        for_each_own_quad<SPLITS>(task, sums, [&](i64 at, const float4& v) { ranks.pass_on(at, v); });
    const int row = task.m0 + (thread_anew() >> 5) * 16 + (thread_anew() >> 2 & 7), column = task.n0 + (thread_anew() & 3) * 4;
    if (WHOLE) {
        Parameters next[4];
        float4 next_sum[4];
        uint4 next_seen[4];  // of another rank's gradient
        const i64 place = weight_place(layer, row, column), lower = 8 * layer.fan_out;
        const auto load = [&](int stripe) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i64 at = place + min(stripe + i / 2, end - 1) * 16 + i % 2 * lower;
                next[i].load(at);
                if (SEVERAL_RANKS)
                    next_seen[i] = ranks.look(sent + 2 * Sums::quad(min(stripe + i / 2, end - 1), i % 2));
            }
        };
        const auto add_up = [&](int stripe) {
#pragma unroll
            for (int i = 0; i < 4; ++i) next_sum[i] = sums.add_up<SPLITS>(tile, min(stripe + i / 2, end - 1), i % 2);
        };
        load(begin);
        if (!LATER) sums.await(task);
        constexpr bool AHEAD = SPLITS == 1;  // else there are not enough registers
        if (AHEAD) add_up(begin);
#pragma unroll 1
        for (int stripe = begin; stripe < end; stripe += 2) {
            Parameters now[4];
            float4 sum[4];
            uint4 seen[4];
            if (!AHEAD) add_up(stripe);
#pragma unroll
            for (int i = 0; i < 4; ++i) now[i] = next[i], sum[i] = next_sum[i], seen[i] = next_seen[i];
            if (AHEAD) add_up(stripe + 2);
            load(stripe + 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i == 2 && stripe + 1 == end) break;
                const int own = stripe + i / 2;
                const i64 at = place + own * 16 + i % 2 * lower;
                if (SEVERAL_RANKS) sum[i] = ranks.take(sent + 2 * Sums::quad(own, i % 2), sum[i], seen[i]);
                now[i].update(h, sum[i]);
                now[i].store(h, at);
                copy_weights(m, row + i % 2 * 8, column + own * 16, now[i].value);
            }
        }
    } else {
        if (!LATER) sums.await(task);
#pragma unroll 1
        for (int stripe = begin; stripe < end; ++stripe)
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                Quad quad;
                quad.r = row + half * 8;
                quad.c = column + stripe * 16;
                quad.load(layer, direct);
                quad.finish(
                    layer, m, h, direct, sums.add_up<SPLITS>(tile, stripe, half), ranks, sent + 2 * Sums::quad(stripe, half));
            }
    }
}

// What a block has of a tile: where all that add to it, here and on other ranks, find it.
__device__ __forceinline__ void hand_out_share(
    const float (&c)[WIDEST / 2], const GradientTask& task, bool direct, const Sums& sums) {
    sums.put(c, task);
    if (!LATER) return;
    TileExchange ranks(agreed_exchange());
    if (direct && task.whole) send_products(c, task, ranks);
    sums.await(task);
    if (direct && !task.whole)
        for_each_own_quad<BULK_SPLITS>(task, sums, [&](i64 at, const float4& v) { ranks.send(at, v); });
}
__device__ __forceinline__ void finish_share(const GradientTask& task, bool direct, const Hyper& h, const Sums& sums) {
    const Layer& layer = LAYER(task.l);
    const bool inside = direct && layer.fan_out % 4 == 0 && !ENGINE.ema && task.m0 + TILE_M <= layer.fan_in &&
                        task.n0 + BULK_GRADIENT_N <= layer.fan_out;
    if ((BULK_WHOLE_ROUNDS || BULK_SPLITS == 1) && task.whole) {
        if (inside) finish_stripes<true, 1>(task, direct, h, sums);
        else finish_stripes<false, 1>(task, direct, h, sums);
        sync_consumers();  // the next tile's sums go to the same place
    } else {
        if (inside) finish_stripes<true, BULK_SPLITS>(task, direct, h, sums);
        else finish_stripes<false, BULK_SPLITS>(task, direct, h, sums);
    }
}

// Gradients of the biases, 32 columns at a time: each warp that multiplies adds up an eighth of the rows' sums, behind the products.
// While stages come in, loads wait behind them for up to ten thousand clocks. Blocks that have a task less than others do it, if
// they can while those are at their last. `parts`: a number a thread, of shared memory.
__device__ __forceinline__ void bias_gradients(
    int parts_of_rows, bool direct, const Hyper& h, float* parts) {
    constexpr int UNDER_WAY = 16;  // loads of a lane, each of four columns
    const int warp = thread_anew() >> 5, lane = thread_anew() & 31, last = gradient_tasks() % (gridDim.x / 2) * 2;
    const int begin = parts_of_rows * warp / CONSUMER_WARPS, end = parts_of_rows * (warp + 1) / CONSUMER_WARPS;
    int all = 0;
    for (int l = 0; l < ENGINE.layers; ++l) all += (LAYER(l).fan_out + 31) / 32;
    const int first = last && all <= 8 * (int)(gridDim.x - last) ? last : 0, blocks = gridDim.x - first;
    int next = (int)block_anew() - first;  // of all layers' tasks
    if (next < 0) return;
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        const int tasks = (layer.fan_out + 31) / 32;
        const i64 ld = padded_columns(layer);
        for (; next < before + tasks; next += blocks) {
            const int column = (next - before) * 32;
            const float* from = near_matrices[l].sums + column + (lane & 7) * 4;
            float4 four = zeros();
#pragma unroll 1
            for (int i = begin + (lane >> 3); i < end; i += 4 * UNDER_WAY) {
                float4 v[UNDER_WAY];
#pragma unroll
                for (int k = 0; k < UNDER_WAY; ++k) v[k] = __ldcg((const float4*)(from + min(i + k * 4, end - 1) * ld));
#pragma unroll
                for (int k = 0; k < UNDER_WAY; ++k)
                    if (i + k * 4 < end) add_to(four, v[k]);
            }
            const auto over_rows = [](float x) {  // that four lanes have summed
                x += __shfl_xor_sync(~0u, x, 8);
                return x + __shfl_xor_sync(~0u, x, 16);
            };
            four = make_float4(over_rows(four.x), over_rows(four.y), over_rows(four.z), over_rows(four.w));
            if (lane < 8) *(float4*)(parts + warp * 32 + lane * 4) = four;
            sync_consumers();
            const int c = column + lane;
            if (warp == 0 && c < layer.fan_out) {
                float sum = 0.f;
                for (int part = 0; part < CONSUMER_WARPS; ++part) sum += parts[part * 32 + lane];
                if (SEVERAL_RANKS && direct) sum = Exchange(agreed_exchange()).sum(layer.bias_offset + c, sum);
                if (direct) update_parameter(h, layer.bias_offset + c, sum);
                else ENGINE.gradient[layer.bias_offset + c] = sum;
            }
            sync_consumers();
        }
        before += tasks;
    }
}
