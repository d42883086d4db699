// Sums over the streams in a tree that no number of ranks can change: `reproducible = "ranks"`, see lane_plan.py.
//
// Every step of the table is one stream's rows of the batch. Its gradient and tally go on a stack in memory, whose
// bottom is a row of the message to the other ranks. Once that is reduced, the same stack turns its rows into the total.
// A thread has the same elements in all of it, so nothing here needs a barrier but between this and the rest.
#pragma once
#include "params.cuh"

#if LANES
// Level 0 of the stack is row `place` of the message, the others lie behind it and the ranks' votes.
__device__ __forceinline__ float4* lane_row(int place, int level) {
    const i64 stride = ENGINE.size + TALLY, behind = ENGINE.lane_nodes * stride + TALLY;
    return (float4*)(ENGINE.lane_sums + (level == 0 ? place * stride : behind + (level - 1) * stride));
}
__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What lane `lane` of this rank has left in the gradient buffer goes into the tree.
__device__ __forceinline__ void keep_lane(int lane) {
    const Lane how = ENGINE.lanes[lane];
    const float4* gradient = (const float4*)ENGINE.gradient;
    const i64 vectors = (ENGINE.size + TALLY) / 4, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < vectors; i += step) {
        float4 v = gradient[i];
        for (int k = 1; k <= how.merges; ++k) v = sum_of(lane_row(how.place, how.level - k)[i], v);
        lane_row(how.place, how.level - how.merges)[i] = v;
    }
}

// The reduced message to the gradient buffer, if there is one; then zeros for the next.
__device__ __forceinline__ void finish_lanes(bool reduced) {
    const Lane* how = ENGINE.lanes + ENGINE.lane_stride;
    float4* gradient = (float4*)ENGINE.gradient;
    const int nodes = ENGINE.lane_nodes;
    const i64 vectors = (ENGINE.size + TALLY) / 4, step = (i64)gridDim.x * blockDim.x;
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < vectors; i += step) {
        if (reduced) {
            for (int node = 0; node < nodes; ++node) {  // the stack lies in rows that have been read
                const int level = how[node].level, merges = how[node].merges;
                float4 v = lane_row(node, 0)[i];
                for (int k = 1; k <= merges; ++k) v = sum_of(lane_row(level - k, 0)[i], v);
                lane_row(level - merges, 0)[i] = v;
            }
            // Whether a zero kept its sign depends on who added zeros to it.
            gradient[i] = sum_of(lane_row(0, 0)[i], zero);
        }
        for (int node = 0; node < nodes; ++node) lane_row(node, 0)[i] = zero;
    }
    if (blockIdx.x == 0 && threadIdx.x < TALLY) lane_row(nodes, 0)[threadIdx.x / 4] = zero;
}
#endif
