// The part of other ranks in a narrow step (NARROW_PEERS): every thread that owns a parameter sums it with the same thread
// on the other ranks of the host.
#pragma once
#include "narrow_exchange.cuh"

#ifndef NARROW_PEERS
#define NARROW_PEERS 0
#endif

namespace narrow {

// How the gradients of this rank become those of the step: as they are, or summed over the ranks.
struct OwnSums {
    __device__ __forceinline__ float sum(int chunk, float own) { return own; }
    __device__ __forceinline__ bool agree(StepTotals& totals, const float* scratch, int rows) { return true; }
    __device__ __forceinline__ double loss(const float* scratch) const { return collect_loss(scratch); }
    __device__ __forceinline__ void finish_step() {}
    __device__ __forceinline__ void finish() {}
};

// Every block sends its own copy of the tally, which is the same in all of them, so that no block waits for another.
struct RankSums {
    Exchange words;
    float vote;    // of this rank, where the thread has the place of one in the tally
    float* agreed;  // shared: the tally over the ranks
    u64 waited;

    __device__ __forceinline__ RankSums() : words(own_post().exchanges), vote(0.f), waited(0) {
        __shared__ float tally[TALLY];
        agreed = tally;
        const int k = tally_slot() - TALLY_STOP;
        if (k >= 0 && k < 3) vote = own_post().votes[k];
    }
    // Of the threads behind those that own parameters; negative for all others.
    __device__ __forceinline__ static int tally_slot() {
        const int k = (int)threadIdx.x - CHUNK;
        return k < TALLY ? k : -1;
    }
    __device__ __forceinline__ float sum(int chunk, float own) { return words.sum(chunk * CHUNK + threadIdx.x, own); }

    // All threads of the block. False where a rank could not take part.
    __device__ __forceinline__ bool agree(StepTotals& totals, const float* scratch, int rows) {
        const int k = tally_slot();
        if (k >= 0) {
            float x = vote;
            if (k == TALLY_LOSS) x = totals.bad ? __int_as_float(0x7fc00000) : (float)collect_loss(scratch);
            if (k == TALLY_WEIGHT) x = totals.weight;
            if (k == TALLY_ROWS) x = (float)rows;
            const u64 began = blockIdx.x == 0 ? global_ns() : 0;
            x = words.sum((i64)CHUNKS * CHUNK + blockIdx.x * TALLY + k, x);
            agreed[k] = x;
            if (blockIdx.x == 0) {
                waited += global_ns() - began;
                if (k >= TALLY_STOP && k < TALLY_STOP + 3) own_post().totals[k - TALLY_STOP] = x;
            }
        }
        __syncthreads();
        totals.weight = agreed[TALLY_WEIGHT];
        totals.bad = !is_finite(agreed[TALLY_LOSS]) || !is_finite(totals.weight);
        return agreed[TALLY_STOP + 1] == 0.f;
    }
    __device__ __forceinline__ double loss(const float* scratch) const { return agreed[TALLY_LOSS]; }
    __device__ __forceinline__ void finish_step() { ++words.number; }
    __device__ __forceinline__ void finish() {  // behind the last step
        if (blockIdx.x > 0 || threadIdx.x != CHUNK) return;
        own_post().exchanges = words.number;
        own_post().waited_ns += waited;
    }
};
#if NARROW_PEERS
typedef RankSums Sums;
#else
typedef OwnSums Sums;
#endif

}  // namespace narrow
