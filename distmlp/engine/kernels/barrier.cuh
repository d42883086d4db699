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
            { u32 spins_ = 0; /*SPIN_DEV*/ while (load_acquire(arrivals) < target) { if (++spins_ > 4000000u) asm volatile("trap;"); } }
        __syncthreads();
    }
};
