// What a kernel remembers of other ranks from step to step of a launch, where whoever loses one goes on to the end.
#pragma once
#include "barrier.cuh"
#include "peers.cuh"

struct LaunchRanks {  // in shared memory
    u64 first;  // exchange of the launch
    u32 lost;   // a rank is gone, as somebody of the block has seen

    __device__ __forceinline__ void begin() {  // by one thread, before a barrier
        first = own_post().exchanges;
        lost = own_post().lost;
    }
    // By one thread of the grid, behind the last step.
    __device__ __forceinline__ void end(u32 steps) const { own_post().exchanges = first + steps; }

    __device__ __forceinline__ bool any_lost() const { return *(const volatile u32*)&lost != 0; }
    __device__ __forceinline__ void lose() { *(volatile u32*)&lost = 1; }

    // A grid barrier where a step was not sure. False where that is not to be had, because a rank is lost and other blocks
    // may have heard enough to be sure.
    __device__ __forceinline__ bool meet(GridBarrier& barrier) {
        barrier.arrive();
        if (threadIdx.x == 0)
            while (load_acquire(barrier.arrivals) < barrier.target)
                if (*(const volatile u32*)&own_post().lost) {
                    lose();
                    break;
                }
        __syncthreads();
        return !any_lost();
    }
};
