// The part of other ranks in a step of the chain (CHAIN_PEERS): every thread that has a sum over the batch adds to it
// those of the same thread on the other ranks of the host, in every step, before anybody knows whether the update may be
// done at once; what may not goes on as the flat gradient of all ranks.
//
// Words to a rank, a step: pairs of weights (tiles, BLOCKS_OF_PAIR, GROUPS, 2,048) as the warpgroups have multiplied them, biases
// (FEATURES), a tally a block. All in places of their own, always by the same thread: it has taken what came of one step,
// and so emptied the place, long before it sends what makes the other rank send for the step after the next.
//
// Whoever loses a rank goes on to the end of the launch with whatever it finds, as if all were well, and nobody waits for
// ranks any more: blocks may have heard of different things. The host then throws the outcome away.
#pragma once
#include "chain_update.cuh"
#if CHAIN_PEERS
#include "launch_ranks.cuh"
#endif

namespace chain {

#if CHAIN_PEERS
constexpr int BIAS_WORDS = ARRIVALS * 4096, TALLY_WORDS = BIAS_WORDS + FEATURES;
constexpr int BIAS_TURNS = ceil_div(FEATURES / 4, HELPERS * CHAIN_BLOCKS);

__shared__ struct : LaunchRanks {
    float agreed[TALLY];  // the tally of all ranks
} ranks_seen;

__device__ __forceinline__ Exchange exchange_of(u32 done) {
    Exchange ranks(ranks_seen.first + done);
    ranks.lost = ranks_seen.any_lost();
    return ranks;
}
__device__ __forceinline__ void remember(const Exchange& ranks) {
    if (ranks.lost) ranks_seen.lose();
}

__device__ __forceinline__ void send_pair(const Exchange& ranks, int at, float2 v) { ranks.send(at, v); }

// The sums over the ranks of N pairs at places `at`, negative: none.
template <int N>
__device__ __forceinline__ void take_pairs(Exchange& ranks, const int (&at)[N], float2 (&sum)[N]) {
    u64 began = 0;
    float2 own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = sum[i];
#pragma unroll 1
    for (int r = 0; r < PEERS.ranks; ++r) {
        float2 v[N];
        if (r == PEERS.rank) {
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = own[i];
        } else {
            const u32* const from = ranks.words(PEERS.rank, r, 0);
            for (u32 looks = 1;; ++looks) {
                bool all = true;
                uint2 seen[N];
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    seen[i] = make_uint2(0, 0);
                    if (at[i] >= 0)
                        asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];"
                                     : "=r"(seen[i].x), "=r"(seen[i].y)
                                     : "l"(from + at[i])
                                     : "memory");
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    all = all && seen[i].x != UNWRITTEN_WORD && seen[i].y != UNWRITTEN_WORD;
                    v[i] = make_float2(__uint_as_float(seen[i].x), __uint_as_float(seen[i].y));
                }
                if (all || !ranks.patient(looks, began)) break;
            }
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (at[i] >= 0)
                    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%1};" ::"l"(from + at[i]), "r"(UNWRITTEN_WORD)
                                 : "memory");
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = r == 0 ? v[i] : make_float2(sum[i].x + v[i].x, sum[i].y + v[i].y);
    }
    __syncwarp();
}

// Lane k: entry k of this rank's tally. By a warp.
__device__ __forceinline__ float own_tally(const Totals& totals, int rows) {
    const int k = lane_id();
    if (k >= TALLY_STOP && k < TALLY_STOP + 3) return own_post().votes[k - TALLY_STOP];
    return k == TALLY_LOSS     ? (float)totals.loss
           : k == TALLY_WEIGHT ? totals.weight
           : k == TALLY_ROWS   ? (float)rows
           : k == TALLY - 1    ? (totals.sure ? 0.f : 1.f)
                               : 0.f;
}

// The tallies of all ranks, and what follows for the update; by a warp. The same in all blocks of all ranks.
__device__ __forceinline__ void agree(int s, u64 step, int parity, Exchange& ranks, float own) {
    const int k = lane_id();
    const u64 began = global_ns();
    if (k < TALLY) ranks_seen.agreed[k] = ranks.take(TALLY_WORDS + blockIdx.x * TALLY + k, own);
    remember(ranks);
    __syncwarp();
    if (k != 0) return;
    const float* const agreed = ranks_seen.agreed;
    const float weight = agreed[TALLY_WEIGHT], loss = agreed[TALLY_LOSS];
    const bool all = agreed[TALLY - 1] == 0.f && agreed[TALLY_STOP + 1] == 0.f && weight != 0.f && is_finite(weight) &&
                     is_finite(loss) && OPTIMIZER != LAMB && !(ENGINE.clip_norm > 0.f);
    const bool sure = all || ranks_seen.any_lost();
    context.sure[parity] = sure;
    if (sure) set_hyper(context.hyper, ENGINE.steps[s].rate, 1.f / weight, step + 1);
    if (blockIdx.x != 0) return;
    own_post().waited_ns += global_ns() - began;
    for (int i = 0; i < 3; ++i) own_post().totals[i] = agreed[TALLY_STOP + i];
    ENGINE.control->flags[s + 1 & 1].gradient_not_finite = 0;  // last used in step s - 1
    if (sure) {
        ENGINE.results[s] = StepResult{loss, weight, DONE};
        return;
    }
    for (int i = 0; i < TALLY; ++i) ENGINE.gradient[ENGINE.size + i] = agreed[i];
}

// As update_biases: f(turn, layer, output, place of it among those of all layers, sum of its errors) for the biases of this
// thread. SUM: whether the sum is wanted.
template <bool SUM, class F>
__device__ __forceinline__ void for_each_own_bias(int rows, const F& f) {
    const int count = blocks_at_work(rows);
    int turn = 0;
#pragma unroll 1
    for (int u = (warp_id() - FIRST_HELPER) * gridDim.x + blockIdx.x; u < FEATURES / 4; u += HELPERS * gridDim.x, ++turn) {
        int l = 0;
        while (l + 1 < LAYERS && 4 * u >= part_of(l + 1).feature) ++l;
        const Part& part = part_of(l);
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
        if (SUM) {
#pragma unroll 5
            for (int b = lane_id(); b < count; b += 32)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] += __ldcg(context.buffers.column_sums + (i64)(4 * u + i) * gridDim.x + b);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = warp_sum(sums[i]);
        }
        const int output = 4 * u + lane_id() - part.feature;
        if (lane_id() >= 4 || output >= part.fan_out) continue;
        f(turn, part, output, 4 * u + lane_id(),
          lane_id() == 0 ? sums[0] : lane_id() == 1 ? sums[1] : lane_id() == 2 ? sums[2] : sums[3]);
    }
}

// What helpers do once the rank's batch is through: totals and biases, sent before any is waited for.
__device__ __noinline__ void join_ranks(int s, u64 step, int rows, u32 done, int parity) {
    Exchange ranks = exchange_of(done);
    const bool first = warp_id() == FIRST_HELPER;
    float tally = 0.f;
    if (first) {
        tally = own_tally(collect(rows), rows);
        if (lane_id() < TALLY) ranks.send(TALLY_WORDS + blockIdx.x * TALLY + lane_id(), tally);
    }
    meet(HELPERS_MEET, 32 * HELPERS);
    float own[BIAS_TURNS];
    for_each_own_bias<true>(rows, [&](int turn, const Part&, int, int feature, float sum) {
        own[BIAS_TURNS == 1 ? 0 : turn] = sum;
        ranks.send(BIAS_WORDS + feature, sum);
    });
    if (first) {
        agree(s, step, parity, ranks, tally);
        __syncwarp();
        arrive(TOTALS_KNOWN, WORKERS + 32);
    }
    meet(HELPERS_MEET, 32 * HELPERS);
    const Hyper h = context.hyper;
    const bool sure = context.sure[parity];
    for_each_own_bias<false>(rows, [&](int turn, const Part& part, int output, int feature, float) {
        const float sum = ranks.take(BIAS_WORDS + feature, own[BIAS_TURNS == 1 ? 0 : turn]);
        if (sure) update_parameter(h, part.bias + output, sum);
        else ENGINE.gradient[part.bias + output] = sum;
    });
    remember(ranks);
    __syncwarp();
}

// Where a step was not sure: the grid barrier behind it. False where that is not to be had or a rank could not take part.
__device__ __noinline__ bool meet_unsure(int s, GridBarrier& barrier, Progress& progress) {
    if (!ranks_seen.meet(barrier)) return false;
    if (ranks_seen.agreed[TALLY_STOP + 1] == 0.f) return true;
    progress.frozen = true;
    if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
    return false;
}
#endif

}  // namespace chain
