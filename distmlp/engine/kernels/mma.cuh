// Asynchronous copies, fragment loads and tensor-core products in PTX.
#pragma once
#include "types.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define HAS_ASYNC_COPY 0  // Turing: plain loads and plain multiply-add only
#else
#define HAS_ASYNC_COPY 1
#endif

// 16 bytes global → shared; zeros where `valid` is false, and nothing is read then.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
#if HAS_ASYNC_COPY
    const u32 where = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(where), "l"(global), "r"(valid ? 16 : 0) : "memory");
#else
    *(uint4*)shared = valid ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
#endif
}
// The same for four bytes.
__device__ __forceinline__ void copy_word_async(void* shared, const void* global, bool valid) {
#if HAS_ASYNC_COPY
    const u32 where = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(where), "l"(global), "r"(valid ? 4 : 0) : "memory");
#else
    *(u32*)shared = valid ? *(const u32*)global : 0u;
#endif
}
__device__ __forceinline__ void copy_commit() {
#if HAS_ASYNC_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
#if HAS_ASYNC_COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* shared) {
    const u32 where = (u32)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(where));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* shared) {
    const u32 where = (u32)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(where));
}

__device__ __forceinline__ void mma_bf16(float* c, const u32 (&a)[4], u32 b0, u32 b1) {  // 16×8×16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// What TF32 holds of a float, rounded, and what is left of it.
__device__ __forceinline__ void split_tf32(u32& bits, u32& rest) {
    const float x = __uint_as_float(bits);
    bits = bits + 0x1000u & 0xffffe000u;
    rest = __float_as_uint(x - __uint_as_float(bits));
}
__device__ __forceinline__ void mma_tf32(float* c, const u32 (&a)[4], u32 b0, u32 b1) {  // 16×8×8
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
