// A barrier over the whole grid of a cooperative launch.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u64 load_acquire(const u64* where) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(where) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(u64* where, u64 value) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(where), "l"(value) : "memory");
}

// `arrivals` only ever grows, by the number of blocks a barrier, and is 64 bits wide: never reset, never wraps.
// Between launches it is a multiple of the grid, so a block finds the generation by rounding down what it reads
// before its own first arrival. Every kernel that shares the counter must be launched with the same grid.
struct GridBarrier {
    u64* arrivals;
    u64 target;

    __device__ __forceinline__ explicit GridBarrier(u64* counter) : arrivals(counter), target(0) {
        if (threadIdx.x == 0) {
            const u64 seen = load_acquire(arrivals);
            target = seen - seen % gridDim.x;
        }
    }

    // All writes of all blocks before it are seen by all blocks after it.
    __device__ __forceinline__ void wait() {
        arrive();
        await();
    }

    // Its two halves, for work in between that no other block depends on.
    __device__ __forceinline__ void arrive() {
        __syncthreads();
        if (threadIdx.x == 0) {
            target += gridDim.x;
            add_release(arrivals, 1);
        }
    }
    __device__ __forceinline__ void await() {
        if (threadIdx.x == 0)
            while (load_acquire(arrivals) < target) {
            }
        __syncthreads();
    }
};

// Between phases in which a row depends on nothing but itself and the weights: blocks in groups, each with rows of its
// own, wait for their group only. All groups arrive equally often. Blocks beyond the last whole group take no part.
struct RowBarrier {
    u64* arrivals;  // of all groups, four words apart
    int size, groups, group;
    u64 target;

    __device__ __forceinline__ RowBarrier(u64* counters, int size)
        : arrivals(counters), size(size), groups(gridDim.x / size), group(blockIdx.x / size), target(0) {
        const u64 seen = load_acquire(arrivals + min(group, groups - 1) * 4);
        target = seen - seen % size;
    }
    __device__ __forceinline__ void arrive() {
        __syncthreads();
        target += size;
        if (threadIdx.x == 0 && group < groups) add_release(arrivals + group * 4, 1);
    }
    __device__ __forceinline__ void await() {
        if (threadIdx.x == 0 && group < groups)
            while (load_acquire(arrivals + group * 4) < target) {
            }
        __syncthreads();
    }
    // All groups, as of this block's last arrival or of the one before.
    __device__ __forceinline__ void await_all(bool before = false) {
        const u64 wanted = before ? target - size : target;
        if (threadIdx.x < groups)
            while (load_acquire(arrivals + threadIdx.x * 4) < wanted) {
            }
        __syncthreads();
    }
};
