// Data that say themselves whether they have been written, and operands as they are exchanged.
//
// UNWRITTEN is a pair of bfloat16 that no rounding produces. A reader asks for its words again until none is UNWRITTEN; it
// uses nothing but them, so nothing else has to be ordered. The writer puts the words back to UNWRITTEN when all have read them; a
// grid barrier lies between that and the next asking.
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "resident_shape.cuh"

extern __shared__ __align__(1024) u8 dynamic_shared[];

namespace resident {

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
template <class T>
__device__ __forceinline__ T* shared(int at) {
    return (T*)(dynamic_shared + at);
}

constexpr u32 UNWRITTEN = ~0u;

__device__ __forceinline__ uint4 ask(const uint4* where) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(where));
    return v;
}
__device__ __forceinline__ void tell(uint4* where, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(where), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void tell(uint2* where, u32 x, u32 y) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(where), "r"(x), "r"(y));
}

// The lanes' pairs are an 8 x 8 matrix of bf16, row lane / 4; it comes back transposed.
__device__ __forceinline__ u32 transpose(u32 pairs) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pairs));
    return other;
}
__device__ __forceinline__ uint4 transpose(uint4 v) {
    return make_uint4(transpose(v.x), transpose(v.y), transpose(v.z), transpose(v.w));
}

// A warp's part of an operand of BLOCKS blocks of 16 along the sum, PER tiles each: blocks warp, warp + WARPS, …
template <int BLOCKS, int PER>
struct Operand {
    static constexpr int COUNT = turns(BLOCKS) * PER;
    uint4 v[COUNT];

    // `tile(block, i)`: number of the tile, -1: zeros.
    template <class Tile>
    __device__ __forceinline__ void load(const u8* matrix, const Tile& tile) {
        each(tile, [&](int at, int number) { v[at] = __ldcg((const uint4*)matrix + number * 32 + lane_id()); });
    }
    // Until all is written.
    template <class Tile>
    __device__ __forceinline__ void await(const u8* matrix, const Tile& tile) {
        const uint4* from = (const uint4*)matrix + lane_id();
        u32 most;
        do {
            each(tile, [&](int at, int number) { v[at] = ask(from + number * 32); });
            most = 0;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) most = max(max(most, v[i].x), max(v[i].y, max(v[i].z, v[i].w)));
        } while (__any_sync(~0u, most == UNWRITTEN));
    }

   private:
    template <class Tile, class F>
    __device__ __forceinline__ void each(const Tile& tile, const F& f) {
#pragma unroll
        for (int i = 0; i < turns(BLOCKS); ++i) {
            const int block = warp_id() + i * WARPS;
#pragma unroll
            for (int t = 0; t < PER; ++t) {
                const int number = block < BLOCKS ? tile(block, t) : -1;
                if (number >= 0) f(i * PER + t, number);
                else v[i * PER + t] = make_uint4(0, 0, 0, 0);
            }
        }
    }
};

// Counters of blocks that have come so far, from the start of a launch: two that alternate for the grid barrier of a step, whose
// upper half counts blocks that doubt the step; and of weights that are ready, in two parts.
enum Counter { BARRIER, BOTTOM_READY = 2, TOP_READY };
__device__ __forceinline__ u64* counter(u8* exchange, int which) {
    return (u64*)(exchange + COUNTERS_AT + which * COUNTER_BYTES);
}
constexpr u64 DOUBT = 1ull << 32;

// Half a tile (16 rows, eight features) to its place in an exchanged matrix: group `group` of eight features.
__device__ __forceinline__ uint2* half_place(u8* matrix, int group, int tile) {
    return (uint2*)matrix + (((group >> 1) * TILES + tile) * 32 + lane_id()) * 2 + (group & 1);
}
__device__ __forceinline__ void store_half(u8* matrix, int group, int tile, u32 upper, u32 lower) {
    __stcg(half_place(matrix, group, tile), make_uint2(upper, lower));
}
// The same to a ring whose readers wait for it; its next part becomes unwritten.
__device__ __forceinline__ void tell_half(u8* ring, int bytes, int step, int group, int tile, u32 upper, u32 lower) {
    tell(half_place(ring + step % RING * bytes, group, tile), upper, lower);
    tell(half_place(ring + (step + 1) % RING * bytes, group, tile), UNWRITTEN, UNWRITTEN);
}

}  // namespace resident
