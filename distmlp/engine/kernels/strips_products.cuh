// Products of the strips kernel: TF32, or for float32 three of TF32 each.
#pragma once
#include "mma.cuh"
#include "strips_shape.cuh"

namespace strips {

__device__ __forceinline__ u32 round_tf32(float x) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

// Tensor cores leave out the lower 13 bits of a TF32 operand: half of what is left out, added, rounds it. What is only an
// operand, and not NaN, needs no more.
constexpr u32 HALF = PRODUCT == TF32 ? 0x1000u : 0u, KEPT_BITS = PRODUCT == TF32 ? 0xffffe000u : ~0u;
__device__ __forceinline__ float rounded_operand(float x) { return __uint_as_float(__float_as_uint(x) + HALF); }
__device__ __forceinline__ float value_of_operand(u32 bits) { return __uint_as_float(bits & KEPT_BITS); }
// ReLU of `x`, rounded; NaN, which has the largest bits, goes through.
__device__ __forceinline__ float relu_operand(float x) {
    return __uint_as_float(min((u32)max(__float_as_int(x), 0) + HALF, 0x7fffffffu));
}

// COUNT floats as operands: what TF32 holds of them, and for float32 what it leaves.
template <int COUNT>
struct Operand {
    u32 high[COUNT];
    u32 low[COUNT];

    __device__ __forceinline__ void set(int i, u32 bits) {
        if (PRODUCT == TF32) {
            high[i] = bits;  // rounded when it was stored
        } else {
            const float x = __uint_as_float(bits);
            high[i] = round_tf32(x);
            low[i] = __float_as_uint(x - __uint_as_float(high[i]));
        }
    }
};

// c += a b for 16 x 8 x 8.
__device__ __forceinline__ void multiply(float (&c)[4], const Operand<4>& a, const Operand<2>& b) {
    if (PRODUCT != TF32) {
        mma_tf32(c, a.low, b.high[0], b.high[1]);
        mma_tf32(c, a.high, b.low[0], b.low[1]);
    }
    mma_tf32(c, a.high, b.high[0], b.high[1]);
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void load_vector(u32 (&r)[4], u32 shared) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void store_vector(u32 shared, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
__device__ __forceinline__ float4 to_elements(float x, float y, float z, float w) {
    return make_float4(to_element(x), to_element(y), to_element(z), to_element(w));
}
// f(i) for i < COUNT, shared out over the block.
template <int COUNT, class F>
__device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int i = 0; i < COUNT / BLOCK_THREADS; ++i) f(i * BLOCK_THREADS + (int)threadIdx.x);
    if (COUNT % BLOCK_THREADS > 0 && threadIdx.x < COUNT % BLOCK_THREADS)
        f(COUNT / BLOCK_THREADS * BLOCK_THREADS + (int)threadIdx.x);
}
__device__ __forceinline__ void load_pair(u32& x, u32& y, u32 shared) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(shared) : "memory");
}
__device__ __forceinline__ u32 load_word(u32 shared) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
    return x;
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

}  // namespace strips
