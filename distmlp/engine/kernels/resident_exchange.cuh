// Data that say themselves whether they have been written, and operands as they are exchanged.
//
// UNWRITTEN is a pair of bfloat16, or a float, that no rounding produces. A reader asks for its words again until none is UNWRITTEN; it
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

// Two neighbouring elements, and a lane's part of a tile.
#if PRODUCT == BF16
typedef u32 Pair;
typedef uint4 Tile;
__device__ __forceinline__ Pair pack(float low, float high) { return pack_pair(low, high); }
__device__ __forceinline__ float2 unpack(Pair v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
__device__ __forceinline__ Pair pair_of(u32 word) { return word; }
#else
struct Pair {
    u32 x, y;
};
struct Tile {
    Pair x, y, z, w;
};
__device__ __forceinline__ Pair pack(float low, float high) {
#if PRODUCT == TF32
    return {__float_as_uint(to_element(low)) & 0xffffe000u, __float_as_uint(to_element(high)) & 0xffffe000u};
#else
    return {min(__float_as_uint(low), UNWRITTEN - 1), min(__float_as_uint(high), UNWRITTEN - 1)};
#endif
}
__device__ __forceinline__ float2 unpack(Pair v) { return make_float2(__uint_as_float(v.x), __uint_as_float(v.y)); }
__device__ __forceinline__ Pair pair_of(u32 word) { return {word, word}; }
#endif

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

// Tile number `number` of an exchanged matrix through `load(place)` and `store(place, 16 bytes)`; HALF: the first eight columns,
// the others are zero.
#if PRODUCT == BF16
template <bool HALF, class Load>
__device__ __forceinline__ Tile load_tile(const u8* matrix, int number, const Load& load) {
    return load((const uint4*)matrix + number * 32 + lane_id());
}
template <class Store>
__device__ __forceinline__ void store_tile(u8* matrix, int number, const Tile& v, const Store& store) {
    store((uint4*)matrix + number * 32 + lane_id(), v);
}
#else
template <bool HALF, class Load>
__device__ __forceinline__ Tile load_tile(const u8* matrix, int number, const Load& load) {
    const uint4* from = (const uint4*)matrix + number * 64 + lane_id();
    const uint4 a = load(from), b = HALF ? make_uint4(0, 0, 0, 0) : load(from + 32);
    return {{a.x, a.y}, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}};
}
template <class Store>
__device__ __forceinline__ void store_tile(u8* matrix, int number, const Tile& v, const Store& store) {
    uint4* to = (uint4*)matrix + number * 64 + lane_id();
    store(to, make_uint4(v.x.x, v.x.y, v.y.x, v.y.y));
    store(to + 32, make_uint4(v.z.x, v.z.y, v.w.x, v.w.y));
}
#endif
template <bool HALF = false>
__device__ __forceinline__ Tile load_tile(const u8* matrix, int number) {
    return load_tile<HALF>(matrix, number, [](const uint4* from) { return __ldcg(from); });
}
__device__ __forceinline__ void store_tile(u8* matrix, int number, const Tile& v) {
    store_tile(matrix, number, v, [](uint4* to, const uint4& part) { __stcg(to, part); });
}
__device__ __forceinline__ void tell_tile(u8* matrix, int number, const Tile& v) {
    store_tile(matrix, number, v, [](uint4* to, const uint4& part) { tell(to, part); });
}
__device__ __forceinline__ Tile same(const Pair& v) { return {v, v, v, v}; }

// The lanes' pairs are an 8 x 8 matrix, row lane / 4; it comes back transposed.
__device__ __forceinline__ u32 transpose_halves(u32 pairs) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pairs));
    return other;
}
__device__ __forceinline__ Pair transpose(const Pair& v) {
#if PRODUCT == BF16
    return transpose_halves(v);
#else  // the upper and the lower halves of all elements
    const u32 low = transpose_halves(__byte_perm(v.x, v.y, 0x5410)), high = transpose_halves(__byte_perm(v.x, v.y, 0x7632));
    return {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
#endif
}
__device__ __forceinline__ Tile transpose(const Tile& v) {
    return {transpose(v.x), transpose(v.y), transpose(v.z), transpose(v.w)};
}
#if PRODUCT == BF16
__device__ __forceinline__ u32 largest_word(const Tile& v) { return max(max(v.x, v.y), max(v.z, v.w)); }
#else
__device__ __forceinline__ u32 largest_word(const Pair& v) { return max(v.x, v.y); }
__device__ __forceinline__ u32 largest_word(const Tile& v) {
    return max(max(largest_word(v.x), largest_word(v.y)), max(largest_word(v.z), largest_word(v.w)));
}
#endif

// A warp's part of an operand of BLOCKS blocks of 16 along the sum, PER tiles each: blocks warp, warp + WARPS, …
// HALF: only the first eight columns of a tile are of use.
template <int BLOCKS, int PER, bool HALF = false>
struct Operand {
    static constexpr int COUNT = turns(BLOCKS) * PER;
    Tile v[COUNT];

    // `tile(block, i)`: number of the tile, -1: zeros.
    template <class Tile>
    __device__ __forceinline__ void load(const u8* matrix, const Tile& tile) {
        each(tile, [&](int at, int number) { v[at] = load_tile<HALF>(matrix, number); });
    }
    // Until all is written.
    template <class Tile>
    __device__ __forceinline__ void await(const u8* matrix, const Tile& tile) {
        u32 most;
        do {
            each(tile, [&](int at, int number) {
                v[at] = load_tile<HALF>(matrix, number, [](const uint4* from) { return ask(from); });
            });
            most = 0;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) most = max(most, largest_word(v[i]));
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
                else v[i * PER + t] = same(pair_of(0u));
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
#if PRODUCT == BF16
__device__ __forceinline__ uint2* half_place(u8* matrix, int group, int tile) {
    return (uint2*)matrix + (((group >> 1) * TILES + tile) * 32 + lane_id()) * 2 + (group & 1);
}
__device__ __forceinline__ void store_half(u8* matrix, int group, int tile, Pair upper, Pair lower) {
    __stcg(half_place(matrix, group, tile), make_uint2(upper, lower));
}
__device__ __forceinline__ void tell_half(u8* matrix, int group, int tile, Pair upper, Pair lower) {
    tell(half_place(matrix, group, tile), upper, lower);
}
#else
__device__ __forceinline__ uint4* half_place(u8* matrix, int group, int tile) {
    return (uint4*)matrix + (((group >> 1) * TILES + tile) * 2 + (group & 1)) * 32 + lane_id();
}
__device__ __forceinline__ void store_half(u8* matrix, int group, int tile, const Pair& upper, const Pair& lower) {
    __stcg(half_place(matrix, group, tile), make_uint4(upper.x, upper.y, lower.x, lower.y));
}
__device__ __forceinline__ void tell_half(u8* matrix, int group, int tile, const Pair& upper, const Pair& lower) {
    tell(half_place(matrix, group, tile), make_uint4(upper.x, upper.y, lower.x, lower.y));
}
#endif
// The same to a ring whose readers wait for it; its next part becomes unwritten.
__device__ __forceinline__ void tell_half(
    u8* ring, int bytes, int step, int group, int tile, const Pair& upper, const Pair& lower) {
    tell_half(ring + step % RING * bytes, group, tile, upper, lower);
    tell_half(ring + (step + 1) % RING * bytes, group, tile, pair_of(UNWRITTEN), pair_of(UNWRITTEN));
}

}  // namespace resident
