// Operands on their way from device memory into a ring of stages in shared memory: bulk copies that arrive at
// barriers, one warp of a block that asks for them, four warpgroups that multiply. What both blocks of a pair need, one of
// them copies into both; a stage is filled again once both have multiplied.
#pragma once
#include "chain_shape.cuh"
#include "narrow_products.cuh"

namespace chain {

using narrow::begin_products;
using narrow::commit_products;
using narrow::settle;
using narrow::shared_address;

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
#ifdef CHAIN_BOUND  // of polls, for a kernel that is not trusted yet
#define SPIN(condition) for (int turn = 0; condition;) if (++turn == CHAIN_BOUND) __trap()
#else
#define SPIN(condition) while (condition) {}
#endif
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    SPIN(!try_wait(barrier, parity));
}
// Arrives at the same barrier of block `rank` of the pair.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
            barrier),
        "r"(rank)
        : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const u8* from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}
// The same into both blocks of the pair.
__device__ __forceinline__ void copy_to_pair(u32 to, const u8* from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((u16)3)
        : "memory");
}
__device__ __forceinline__ void copy_out(u8* to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies_out() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void await_copies_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// All but the last LEFT groups.
template <int LEFT>
__device__ __forceinline__ void await_copies_out() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Between ordinary accesses and those of copies and products, for device memory too.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Named barriers of a block; 0 is that of __syncthreads.
enum { LAYER_DONE = 1, TOTALS_KNOWN, HELPERS_MEET, ROWS_MEET, GATHER_MEETS, GROUP_MEETS = 8 };

// Counters in device memory that blocks wait at: they only grow within a launch.
__device__ __forceinline__ void count_up(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ u32 load_counter(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
__device__ __forceinline__ void await_count(const u32* counter, u32 count) { SPIN(load_counter(counter) < count); }

// Until layer `l`, or the biases, are updated in the steps of the launch so far, of which `done` there are; what their
// gradients were made of is needed no more then.
__device__ __forceinline__ void await_update(int l, u32 done) {
    const u32 each = l == LAYERS ? gridDim.x : part_of(l).in * part_of(l).out * SPLITS;
    await_count(context.buffers.updated + l, done * each);
}

__device__ __forceinline__ u32 rank_in_pair() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_pair() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A place in the ring; those who fill and those who empty it count the same stages.
struct Ring {
    u32 base;  // shared memory
    u32 stage, parity;

    __device__ __forceinline__ explicit Ring(u32 shared) : base(shared), stage(0), parity(0) {}
    __device__ __forceinline__ u32 full(u32 i) const { return base + BARRIERS_AT + 8 * i; }
    __device__ __forceinline__ u32 empty(u32 i) const { return base + BARRIERS_AT + 8 * STAGES + 8 * i; }
    __device__ __forceinline__ u32 inputs() const { return base + INPUTS_BARRIER_AT; }
    __device__ __forceinline__ u32 address() const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(full(i), 1);
            init_barrier(empty(i), GROUPS * BLOCKS_OF_PAIR);
        }
        init_barrier(inputs(), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void await_full() const { await(full(stage), parity); }
    __device__ __forceinline__ void await_empty() const { await(empty(stage), parity ^ 1); }
    // By all threads of a warpgroup that has multiplied.
    __device__ __forceinline__ void release(u32 i) const {
        if ((threadIdx.x & 127) < BLOCKS_OF_PAIR) arrive_at(empty(i), threadIdx.x & 127);
    }
};

// A piece or a block's panel: rows of 128 bytes, swizzled. k16 steps are 32 bytes apart where k runs along the row, else
// 2,048.
__device__ __forceinline__ u32 operand(u32 address) { return (address >> 4 & 0x3fff) | 512 << 16; }
__device__ __forceinline__ u64 descriptor(u32 operand) { return (u64)0x40000040 << 32 | operand; }
template <int LEFT>
__device__ __forceinline__ void await_products() {
#if USE_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

// sums += A B over 64 of k: operands whose rows run along k (OUTER) or hold it.
template <int BLOCKS, bool OUTER_A, bool OUTER_B>
__device__ __forceinline__ void multiply_piece(float (&sums)[4 * BLOCKS], u32 a, u32 b) {
#if USE_WGMMA
    const u32 x = operand(a), y = operand(b);
    settle(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
        narrow::Wgmma<BLOCKS>::template ss<OUTER_A, OUTER_B>(
            sums, descriptor(x + i * (OUTER_A ? 128 : 2)), descriptor(y + i * (OUTER_B ? 128 : 2)));
    commit_products();
#endif
}

// sums = A B over `depth` stages. `a` and `b` give an operand of a stage: (address of the stage, number) -> address.
template <int BLOCKS, bool OUTER_A, bool OUTER_B, class A, class B>
__device__ __forceinline__ void multiply(
    float (&sums)[4 * BLOCKS], Ring& ring, int depth, bool release, const A& a, const B& b) {
#pragma unroll
    for (int i = 0; i < 4 * BLOCKS; ++i) sums[i] = 0.f;
    u32 last = 0;
#pragma unroll 1
    for (int k = 0; k < depth; ++k) {
        ring.await_full();
        multiply_piece<BLOCKS, OUTER_A, OUTER_B>(sums, a(ring.address(), k), b(ring.address(), k));
        if (k > 0) {
            await_products<1>();
            if (release) ring.release(last);
        }
        last = ring.stage;
        ring.advance();
    }
    await_products<0>();
    settle(sums);
    if (release && depth > 0) ring.release(last);
}

}  // namespace chain
