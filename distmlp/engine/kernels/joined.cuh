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

// The same in every block: each sends its own copy of its tally, so that none waits for another of its GPU. All threads
// of the block call it; `first`: among them are those that the tally belongs to. `sure`: no gradient of this rank can be
// NaN or too large.
__device__ __forceinline__ Agreement agree(Exchange& ranks, bool first, bool sure, float weight, int rows) {
    constexpr int UNSURE = TALLY - 1;
    __shared__ float tally[TALLY];
    const int k = threadIdx.x;
    ranks.number = own_post().exchanges;
    if (first && k == 0) agreed_exchange() = ranks.number;
    if (first && k < TALLY) {
        const u64 began = global_ns();
        const bool vote = k >= TALLY_STOP && k < TALLY_STOP + 3;
        float x = k == TALLY_WEIGHT ? weight : k == TALLY_ROWS ? (float)rows : k == UNSURE && !sure ? 1.f : 0.f;
        if (vote) x = own_post().votes[k - TALLY_STOP];
        x = ranks.sum(ENGINE.size + TALLY + (i64)blockIdx.x * TALLY + k, x);
        tally[k] = x;
        if (blockIdx.x == 0) {
            if (vote) own_post().totals[k - TALLY_STOP] = x;
            if (k == 0) count_wait(began);
        }
    }
    __syncthreads();
    const float total = tally[TALLY_WEIGHT];
    const bool all = tally[UNSURE] == 0.f && tally[TALLY_STOP + 1] == 0.f;
    return Agreement{total, all && total != 0.f && is_finite(total)};
}

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
