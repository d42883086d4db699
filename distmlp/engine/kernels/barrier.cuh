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

    GridBarrier() = default;  // for shared memory
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
    // By another thread of the block than usual: what `arrivals` will have come to once all blocks are there. The usual thread
    // calls it, and hands it over.
    __device__ __forceinline__ u64 next() { return target += gridDim.x; }
    __device__ __forceinline__ void await() {
        if (threadIdx.x == 0)
            while (load_acquire(arrivals) < target) {
            }
        __syncthreads();
    }
};
