// Sums over the threads of a block in an order that never changes.
#pragma once
#include "types.cuh"

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// The sum over all threads, to all threads. All threads of the block must call it.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double sums[32];
    x = warp_sum(x);
    const int warps = blockDim.x >> 5;
    __syncthreads();  // the last call's readers are done
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = x;
    __syncthreads();
    double total = 0.;
    for (int w = 0; w < warps; ++w) total += sums[w];
    return total;
}

// One atomic maximum a block; all threads call it.
__device__ __forceinline__ void block_largest(u32* where, u32 value) {
    __shared__ u32 largest[32];
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value = max(value, __shfl_xor_sync(~0u, value, mask));
    __syncthreads();  // the last call's readers are done
    if ((threadIdx.x & 31) == 0) largest[threadIdx.x >> 5] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    value = threadIdx.x < blockDim.x >> 5 ? largest[threadIdx.x] : 0;
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value = max(value, __shfl_xor_sync(~0u, value, mask));
    if (threadIdx.x == 0 && value) atomicMax(where, value);
}

// One atomic maximum a warp; integer, so the order does not matter.
__device__ __forceinline__ void warp_largest(u32* where, u32 value) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) value = max(value, __shfl_xor_sync(~0u, value, mask));
    if ((threadIdx.x & 31) == 0 && value) atomicMax(where, value);
}
