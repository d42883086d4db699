// Bulk copies of matrix boxes by tensor maps, what arrives told to barriers in shared memory, between the two blocks of
// a cluster (Hopper; PTX ISA 8.0, "cp.async.bulk.tensor", "mbarrier").
#pragma once
#include "types.cuh"

#define SPIN_LIMIT 4000000
#define CLUSTER 2      // blocks that share operands
#define BOX_ROWS 32    // of a copy; fused_state.py makes the maps
#define BOX_COLUMNS 64

__device__ __forceinline__ u32 shared_address(const void* where) { return (u32)__cvta_generic_to_shared(where); }
__device__ __forceinline__ u32 cluster_rank() { return blockIdx.x % CLUSTER; }
__device__ __forceinline__ void cluster_wait() {
    __syncthreads();
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Orders plain accesses before copies and tensor-core reads that follow, to shared and to device memory.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At the barrier at this address in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
            barrier),
        "r"(rank)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
#ifdef SPIN_LIMIT
    u32 spins = 0;
#endif
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#ifdef SPIN_LIMIT
        if (!done && ++spins > SPIN_LIMIT) asm volatile("trap;");
#endif
    } while (!done);
}

// A box with its first element at (row, column) of a matrix to `shared`, zeros beyond the edges, 128-byte swizzle.
__device__ __forceinline__ void copy_box(u32 shared, const void* map, int row, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The same to both blocks of the cluster, told to the barrier at the same place in each.
__device__ __forceinline__ void copy_box_to_all(u32 shared, const void* map, int row, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
