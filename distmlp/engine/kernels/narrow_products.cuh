// Matrix products of a warpgroup (64 rows, float32 sums in registers) over operands in 8 x 8 blocks.
//
// Two forms of the same functions: `wgmma` on Hopper (sm_90a), `mma.sync` elsewhere, where each of the four warps
// computes its 16 rows. Fragments of both look alike: lane 4 g + t of warp w holds rows 16 w + g and 16 w + g + 8,
// columns 8 j + 2 t and 8 j + 2 t + 1 of block j, in registers 4 j .. 4 j + 3.
#pragma once
#include "types.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define USE_WGMMA 1
#include "wgmma.cuh"
#else
#define USE_WGMMA 0
#endif

namespace narrow {

// A shared-memory operand: bytes between blocks that follow each other along k, and along the other index.
template <int K_BYTES, int OTHER_BYTES, bool K_OUTER>
struct Operand {
    static constexpr int k_bytes = K_BYTES, other_bytes = OTHER_BYTES;
    static constexpr bool k_outer = K_OUTER;  // the rows of a block run along k
    u32 address;

    __device__ __forceinline__ Operand step(int k16) const { return {address + k16 * 2 * K_BYTES}; }
#if USE_WGMMA
    __device__ __forceinline__ u64 descriptor() const {
        return (u64)(address >> 4 & 0x3fff) | (u64)(K_BYTES >> 4) << 16 | (u64)(OTHER_BYTES >> 4) << 32;
    }
#endif
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

template <bool TRANSPOSE>
__device__ __forceinline__ void load_blocks4(u32 (&r)[4], u32 row_address) {
    if (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row_address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row_address)
                     : "memory");
}

// Where this lane's part of a 16 x 16 piece of a fragment lies (registers: block (0,0), (1,0), (0,1), (1,1)).
// `row_blocks` apart lie blocks one below the other.
__device__ __forceinline__ u32 fragment_address(u32 matrix, int row_block, int columns) {
    const int lane = threadIdx.x & 31;
    return matrix + ((row_block + (lane >> 3 & 1)) * columns + (lane >> 4)) * 128 + (lane & 7) * 16;
}

__device__ __forceinline__ void store_blocks4(u32 row_address, const u32 (&r)[4], int columns) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row_address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    const int lane = threadIdx.x & 31;
    const u32 base = row_address - ((lane >> 3 & 1) * columns + (lane >> 4)) * 128 - (lane & 7) * 16 + lane * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base), "r"(r[0]) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + columns * 128), "r"(r[1]) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + 128), "r"(r[2]) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + columns * 128 + 128), "r"(r[3]) : "memory");
#endif
}

#if USE_WGMMA

// Products are asynchronous: begin, products, commit, wait; nothing may touch their registers in between.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Ordinary writes to shared memory become visible to later products (of threads behind a barrier, too).
__device__ __forceinline__ void publish_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Keeps the compiler from using sums before the wait.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int BLOCKS, class B>
__device__ __forceinline__ void product(float* d, const u32* a, B b, bool accumulate) {
    Wgmma<BLOCKS>::template rs<B::k_outer>(d, a, b.descriptor(), accumulate);
}
template <int BLOCKS, class A, class B>
__device__ __forceinline__ void product(float* d, A a, B b) {
    Wgmma<BLOCKS>::template ss<A::k_outer, B::k_outer>(d, a.descriptor(), b.descriptor());
}

#else

__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void commit_products() {}
__device__ __forceinline__ void wait_products() {}
__device__ __forceinline__ void publish_operands() {}
template <int N>
__device__ __forceinline__ void settle(float (&)[N]) {}

__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B with A (16 rows a warp, k16) in registers. A last odd block is read together with the one behind it.
template <int BLOCKS, class B>
__device__ __forceinline__ void product(float* d, const u32* a, B b, bool accumulate) {
    const int lane = threadIdx.x & 31;
    const u32 row = b.address + (lane >> 3 & 1) * B::k_bytes + (lane >> 4) * B::other_bytes + (lane & 7) * 16;
    if (!accumulate) {
#pragma unroll
        for (int i = 0; i < 4 * BLOCKS; ++i) d[i] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 2) {
        u32 r[4];
        load_blocks4<B::k_outer>(r, row + j * B::other_bytes);
        mma(d + 4 * j, a, r[0], r[1]);
        if (j + 1 < BLOCKS) mma(d + 4 * j + 4, a, r[2], r[3]);
    }
}
// A (64 x 16) in shared memory, 16 rows a warp.
template <int BLOCKS, class A, class B>
__device__ __forceinline__ void product(float* d, A a, B b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    u32 fragment[4];
    load_blocks4<A::k_outer>(fragment, a.address + 2 * warp * A::other_bytes + (lane >> 3 & 1) * A::other_bytes +
                                     (lane >> 4) * A::k_bytes + (lane & 7) * 16);
    product<BLOCKS>(d, fragment, b, true);
}

#endif

}  // namespace narrow
