// A step whose gradients the ranks of a host add up and apply at once, each thread what it has: what all blocks of all
// ranks agree on before, and what they find behind it.
#pragma once
#include "peers.cuh"

// Whether that can be: a norm of the whole gradient must not come first.
__device__ __forceinline__ bool ranks_join() {
    return SEVERAL_RANKS && OPTIMIZER != LAMB && ENGINE.needs_norm == PEERS_SUM && !(ENGINE.clip_norm > 0.f);
}

struct Agreement {
    float weight;  // of the rows of all ranks
    bool direct;   // all vouch for their gradients, and have one
};

// The exchange that `agree` has begun, for what comes to it by other ways than an argument.
__device__ __forceinline__ u64& agreed_exchange() {
    __shared__ u64 number;
    return number;
}

// Of the tally that a block sends, by its lanes k < TALLY: where entry k lies, what it is, and what of its sum over the ranks is for
// the host. One entry counts the ranks that do not vouch.
constexpr int TALLY_UNSURE = TALLY - 1;
__device__ __forceinline__ i64 tally_place(int k) { return ENGINE.size + TALLY + (i64)blockIdx.x * TALLY + k; }
__device__ __forceinline__ bool is_vote(int k) { return k >= TALLY_STOP && k < TALLY_STOP + 3; }
__device__ __forceinline__ float vote_of_rank(int k) { return is_vote(k) ? own_post().votes[k - TALLY_STOP] : 0.f; }
__device__ __forceinline__ float own_tally(int k, bool sure, float weight, int rows, float vote) {
    return k == TALLY_WEIGHT ? weight : k == TALLY_ROWS ? (float)rows : k == TALLY_UNSURE && !sure ? 1.f : vote;
}
__device__ __forceinline__ void tell_host(int k, float sum, u64 began) {
    if (blockIdx.x != 0) return;
    if (is_vote(k)) own_post().totals[k - TALLY_STOP] = sum;
    if (k == 0) count_wait(began);
}
__device__ __forceinline__ float sum_of_tallies(Exchange& ranks, int k, bool sure, float weight, int rows) {
    const u64 began = global_ns();
    const float sum = ranks.sum(tally_place(k), own_tally(k, sure, weight, rows, vote_of_rank(k)));
    tell_host(k, sum, began);
    return sum;
}
__device__ __forceinline__ Agreement agreement(float total, float unsure, float left) {
    return Agreement{total, unsure == 0.f && left == 0.f && total != 0.f && is_finite(total)};
}

// The same in every block: each sends its own copy of its tally, so that none waits for another of its GPU. By a warp. `sure`: no
// gradient of this rank can be NaN or too large.
__device__ __forceinline__ Agreement agree_by_warp(bool sure, float weight, int rows) {
    static_assert(TALLY <= 32, "a lane each");
    const int k = threadIdx.x & 31;
    Exchange ranks(own_post().exchanges);
    if (k == 0) agreed_exchange() = ranks.number;
    const float x = k < TALLY ? sum_of_tallies(ranks, k, sure, weight, rows) : 0.f;
    __syncwarp();
    return agreement(
        __shfl_sync(~0u, x, TALLY_WEIGHT), __shfl_sync(~0u, x, TALLY_UNSURE), __shfl_sync(~0u, x, TALLY_STOP + 1));
}

// The same in two halves, for kernels that have something to do meanwhile. What blocks remember, in shared memory:
struct Joining {
    u64 number;          // of the exchange to come
    float votes[TALLY];  // of this rank in this launch, at their places in the tally
    float tally[TALLY];  // own, then that of all ranks
};
__device__ __forceinline__ Joining& joining() {
    __shared__ Joining joining;
    return joining;
}
// At the start of a launch, before a barrier.
__device__ __forceinline__ void begin_joining() {
    const int k = threadIdx.x;
    if (k < TALLY) joining().votes[k] = vote_of_rank(k);
    if (k == 0) joining().number = own_post().exchanges;
}
__device__ __forceinline__ void begin_agreement(bool sure, float weight, int rows) {
    const int k = threadIdx.x;
    if (k >= TALLY) return;
    const float x = own_tally(k, sure, weight, rows, joining().votes[k]);
    if (k == TALLY_LOSS && blockIdx.x == 0) return;
    joining().tally[k] = x;
    Exchange(joining().number).send(tally_place(k), x);
}
// By one thread of block 0, TALLY_LOSS: the part of the tally that it owes.
__device__ __forceinline__ void send_loss(float loss) {
    joining().tally[TALLY_LOSS] = loss;
    Exchange(joining().number).send(tally_place(TALLY_LOSS), loss);
}
// Whether the ranks may update at once; sets the scale. All threads of the block call it.
__device__ __forceinline__ bool finish_agreement(Hyper& hyper) {
    Joining& join = joining();
    const int k = threadIdx.x;
    if (k < 32) {
        const u64 began = blockIdx.x == 0 ? global_ns() : 0;
        float x = 0.f;
        if (k < TALLY) {
            x = Exchange(join.number).take(tally_place(k), join.tally[k]);
            join.tally[k] = x;
            tell_host(k, x, began);
        }
        const float total = __shfl_sync(~0u, x, TALLY_WEIGHT);
        if (k == 0) hyper.scale = 1.f / total;
    }
    __syncthreads();
    return agreement(join.tally[TALLY_WEIGHT], join.tally[TALLY_UNSURE], join.tally[TALLY_STOP + 1]).direct;
}
// By one thread of block 0, over what the step's own result is.
__device__ __forceinline__ void put_joined_result(int s) {
    ENGINE.results[s] = StepResult{joining().tally[TALLY_LOSS], joining().tally[TALLY_WEIGHT], DONE};
}
// Behind the barrier that ends a step. `exchanges` is for the next launch and for update.cuh, which counts its own.
__device__ __forceinline__ void count_exchange(bool direct) {
    if (threadIdx.x > 0) return;
    const u64 next = ++joining().number;
    if (direct && blockIdx.x == 0) own_post().exchanges = next;
}
__device__ __forceinline__ bool rank_is_lost() { return *(const volatile u32*)&own_post().lost; }

// By the thread of block 0 that has put the step's own result down: what it is with the other ranks.
__device__ __forceinline__ void join_result(Exchange& ranks, int s, float loss, float weight) {
    ENGINE.results[s] = StepResult{ranks.sum(ENGINE.size + TALLY_LOSS, loss), weight, DONE};
}

// Behind the barrier that ends the step, in all blocks alike: whether all ranks were there. `done`: nothing is left of
// this exchange for update.cuh.
__device__ __forceinline__ bool all_were_there(int s, bool done) {
    Post& post = own_post();
    if (*(const volatile u32*)&post.lost) {  // the host will say why
        if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        return false;
    }
    if (done && blockIdx.x == 0 && threadIdx.x == 0) ++post.exchanges;
    return true;
}
