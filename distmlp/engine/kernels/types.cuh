// Short names for the integer types, the element type, and conversions. No CUDA header is included anywhere:
// NVRTC then needs nothing but itself.
#pragma once
#include "codes.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Bf16 {
    u16 bits;
};

#if PRODUCT == BF16
typedef Bf16 Element;
#else
typedef float Element;
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }

#if PRODUCT == BF16
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ Element to_element(float x) { return Element{(u16)(pack_pair(x, 0.f) & 0xffffu)}; }
__device__ __forceinline__ void store_quad(Element* where, float4 v) {
    *(uint2*)where = make_uint2(pack_pair(v.x, v.y), pack_pair(v.z, v.w));
}
typedef uint2 FourElements;  // four elements as they lie
__device__ __forceinline__ float4 widen(FourElements v) {
    return make_float4(
        __uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
        __uint_as_float(v.y & 0xffff0000u));
}
#else
// TF32 products read elements as they lie, so they are rounded when they are stored.
__device__ __forceinline__ Element to_element(float x) {
#if PRODUCT == TF32
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
#else
    return x;
#endif
}
__device__ __forceinline__ void store_quad(Element* where, float4 v) {
    *(float4*)where = make_float4(to_element(v.x), to_element(v.y), to_element(v.z), to_element(v.w));
}
typedef float4 FourElements;
__device__ __forceinline__ float4 widen(FourElements v) { return v; }
#endif
__device__ __forceinline__ float4 load_quad(const Element* where) { return widen(*(const FourElements*)where); }

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
    return value;
}

// Order of magnitudes as integers: |a| <= |b| as floats exactly when bits(a) <= bits(b); NaN lies above infinity.
__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ bool is_finite(float x) { return magnitude_bits(x) < 0x7f800000u; }
// Sums of a gradient must stay below this for the mean over `weight` to have a finite square, as the reference engine
// has it: an infinite second moment would freeze a weight for good.
__device__ __forceinline__ float largest_sum(float weight) {
    return weight == 0.f ? __uint_as_float(0x7f800000u) : 1.8446743e19f * fabsf(weight);
}
__device__ __forceinline__ u32 magnitude_bits(float4 v) {
    return max(max(magnitude_bits(v.x), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
}
