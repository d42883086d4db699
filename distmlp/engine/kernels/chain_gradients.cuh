// Weight gradients of all layers over the whole grid, and their update. A pair of blocks sums one tile over one part of the batch;
// then every part's block adds up its share of the tile over all parts, in their order, and updates it.
#pragma once
#include "chain_output.cuh"
#include "update.cuh"

namespace chain {

// What a batch came to; the same in every block.
struct Totals {
    double loss;
    float weight;
    bool sure;  // all gradients are finite and not too large, as told from magnitudes
};

// By a warp, from the records of the blocks at work.
__device__ __forceinline__ Totals collect(int rows) {
    const int count = blocks_at_work(rows);
    double loss = 0.;
    float weight = 0.f;
    u32 activation = 0, error = 0;
    for (int b = lane_id(); b < count; b += 32) {
        const uint4 record = __ldcg(context.buffers.records + b);
        loss += __uint_as_float(record.x);
        weight += __uint_as_float(record.y);
        activation = max(activation, record.z);
        error = max(error, record.w);
    }
    loss = warp_sum(loss);
    weight = warp_sum(weight);
    const float a = __uint_as_float(__reduce_max_sync(~0u, activation)), e = __uint_as_float(__reduce_max_sync(~0u, error));
    const float limit = 0.9f * fminf(largest_sum(weight), 1e38f), sum = e * (float)rows;
    const bool sure = a * sum < limit && sum < limit && fabs(loss) < 1e30 && is_finite(weight) && weight != 0.f;
    return {loss, weight, sure};
}

// What is to be known before the update, by one warp.
__device__ __noinline__ void prepare_update(int s, u64 step) {
    const StepInfo info = ENGINE.steps[s];
    const Totals totals = collect(info.rows);
    if (lane_id() != 0) return;
    const bool sure = totals.sure && OPTIMIZER != LAMB && !ENGINE.needs_norm;
    context.sure = sure;
    if (sure) set_hyper(context.hyper, info.rate, 1.f / totals.weight, step + 1);
    if (blockIdx.x != 0) return;
    ENGINE.control->flags[s + 1 & 1].gradient_not_finite = 0;  // last used in step s - 1
    if (sure) {
        ENGINE.results[s] = StepResult{totals.loss, totals.weight, DONE};
        return;
    }
    float* tally = ENGINE.gradient + ENGINE.size;
    for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
    tally[TALLY_LOSS] = (float)totals.loss;
    tally[TALLY_WEIGHT] = totals.weight;
    tally[TALLY_ROWS] = (float)info.rows;
}

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
        from = steps * split / SPLITS;
        to = steps * (split + 1) / SPLITS;
    }
};

// Operands of the pair's tiles into the ring, by one thread of each block.
__device__ __noinline__ Ring stream_gradients(Ring ring, int rows) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_pair();
    fence_copies();
#pragma unroll 1
    for (int u = blockIdx.x / PAIR; u < TILES * SPLITS; u += gridDim.x / PAIR) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const int own = part.along_outputs ? part.errors : part.inputs, own_stride = part.along_outputs ? part.out : part.in;
        const int both = part.along_outputs ? part.inputs : part.errors, stride = part.along_outputs ? part.in : part.out;
        const int bytes = (unit.own_count + unit.shared_count) * PIECE_BYTES;
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

SHAPE_FN bool all_even() {
    for (int i = 1; i <= LAYERS; ++i)
        if (width(i) % 2) return false;
    return true;
}
constexpr bool EVEN = all_even();  // weights come in twos that lie at even places

// Two weights that are neighbours along the outputs; with an odd number of outputs the second may not exist.
struct TwoWeights {
    float2 value, first, second, mean;

    static __device__ __forceinline__ float2 get(const float* flat, int at, bool both) {
        if (EVEN) return __ldcg((const float2*)(flat + at));
        return make_float2(__ldcg(flat + at), both ? __ldcg(flat + at + 1) : 0.f);
    }
    static __device__ __forceinline__ void put(float* flat, int at, bool both, float2 v) {
        if (EVEN) {
            __stcg((float2*)(flat + at), v);
        } else {
            __stcg(flat + at, v.x);
            if (both) __stcg(flat + at + 1, v.y);
        }
    }
    __device__ __forceinline__ void load(int at, bool both) {
        value = get(ENGINE.parameters, at, both);
        first = has_first_slot() ? get(ENGINE.first_slot, at, both) : make_float2(0.f, 0.f);
        second = has_second_slot() ? get(ENGINE.second_slot, at, both) : make_float2(0.f, 0.f);
        if (CHAIN_MEAN) mean = get(ENGINE.ema, at, both);
    }
    __device__ __forceinline__ void update(const Hyper& h, float2 sum) {
        value.x = update_rule(h, value.x, sum.x, first.x, second.x);
        value.y = update_rule(h, value.y, sum.y, first.y, second.y);
        if (!CHAIN_MEAN) return;
        mean.x = average(h.ema_decay, mean.x, value.x);
        mean.y = average(h.ema_decay, mean.y, value.y);
    }
    __device__ __forceinline__ void store(int at, bool both) const {
        put(ENGINE.parameters, at, both, value);
        if (has_first_slot()) put(ENGINE.first_slot, at, both, first);
        if (has_second_slot()) put(ENGINE.second_slot, at, both, second);
        if (CHAIN_MEAN) put(ENGINE.ema, at, both, mean);
    }
};

// Weights (in, out) and (in, out + 1), `out` even, to where products read them; the second may be padding.
__device__ __forceinline__ void publish(const Part& part, int in, int out, float2 v, bool both) {
    u8* piece = context.buffers.piece(part.pieces + (in >> 6) * part.out + (out >> 6));
    const int chunk = (out >> 3 & 7) ^ (in & 7);
    __stcg((u32*)(piece + (in & 63) * 128 + chunk * 16 + (out & 7) * 2), pack_pair(v.x, both ? v.y : 0.f));
}

__device__ __forceinline__ u32 load_arrivals(const u32* where) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(where) : "memory");
    return value;
}

// The workers' part: products, sums over the parts, update (or the flat gradient, where it is not sure that it may be).
// `number` of the step in the launch, from 1 on.
__device__ __forceinline__ Ring sum_and_update(Ring ring, int rows, u32 number) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_pair();
    constexpr int AHEAD = CHAIN_MEAN ? 2 : 3, PARTS = SPLITS < 6 ? SPLITS : 6;  // loads under way: pairs of weights, parts of their sums
    const Place place;
    const int thread = threadIdx.x & 127, half = place.group & 1, other = place.group >> 1;
    bool met = false;
#pragma unroll 1
    for (int u = blockIdx.x / PAIR; u < TILES * SPLITS; u += gridDim.x / PAIR) {
        const Unit unit(u, rank, rows);
        const Part& part = part_of(unit.layer);
        const bool turned = part.along_outputs;
        // Inputs are the rows of the product, errors its columns; the block's own panels come first in a stage.
        const u32 a_at = ((turned ? 2 : 0) + half) * PIECE_BYTES, b_at = ((turned ? 0 : 2) + other) * PIECE_BYTES;
        float sums[32];
        multiply<8, true, true>(
            sums, ring, unit.to - unit.from, true, [&](u32 stage, int) { return stage + a_at; },
            [&](u32 stage, int) { return stage + b_at; });
        if (!met) meet(TOTALS_KNOWN, WORKERS + 32);
        met = true;
        const int in_panel = (turned ? unit.shared_ : unit.own) + half, out_panel = (turned ? unit.own : unit.shared_) + other;
        if (in_panel >= part.in || out_panel >= part.out) continue;
        const int quarter = (unit.tile * PAIR + rank) * GROUPS + place.group;  // of the tile, one of PAIR * GROUPS
        float4* const partials = buffers.partials + (i64)quarter * SPLITS * 1024;
        u32* const arrived = buffers.arrivals + quarter;
        float4* mine = partials + unit.split * 1024 + thread;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            __stcg(mine + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
        const float2* const sums_of_parts = (const float2*)partials;
        const int end = 2048 * (unit.split + 1) / SPLITS;
        int from = 2048 * unit.split / SPLITS + thread;
        // What does not exist is loaded from where something does, so that loads need no branches.
        const auto pair = [&](int i) { return min(from + i * 128, end - 1); };
        const auto in = [&](int i) { return 64 * in_panel + 16 * (pair(i) >> 6 & 3) + (pair(i) >> 3 & 7) + 8 * (pair(i) & 1); };
        const auto out = [&](int i) { return 64 * out_panel + 8 * (pair(i) >> 8) + (pair(i) & 6); };
        const auto exists = [&](int i) { return from + i * 128 < end && in(i) < part.fan_in && out(i) < part.fan_out; };
        const auto both = [&](int i) { return EVEN || out(i) + 1 < part.fan_out; };
        TwoWeights weights[AHEAD];
        int at[AHEAD];
        const auto load_weights = [&] {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                at[i] = part.weight + (exists(i) ? in(i) * part.fan_out + out(i) : 0);
                weights[i].load(at[i], both(i));
            }
        };
        load_weights();  // while the other parts are waited for
        meet(GROUP_MEETS + place.group, 128);
        if (thread == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
            while (load_arrivals(arrived) < number * SPLITS) {
            }
        }
        meet(GROUP_MEETS + place.group, 128);
        const Hyper h = context.hyper;
        const bool sure = context.sure;
#pragma unroll 1
        while (from < end) {
            float2 sum[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) sum[i] = make_float2(0.f, 0.f);
#pragma unroll
            for (int p = 0; p < SPLITS; p += PARTS) {
                float2 x[AHEAD][PARTS];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PARTS; ++j)
                        x[i][j] = p + j < SPLITS ? __ldcg(sums_of_parts + (p + j) * 2048 + pair(i)) : make_float2(0.f, 0.f);
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                    for (int j = 0; j < PARTS; ++j) sum[i].x += x[i][j].x, sum[i].y += x[i][j].y;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (!exists(i)) continue;
                if (sure) {
                    weights[i].update(h, sum[i]);
                    weights[i].store(at[i], both(i));
                    publish(part, in(i), out(i), weights[i].value, both(i));
                } else {
                    TwoWeights::put(ENGINE.gradient, at[i], both(i), sum[i]);
                }
            }
            from += AHEAD * 128;
            if (from < end) load_weights();
        }
    }
    if (!met) meet(TOTALS_KNOWN, WORKERS + 32);
    return ring;
}

// The helpers' part: biases, from the column sums of errors; four neighbours a warp at a time.
__device__ __noinline__ void update_biases(int rows) {
    const Buffers& buffers = context.buffers;
    const Hyper h = context.hyper;
    const bool sure = context.sure;
    const int count = blocks_at_work(rows);
#pragma unroll 1
    for (int u = (warp_id() - FIRST_HELPER) * gridDim.x + blockIdx.x; u < FEATURES / 4; u += HELPERS * gridDim.x) {
        int l = 0;
        while (l + 1 < LAYERS && 4 * u >= part_of(l + 1).feature) ++l;
        const Part& part = part_of(l);
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 5
        for (int b = lane_id(); b < count; b += 32)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += __ldcg(buffers.column_sums + (i64)(4 * u + i) * gridDim.x + b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = warp_sum(sums[i]);
        const int output = 4 * u + lane_id() - part.feature;
        if (lane_id() >= 4 || output >= part.fan_out) continue;
        const float sum = lane_id() == 0 ? sums[0] : lane_id() == 1 ? sums[1] : lane_id() == 2 ? sums[2] : sums[3];
        if (sure) update_parameter(h, part.bias + output, sum);
        else ENGINE.gradient[part.bias + output] = sum;
    }
}

// All weights to where products read them. Any grid; a barrier must follow.
__device__ __noinline__ void publish_all() {
    for (int l = 0; l < LAYERS; ++l) {
        const Part& part = part_of(l);
        const int pairs = (part.fan_out + 1) / 2;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < part.fan_in * pairs; i += gridDim.x * blockDim.x) {
            const int in = i / pairs, out = i % pairs * 2;
            const bool both = out + 1 < part.fan_out;
            const float2 v = TwoWeights::get(ENGINE.parameters, part.weight + in * part.fan_out + out, both);
            publish(part, in, out, v, both);
        }
    }
    fence_copies();
}

}  // namespace chain
