// Weight gradients of all layers over the whole grid, and their update. A cluster sums one tile over one part of the batch;
// then every part's block adds up its share of the tile over all parts, in their order, and updates it.
#pragma once
#include "chain_update.cuh"

namespace chain {

// A cluster's share of the work: a tile and a part of the batch.
struct Unit {
    int tile, split, splits, layer;
    int in, out, in_count, out_count;  // panels of inputs and errors: first one and number, of this block
    int from, to;                      // steps of 64 rows

    __device__ __forceinline__ Unit(int unit, u32 rank, int rows) {
        layer = 0;
        while (layer + 1 < LAYERS && unit >= part_of(layer + 1).first_unit) ++layer;
        const Part& part = part_of(layer);
        splits = part.splits;
        split = (unit - part.first_unit) % splits;
        const int place = (unit - part.first_unit) / splits, down = place / part.across, across = place % part.across;
        tile = part.first_tile + place;
        in = SQUARE ? 4 * down + 2 * (rank >> 1) : part.along_outputs ? 2 * down : 4 * down + 2 * rank;
        out = SQUARE ? 4 * across + 2 * (rank & 1) : part.along_outputs ? 4 * across + 2 * rank : 2 * across;
        in_count = max(0, min(2, part.in - in));
        out_count = max(0, min(2, part.out - out));
        const int steps = steps_of_64(rows);
        from = steps * split / splits;
        to = steps * (split + 1) / splits;
    }
    // The first of the sums of the parts of a quarter of a block's tile, in units of 1,024 float4.
    __device__ __forceinline__ int first_partial(int quarter) const {
        return (part_of(layer).first_unit + (tile - part_of(layer).first_tile) * splits) * CLUSTER * GROUPS + quarter * splits;
    }
};

// Panels of inputs or errors that a block needs of every step, and which of them it copies, for whom.
struct Operand {
    const u8* from;
    i64 stride;     // from step to step, bytes
    u32 at;         // in a stage
    int count;
    int which;      // the one of two that this block copies into all blocks of `mask`, or -1: it copies its own
    u16 mask;

    __device__ __forceinline__ void copy(u32 stage, int step, u32 full) const {
        const u8* panels = from + step * stride;
        if (which < 0) {
            if (count) copy_in(stage + at, panels, count * PIECE_BYTES, full);
        } else if (which < count) {
            copy_to(mask, stage + at + which * PIECE_BYTES, panels + which * PIECE_BYTES, PIECE_BYTES, full);
        }
    }
};

// Operands of the cluster's tiles into the ring, by one thread of each block.
__device__ __noinline__ Ring stream_gradients(Ring ring, int rows, u32 done, int parity) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_cluster();
#pragma unroll 1
    for (int u = blockIdx.x / CLUSTER; u < UNITS; u += gridDim.x / CLUSTER) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const bool shared_in = SQUARE || part.along_outputs, shared_out = SQUARE || !part.along_outputs;
        const Operand inputs = {
            buffers.piece((unit.layer == 0 ? network_inputs(parity) : part.inputs) + unit.in), part.in * PIECE_BYTES, 0,
            unit.in_count, shared_in ? (int)rank & 1 : -1, (u16)(3 << (rank & 2))};
        const Operand errors = {
            buffers.piece(part.errors + unit.out), part.out * PIECE_BYTES, 2 * PIECE_BYTES, unit.out_count,
            shared_out ? (int)(SQUARE ? rank >> 1 : rank) : -1, (u16)(SQUARE ? 5 << (rank & 1) : 3)};
        // A cluster has several units only where the batch is not split: all of them are of the same part of it.
        if (u == blockIdx.x / CLUSTER) context.blocks_of_split += (unit.to - unit.from) * (64 / ROWS);
        await_update(unit.layer, done);  // where the block had no rows
        await_count(buffers.chained + unit.layer * MOST_SPLITS + unit.split, context.blocks_of_split);
        fence_copies();
#pragma unroll 1
        for (int k = unit.from; k < unit.to; ++k) {
            ring.await_empty();
            const u32 full = ring.full(ring.stage);
            expect_bytes(full, (unit.in_count + unit.out_count) * PIECE_BYTES);
            inputs.copy(ring.address(), k, full);
            errors.copy(ring.address(), k, full);
            ring.advance();
        }
    }
    return ring;
}

// Which of the 2,048 pairs of weights that a warpgroup has multiplied a thread updates: those of its part of the batch.
struct Share {
    int from, end;  // pairs
    int in0, out0;  // first weight of the warpgroup's product

    __device__ __forceinline__ Share(const Unit& unit, int in_panel, int out_panel)
        : from(2048 * unit.split / unit.splits + (threadIdx.x & 127)), end(2048 * (unit.split + 1) / unit.splits),
          in0(64 * in_panel), out0(64 * out_panel) {}
    // What does not exist is loaded from where something does, so that loads need no branches.
    __device__ __forceinline__ int pair(int i) const { return min(from + i * 128, end - 1); }
    __device__ __forceinline__ int in(int i) const { return in0 + 16 * (pair(i) >> 6 & 3) + (pair(i) >> 3 & 7) + 8 * (pair(i) & 1); }
    __device__ __forceinline__ int out(int i) const { return out0 + 8 * (pair(i) >> 8) + (pair(i) & 6); }
    __device__ __forceinline__ bool exists(const Part& part, int i) const {
        return from + i * 128 < end && in(i) < part.fan_in && out(i) < part.fan_out;
    }
    __device__ __forceinline__ int at(const Part& part, int i) const {  // in the flat buffers
        return part.weight + (exists(part, i) ? in(i) * part.fan_out + out(i) : 0);
    }
    __device__ __forceinline__ bool both(const Part& part, int i) const { return EVEN || out(i) + 1 < part.fan_out; }
};

constexpr int AHEAD = CHAIN_MEAN ? 2 : 3;  // pairs of weights of a thread under way

struct States {
    TwoWeights weights[AHEAD];

    __device__ __forceinline__ void load(const Part& part, const Share& share) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) weights[i].load(share.at(part, i), share.both(part, i));
    }
};

// Adds up a share over all PARTS and updates it (or leaves it in the flat gradient, where it is not sure that it may be). As
// many loads are under way as there are registers for.
template <int PARTS>
__device__ __forceinline__ void finish_share(
    const Part& part, Share& share, States& states, const float2* sums_of_parts, const Hyper& h, bool sure) {
    constexpr int MOST = ceil_div(ceil_div(2048, PARTS), 128), EACH = MOST < AHEAD ? MOST : AHEAD;
    constexpr int FITTING = 18 / EACH, PARTS_AHEAD = PARTS < FITTING ? PARTS : FITTING;
#pragma unroll 1
    while (share.from < share.end) {
        float2 sum[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum[i] = make_float2(0.f, 0.f);
#pragma unroll
        for (int p = 0; p < PARTS; p += PARTS_AHEAD) {
            float2 x[EACH][PARTS_AHEAD];
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < PARTS_AHEAD; ++j)
                    x[i][j] = p + j < PARTS ? __ldcg(sums_of_parts + (p + j) * 2048 + share.pair(i)) : make_float2(0.f, 0.f);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < PARTS_AHEAD; ++j) sum[i].x += x[i][j].x, sum[i].y += x[i][j].y;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (!share.exists(part, i)) continue;
            if (sure) {
                states.weights[i].update(h, sum[i]);
                states.weights[i].store(share.at(part, i), share.both(part, i));
                publish(part, share.in(i), share.out(i), states.weights[i].value, share.both(part, i));
            } else {
                TwoWeights::put(ENGINE.gradient, share.at(part, i), share.both(part, i), sum[i]);
            }
        }
        share.from += EACH * 128;
        if (share.from < share.end) states.load(part, share);
    }
}

// The workers' part: products, sums over the parts, update (or the flat gradient, where it is not sure that it may be).
__device__ __forceinline__ Ring sum_and_update(Ring ring, int rows, u32 done, int parity) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_cluster();
    const Place place;
    const int half = place.group & 1, other = place.group >> 1;
#pragma unroll 1
    for (int u = blockIdx.x / CLUSTER; u < UNITS; u += gridDim.x / CLUSTER) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const bool there = half < unit.in_count && other < unit.out_count;
        Share share(unit, unit.in + half, unit.out + other);
        States states;
        states.load(part, share);  // for after the products
        // Inputs are the rows of the product, errors its columns.
        float sums[32];
        multiply<8, true, true>(
            sums, ring, unit.to - unit.from, true, [&](u32 stage, int) { return stage + half * PIECE_BYTES; },
            [&](u32 stage, int) { return stage + (2 + other) * PIECE_BYTES; }, [](int) {});
        if (!there) continue;
        const int quarter = rank * GROUPS + place.group;  // of the tile, one of CLUSTER * GROUPS
        float4* const partials = buffers.partials + (i64)unit.first_partial(quarter) * 1024;
        float4* mine = partials + unit.split * 1024 + (threadIdx.x & 127);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            __stcg(mine + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
        meet(GROUP_MEETS + place.group, 128);
        if ((threadIdx.x & 127) == 0) {
            u32* const arrived = buffers.arrivals + unit.tile * CLUSTER * GROUPS + quarter;
            count_up(arrived);
            await_count(arrived, (done + 1) * unit.splits);
        }
        await(ring.totals(), parity);
        meet(GROUP_MEETS + place.group, 128);
        const float2* const sums_of_parts = (const float2*)partials;
        const Hyper& h = context.hyper;
        const bool sure = context.sure[parity];
        if (FIRST_SPLITS == SPLITS || unit.layer > 0) finish_share<SPLITS>(part, share, states, sums_of_parts, h, sure);
        else finish_share<FIRST_SPLITS>(part, share, states, sums_of_parts, h, sure);
        fence_copies();
        meet(GROUP_MEETS + place.group, 128);
        if ((threadIdx.x & 127) == 0) count_up(buffers.updated + unit.layer);
    }
    return ring;
}

}  // namespace chain
