// Barriers in shared memory between warpgroups that work side by side (mbarrier; Hopper only in this form).
#pragma once
#include "narrow_products.cuh"

namespace narrow {

#ifndef SPIN_LIMIT
#define SPIN_LIMIT 0
#endif
// Debug builds end a kernel that waits for what never comes.
__device__ __forceinline__ void count_spin(u32& spins) {
    if (SPIN_LIMIT && ++spins > SPIN_LIMIT) asm volatile("trap;");
}

__device__ __forceinline__ void open_gate(u32 gate, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(gate), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u32 gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(gate) : "memory");
}
// Until phase `parity` has ended; the one before the first has. One statement, so that products in flight around it
// are not held back by a loop of the compiler's.
__device__ __forceinline__ void await(u32 gate, u32 parity) {
#if SPIN_LIMIT
    u32 done, spins = 0;
    do {
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(gate), "r"(parity)
            : "memory");
        count_spin(spins);
    } while (!done);
#else
    asm volatile(
        "{ .reg .pred p;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\n"
        "bra AGAIN;\n"
        "DONE: }" ::"r"(gate),
        "r"(parity)
        : "memory");
#endif
}

// Barriers of some warps of a block: 0 is __syncthreads.
__device__ __forceinline__ void sync_some(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_some(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool any_of_some(int id, int threads, bool mine) {
    u32 any;
    asm volatile(
        "{ .reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"((u32)mine)
        : "memory");
    return any;
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace narrow
