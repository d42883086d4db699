// Hopper's bulk copies and the barriers that they report to, and the form in which matrices lie for them.
#pragma once
#include "mma.cuh"

constexpr int COLUMNS = 128 / (int)sizeof(Element), CHUNK_COLUMNS = 16 / (int)sizeof(Element);
__device__ __forceinline__ int blocks_over(int columns) { return (columns + COLUMNS - 1) / COLUMNS; }

// A matrix in blocks of COLUMNS columns, one behind the other; a row of a block is 128 bytes, and the eight 16-byte chunks
// of a row change places with the row's number as `wgmma` reads them (PTX ISA, 128-byte swizzle). A tile of a stage
// is then one contiguous piece of memory a block. `rows` are padded to whole tiles.
struct Blocked {
    u8* base;
    i64 block_bytes;  // rows * 128
    int blocks;       // of COLUMNS columns

    __device__ __forceinline__ u8* at(int row, int block) const { return base + block * block_bytes + (i64)row * 128; }
    // Place of elements (row, column) on, to the end of their 16-byte chunk.
    __device__ __forceinline__ u8* place(int row, int column) const {
        const u32 c = column;
        return at(row, c / COLUMNS) + ((c / CHUNK_COLUMNS ^ row) & 7) * 16 + c % CHUNK_COLUMNS * sizeof(Element);
    }
};

// Products of bfloat16 take operands along rows and along columns. Those of tf32 read shared memory along rows only, so
// inputs, outputs and errors are stored as transposes, their rows (where they are an operand, it is the first one) come
// through registers, and of the weights there are both.
constexpr bool TRANSPOSED = PRODUCT == TF32;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// The thread's number, read anew: what is worked out from it is not kept in registers from tile to tile, of which there are too
// few, but worked out again.
__device__ __forceinline__ u32 thread_anew() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

__device__ __forceinline__ u32 block_anew() {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {  // arrives, too
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at a barrier of any block of the cluster where `really`; no branch, for use between asynchronous products.
// The plain form: with `.release.cluster` every arrival is a fence of the whole GPU.
__device__ __forceinline__ void barrier_arrive(u32 barrier, bool really) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0]; }" ::"r"(barrier),
        "r"((int)really)
        : "memory");
}
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}
// To the same place of both blocks of the cluster, and their barriers.
__device__ __forceinline__ void bulk_load_both(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"((u16)3)
        : "memory");
}
// From shared memory, as a group of its own; until at most LEFT groups have not been read yet; until all are in global memory.
__device__ __forceinline__ void bulk_store(void* global, u32 shared, u32 bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(global),
        "r"(shared), "r"(bytes)
        : "memory");
}
template <int LEFT>
__device__ __forceinline__ void await_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Where another block of the cluster has what lies at `shared` here.
__device__ __forceinline__ u32 address_at(u32 shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
// Between plain accesses and the asynchronous ones of copies and products.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ u32 load_acquire(const u32* where) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(where) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(u32* where, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(where), "r"(value) : "memory");
}
// Adds one at `counter` in shared memory, behind everything that the warp has stored. Where not `really`, does nothing; no
// branch.
__device__ __forceinline__ void tell_stores(u32 counter, bool really) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
        "@p red.release.cta.shared::cta.add.u32 [%0], 1; }" ::"r"(counter),
        "r"((int)really)
        : "memory");
}
__device__ __forceinline__ u32 load_acquire_shared(u32 where) {
    u32 value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(where) : "memory");
    return value;
}

// 16 bytes to shared memory, behind the thread's back, and until all that it asked for are there.
__device__ __forceinline__ void copy_chunk(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_chunk_or_zeros(u32 shared, const void* global, bool copy) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(copy ? 16 : 0) : "memory");
}
__device__ __forceinline__ void await_chunks() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ u32 load_shared(u32 where) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(where) : "memory");
    return value;
}
__device__ __forceinline__ float2 load_shared_pair(u32 where) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(where) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(u32 where, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(where), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 address, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices(u32 address, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
