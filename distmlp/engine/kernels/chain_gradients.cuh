// Weight gradients of all layers over the whole grid, and their update. A pair of blocks sums one tile over one part of the batch;
// then every part's block adds up its share of the tile over all parts, in their order, and updates it.
#pragma once
#include "chain_ranks.cuh"

namespace chain {

// A pair's share of the work: a tile and a part of the batch.
struct Unit {
    int tile, split, layer;
    int own, shared_, own_count, shared_count;  // panels: of this block alone, and of both
    int from, to;                               // steps of 64 rows

    __device__ __forceinline__ Unit(int unit, u32 rank, int rows) {
        tile = unit / SPLITS;
        split = unit % SPLITS;
        layer = 0;
        while (layer + 1 < LAYERS && tile >= part_of(layer + 1).first_tile) ++layer;
        const Part& part = part_of(layer);
        const int place = tile - part.first_tile, down = place / part.across, across = place % part.across;
        own = 4 * (part.along_outputs ? across : down) + 2 * rank;
        shared_ = 2 * (part.along_outputs ? down : across);
        own_count = max(0, min(2, (part.along_outputs ? part.out : part.in) - own));
        shared_count = min(2, (part.along_outputs ? part.in : part.out) - shared_);
        const int steps = steps_of_64(rows);
        from = split_begin(steps, split);
        to = split_begin(steps, split + 1);
    }
    __device__ __forceinline__ bool is_empty() const { return from == to; }
};

// Operands of the pair's tiles into the ring, by one thread of each block.
__device__ __noinline__ Ring stream_gradients(Ring ring, int rows, u32 done, int parity) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_pair();
    // A pair has several units only where the batch is not split: all of a pair's units are of the same part of it.
    const int steps = steps_of_64(rows), split = blockIdx.x / BLOCKS_OF_PAIR % SPLITS;
    context.blocks_of_split += (split_begin(steps, split + 1) - split_begin(steps, split)) * (64 / ROWS);
#pragma unroll 1
    for (int u = blockIdx.x / BLOCKS_OF_PAIR; u < TILES * SPLITS; u += gridDim.x / BLOCKS_OF_PAIR) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const int inputs = unit.layer == 0 ? network_inputs(parity) : part.inputs;
        const int own = part.along_outputs ? part.errors : inputs, own_stride = part.along_outputs ? part.out : part.in;
        const int both = part.along_outputs ? inputs : part.errors, stride = part.along_outputs ? part.in : part.out;
        const int bytes = (unit.own_count + unit.shared_count) * PIECE_BYTES;
        await_update(unit.layer, done);  // where the block had no rows
        await_count(buffers.chained + unit.layer * SPLITS + unit.split, context.blocks_of_split);
        fence_copies();
#pragma unroll 1
        for (int k = unit.from; k < unit.to; ++k) {
            ring.await_empty();
            const u32 full = ring.full(ring.stage), at = ring.address();
            expect_bytes(full, bytes);
            if (unit.own_count)
                copy_in(at, buffers.piece(own + k * own_stride + unit.own), unit.own_count * PIECE_BYTES, full);
            if (rank < unit.shared_count)
                copy_to_pair(
                    at + (2 + rank) * PIECE_BYTES, buffers.piece(both + k * stride + unit.shared_ + rank), PIECE_BYTES, full);
            ring.advance();
        }
    }
    return ring;
}

// Which of the 2,048 pairs of weights that a warpgroup has multiplied a thread updates: those of its part of the batch.
struct Share {
    int from, end;  // pairs
    int in0, out0;  // first weight of the warpgroup's product

    __device__ __forceinline__ Share(int split, int in_panel, int out_panel)
        : from(2048 * split / SPLITS + (threadIdx.x & 127)), end(2048 * (split + 1) / SPLITS), in0(64 * in_panel),
          out0(64 * out_panel) {}
    // What does not exist is loaded from where something does, so that loads need no branches.
    __device__ __forceinline__ int pair(int i) const { return min(from + i * 128, end - 1); }
    __device__ __forceinline__ int in(int i) const { return in0 + 16 * (pair(i) >> 6 & 3) + (pair(i) >> 3 & 7) + 8 * (pair(i) & 1); }
    __device__ __forceinline__ int out(int i) const { return out0 + 8 * (pair(i) >> 8) + (pair(i) & 6); }
    __device__ __forceinline__ bool exists(const Part& part, int i) const {
        return from + i * 128 < end && in(i) < part.fan_in && out(i) < part.fan_out;
    }
    __device__ __forceinline__ bool both(const Part& part, int i) const { return EVEN || out(i) + 1 < part.fan_out; }
};

constexpr int AHEAD = CHAIN_MEAN ? 2 : 3;               // pairs of weights of a thread under way
constexpr int PARTS_AHEAD = SPLITS < 6 ? SPLITS : 6;  // parts of their sums

struct States {
    TwoWeights weights[AHEAD];
    int at[AHEAD];

    __device__ __forceinline__ void load(const Part& part, const Share& share) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            at[i] = part.weight + (share.exists(part, i) ? share.in(i) * part.fan_out + share.out(i) : 0);
            weights[i].load(at[i], share.both(part, i));
        }
    }
};

// The workers' part: products, sums over the parts, update (or the flat gradient, where it is not sure that it may be).
__device__ __forceinline__ Ring sum_and_update(Ring ring, int rows, u32 done, int parity) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_pair();
    const Place place;
    const int half = place.group & 1, other = place.group >> 1;
    // Sums take the place of those of the step before, which others may still be adding up. Who has rows to sum has waited
    // for operands that came after that; who has none gives zeros and waits: for all blocks, or, where a rank may have no
    // rows at all, for what is updated from those sums.
#if CHAIN_PEERS
    bool met = false;
#else
    bool met = Unit(blockIdx.x / BLOCKS_OF_PAIR, rank, rows).is_empty();
    if (met) meet(TOTALS_KNOWN, WORKERS + 32);
#endif
#pragma unroll 1
    for (int u = blockIdx.x / BLOCKS_OF_PAIR; u < TILES * SPLITS; u += gridDim.x / BLOCKS_OF_PAIR) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const bool turned = part.along_outputs;
        const int in_panel = (turned ? unit.shared_ : unit.own) + half, out_panel = (turned ? unit.own : unit.shared_) + other;
        const bool there = in_panel < part.in && out_panel < part.out;
        Share share(unit.split, in_panel, out_panel);
        States states;
        states.load(part, share);  // for after the products
        // Inputs are the rows of the product, errors its columns; the block's own panels come first in a stage.
        const u32 a_at = ((turned ? 2 : 0) + half) * PIECE_BYTES, b_at = ((turned ? 0 : 2) + other) * PIECE_BYTES;
        float sums[32];
#if CHAIN_PEERS
        if (unit.is_empty()) {
            if ((threadIdx.x & 127) == 0) await_update(unit.layer, done);
            meet(GROUP_MEETS + place.group, 128);
        }
#endif
        multiply<8, true, true>(
            sums, ring, unit.to - unit.from, true, [&](u32 stage, int) { return stage + a_at; },
            [&](u32 stage, int) { return stage + b_at; });
        const int quarter = (unit.tile * BLOCKS_OF_PAIR + rank) * GROUPS + place.group;  // of the tile
        float4* const partials = buffers.partials + (i64)quarter * SPLITS * 1024;
        if (there) {
            float4* mine = partials + unit.split * 1024 + (threadIdx.x & 127);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                __stcg(mine + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
        }
#if !CHAIN_PEERS
        if (!met) meet(TOTALS_KNOWN, WORKERS + 32);
        met = true;
#endif
        if (!there) continue;
        meet(GROUP_MEETS + place.group, 128);
        if ((threadIdx.x & 127) == 0) {
            count_up(buffers.arrivals + quarter);
            await_count(buffers.arrivals + quarter, (done + 1) * SPLITS);
        }
        meet(GROUP_MEETS + place.group, 128);
        const float2* const sums_of_parts = (const float2*)partials;
#if CHAIN_PEERS
        Exchange ranks = exchange_of(done);
#else
        const Hyper h = context.hyper;
        const bool sure = context.sure[parity];
#endif
#pragma unroll 1
        while (share.from < share.end || (CHAIN_PEERS && !met)) {
            float2 sum[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) sum[i] = make_float2(0.f, 0.f);
#pragma unroll
            for (int p = 0; p < SPLITS; p += PARTS_AHEAD) {
                float2 x[AHEAD][PARTS_AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PARTS_AHEAD; ++j)
                        x[i][j] =
                            p + j < SPLITS ? __ldcg(sums_of_parts + (p + j) * 2048 + share.pair(i)) : make_float2(0.f, 0.f);
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PARTS_AHEAD; ++j) sum[i].x += x[i][j].x, sum[i].y += x[i][j].y;
            }
#if CHAIN_PEERS
            int at[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                at[i] = share.exists(part, i) ? quarter * 4096 + 2 * share.pair(i) : -1;
                if (at[i] >= 0) send_pair(ranks, at[i], sum[i]);
            }
            if (!met) meet(TOTALS_KNOWN, WORKERS + 32);
            met = true;
            take_pairs(ranks, at, sum);
            const Hyper h = context.hyper;
            const bool sure = context.sure[parity];
#endif
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (!share.exists(part, i)) continue;
                if (sure) {
                    states.weights[i].update(h, sum[i]);
                    states.weights[i].store(states.at[i], share.both(part, i));
                    publish(part, share.in(i), share.out(i), states.weights[i].value, share.both(part, i));
                } else {
                    TwoWeights::put(ENGINE.gradient, states.at[i], share.both(part, i), sum[i]);
                }
            }
            share.from += AHEAD * 128;
            if (share.from < share.end) states.load(part, share);
        }
#if CHAIN_PEERS
        remember(ranks);
#endif
        fence_copies();
        meet(GROUP_MEETS + place.group, 128);
        if ((threadIdx.x & 127) == 0) count_up(buffers.updated + unit.layer);
    }
    if (!met) meet(TOTALS_KNOWN, WORKERS + 32);
    return ring;
}

}  // namespace chain
