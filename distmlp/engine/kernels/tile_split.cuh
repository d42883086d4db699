// The main loop of `Product` in float32 by Hopper's warpgroup products: three of TF32 each, 64 columns wide. Eight warps are
// two warpgroups of 64 rows, or of the same 64 rows and half of the depth each. A comes to the registers as to `mma.sync`,
// and is split there; B is split on its way from its stage to two planes (n, k), which turns it where it lies as (k, n).
// While the products of a stage run, B of the next one is split.
#pragma once
#include "tile.cuh"
#if PRODUCT == TF32X3
#include "wgmma.cuh"

// D (64 x 64) = A (64 x 8, registers) B: a sum begins so. Zeros in its registers would be instructions between products,
// which ptxas then runs one by one.
__device__ __forceinline__ void begin_64(float* d, const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" NAMES8 "}, {%32,%33,%34,%35}, %36, 0, 1, 1;"
                 : ACC8
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <class S, bool A_ROWS_M, bool B_ROWS_K>
struct SplitProduct : Product<S, A_ROWS_M, B_ROWS_K> {
    typedef Product<S, A_ROWS_M, B_ROWS_K> Base;
    static_assert(S::K == 32 && S::M == 16 * S::WM && S::WM % 4 == 0 && S::N == 64 && S::WN == 1, "one atom deep");
    static constexpr int PLANE = S::N * S::K;  // elements
    static constexpr int PLANES_BYTES = 4 * PLANE * (int)sizeof(Element);  // of two stages
    static constexpr int TILE_AT = PLANES_BYTES + Base::PIPE_BYTES, SHARED_BYTES = TILE_AT + Base::TILE_BYTES;
    static constexpr int STEPS = S::K / STEP_K / S::WK, RESULTS = Base::PAIRS * 2;

    // Sums of one stage: tensor cores cut off what does not fit, so these are added to the others outside.
    float part[RESULTS];
    u32 high[STEPS][4], low[STEPS][4];
    int turn;

    static __device__ __forceinline__ Element* stages(void* shared) { return (Element*)((u8*)shared + PLANES_BYTES); }
    __device__ __forceinline__ void begin() {
        Base::begin();
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) part[i] = 0.f;
        turn = 0;
    }
    __device__ __forceinline__ void start(const Element* stage) {
        u8* planes = dynamic_shared + turn * (2 * PLANE * (int)sizeof(Element));
        turn ^= 1;
        split_b(stage + Base::StageA::SIZE, planes);
        const Element* a = stage + this->warp_m * 16 * (A_ROWS_M ? Base::StageA::STRIDE : 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // plain stores, read by the tensor cores
        __syncthreads();
        take_part();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            this->fragment_a(high[k], a, 0, (this->warp_k * STEPS + k) * STEP_K);
#pragma unroll
            for (int q = 0; q < 4; ++q) split_tf32(high[k][q], low[k][q]);
        }
        const u64 of_high = matrix(planes) + this->warp_k * STEPS * 2;
        const u64 of_low = of_high + PLANE * sizeof(Element) / 16;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (k == 0) begin_64(part, low[k], of_high);
            else narrow::Wgmma<8>::rs_tf32(part, low[k], of_high + k * 2);
            narrow::Wgmma<8>::rs_tf32(part, high[k], of_low + k * 2);
            narrow::Wgmma<8>::rs_tf32(part, high[k], of_high + k * 2);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    __device__ __forceinline__ void settle(const Element*) {}
    __device__ __forceinline__ void end() { take_part(); }

   private:
    __device__ __forceinline__ void take_part() {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) this->c[i] += part[i];
    }
    // B to the planes of what TF32 holds of it and of what is left: rows (n) of 128 bytes, whose 16-byte chunks change
    // places with the row's number (128-byte swizzle).
    static __device__ __forceinline__ void split_b(const Element* b, u8* planes) {
        constexpr int QUADS = S::N * S::K / 4;
        static_assert(QUADS % THREADS == 0, "whole passes");
#pragma unroll
        for (int i = 0; i < QUADS; i += THREADS) {
            const int n = (i + threadIdx.x) % S::N, q = (i + threadIdx.x) / S::N;
            u32 x[4], rest[4];
            if (B_ROWS_K) {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] = __float_as_uint(b[(4 * q + e) * Base::StageB::STRIDE + n]);
            } else {
                const uint4 v = *(const uint4*)(b + n * Base::StageB::STRIDE + 4 * q);
                x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) split_tf32(x[e], rest[e]);
            u8* to = planes + n * 128 + ((q ^ n) & 7) * 16;
            *(uint4*)to = make_uint4(x[0], x[1], x[2], x[3]);
            *(uint4*)(to + PLANE * sizeof(Element)) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
        }
    }
    static __device__ __forceinline__ u64 matrix(const u8* plane) {  // descriptor of a plane
        const u32 at = (u32)__cvta_generic_to_shared(plane);
        return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 / 16) << 32 | 1ull << 62;
    }
};
#endif
