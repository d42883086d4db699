// The part of other ranks in a narrow step (NARROW_PEERS): every thread that owns a parameter sums it with the same thread
// on the other ranks of the host.
#pragma once
#ifndef NARROW_PEERS
#define NARROW_PEERS 0
#endif
#if NARROW_PEERS && NARROW_CHAINS == 1
#define RARELY __forceinline__  // where a function is called, or where none is, NVRTC 13.0 serialises products
#endif
#include "narrow_exchange.cuh"

namespace narrow {

// How the gradients of a step become those that are applied: as they are, or summed over the ranks. `number` counts the
// steps of a launch from 1 on.
struct OwnSums {
    static __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ explicit OwnSums(u32 number) {}
    __device__ __forceinline__ float sum(int chunk, float own) { return own; }
    __device__ __forceinline__ void send(int at, float own) {}
    __device__ __forceinline__ float take(int at, float own) { return own; }
    __device__ __forceinline__ bool agree(StepTotals& totals, const float* scratch, int rows) { return true; }
    __device__ __forceinline__ double loss(const float* scratch) const { return collect_loss(scratch); }
    static __device__ __forceinline__ void finish() {}
};

// Of a launch, in shared memory: registers are short where products run.
struct Agreed {
    u64 before;          // exchanges before the launch
    u32 steps;           // of this launch that had one
    u32 lost;            // a rank did not come
    float votes[TALLY];  // of this rank, at their places in the tally
    float tally[TALLY];  // of the last step, over the ranks
};

// Every block sends its own copy of the tally, which is the same in all of them, so that no block waits for another.
struct RankSums {
    Exchange words;

    static __device__ __forceinline__ Agreed& agreed() {
        __shared__ Agreed agreed;
        return agreed;
    }
    // Before a barrier of the block.
    static __device__ __forceinline__ void begin() {
        const int k = threadIdx.x;
        if (k < TALLY) agreed().votes[k] = k >= TALLY_STOP && k < TALLY_STOP + 3 ? own_post().votes[k - TALLY_STOP] : 0.f;
        if (k == 0) agreed().before = own_post().exchanges, agreed().steps = agreed().lost = 0;
    }
    __device__ __forceinline__ explicit RankSums(u32 number) : words(agreed().before + number - 1) {
        words.lost = agreed().lost;
        if (threadIdx.x == 0) agreed().steps = number;
    }
    // Of the threads behind those that own parameters; negative for all others.
    static __device__ __forceinline__ int tally_slot() {
        const int k = (int)threadIdx.x - CHUNK;
        return k < TALLY ? k : -1;
    }
    __device__ __forceinline__ float sum(int chunk, float own) { return words.sum(chunk * CHUNK + threadIdx.x, own); }
    __device__ __forceinline__ void send(int at, float own) { words.send(at, own); }
    __device__ __forceinline__ float take(int at, float own) { return words.take(at, own); }

    // All threads of the block. False where a rank could not take part.
    __device__ __forceinline__ bool agree(StepTotals& totals, const float* scratch, int rows) {
        const int k = tally_slot();
        if (k >= 0) {
            float x = agreed().votes[k];
            if (k == TALLY_LOSS) x = totals.bad ? __int_as_float(0x7fc00000) : (float)collect_loss(scratch);
            if (k == TALLY_WEIGHT) x = totals.weight;
            if (k == TALLY_ROWS) x = (float)rows;
            const u64 began = blockIdx.x == 0 ? global_ns() : 0;
            x = words.sum((i64)CHUNKS * CHUNK + blockIdx.x * TALLY + k, x);
            agreed().tally[k] = x;
            if (words.lost) agreed().lost = 1;
            if (blockIdx.x == 0) {
                if (k == 0) count_wait(began);
                if (k >= TALLY_STOP && k < TALLY_STOP + 3) own_post().totals[k - TALLY_STOP] = x;
            }
        }
        __syncthreads();
        if (agreed().lost) {  // other blocks may have heard of it all: go on as they do, to the end of the launch
            totals = {1.f, false};
            return true;
        }
        totals.weight = agreed().tally[TALLY_WEIGHT];
        totals.bad = !is_finite(agreed().tally[TALLY_LOSS]) || !is_finite(totals.weight);
        return agreed().tally[TALLY_STOP + 1] == 0.f;
    }
    __device__ __forceinline__ double loss(const float* scratch) const { return agreed().tally[TALLY_LOSS]; }
    static __device__ __forceinline__ void finish() {  // behind the last step
        if (blockIdx.x == 0 && threadIdx.x == 0) own_post().exchanges = agreed().before + agreed().steps;
    }
};
#if NARROW_PEERS
typedef RankSums Sums;
#else
typedef OwnSums Sums;
#endif

}  // namespace narrow
