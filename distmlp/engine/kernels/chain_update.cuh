// The update: what is to be known before it, weights of a thread with their slots, biases, and new weights to where products
// read them.
#pragma once
#include "chain_passes.cuh"
#define RANKS_SUMMED CHAIN_PEERS
#include "update.cuh"

namespace chain {

// With other ranks a batch may have no rows here, and sums over the batch are added up eight times at most.
#if CHAIN_PEERS
#define LARGEST_SUM 1e37f
#define COUNTS(weight) true
#else
#define LARGEST_SUM 1e38f
#define COUNTS(weight) weight != 0.f
#endif

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
    const float limit = 0.9f * fminf(largest_sum(weight), LARGEST_SUM), sum = e * (float)rows;
    const bool sure = a * sum < limit && sum < limit && fabs(loss) < 1e30 && is_finite(weight) && COUNTS(weight);
    return {loss, weight, sure};
}

// Until all blocks with rows of this step are done with them, by one thread.
__device__ __noinline__ void await_all(int rows) {
    context.blocks += blocks_at_work(rows);
    await_count(context.buffers.chained + LAYERS * SPLITS, context.blocks);
}

// What is to be known before the update, by one warp.
__device__ __noinline__ void prepare_update(int s, u64 step, int parity) {
    const StepInfo info = ENGINE.steps[s];
    const Totals totals = collect(info.rows);
    if (lane_id() != 0) return;
    const bool sure = totals.sure && OPTIMIZER != LAMB && !ENGINE.needs_norm && !(SEVERAL_RANKS && ENGINE.deferred);
    context.sure[parity] = sure;
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

// The helpers' part: biases, from the column sums of errors; four neighbours a warp at a time.
__device__ __noinline__ void update_biases(int rows, int parity) {
    const Buffers& buffers = context.buffers;
    const Hyper h = context.hyper;
    const bool sure = context.sure[parity];
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
