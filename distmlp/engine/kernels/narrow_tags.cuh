// Partial sums that say by themselves whether they are there: the lowest bit of every float is the parity of the turn
// that wrote it. It is no part of the number: where a run is resumed, turns are counted anew. Readers ask until the bit
// is right, no barrier and no release stands between.
//
// There are two copies of the partial sums, so a copy's bit changes with every second turn. A turn is a step that was
// carried out; turns are counted over all launches, and all producers deliver in all turns, those without rows zeros.
// A copy is written again two turns later, by a block that has loaded what every owner published in between.
#pragma once
#include "narrow_exchange.cuh"
#include "narrow_gates.cuh"

namespace narrow {

constexpr int PRODUCERS = NARROW_PRODUCERS;  // blocks that have rows in a whole batch

// Turn of a launch's first step; written behind the tallies when a launch ends.
__device__ __forceinline__ u32* turn_of(const Buffers& buffers) { return (u32*)(buffers.tallies(0, 4)); }
__device__ __forceinline__ u32 tag_of(u32 turn) { return ~(turn >> 1) & 1; }  // memory begins with zeros

// What leaves a thread, with a probe for what is not finite (see Limit): squares add up to infinity or NaN, or to more
// than any sum could be allowed.
struct Tagged {
    u32 tag;
    float squares[2];

    __device__ __forceinline__ explicit Tagged(u32 tag_) : tag(tag_), squares{0.f, 0.f} {}
    __device__ __forceinline__ float pass(float x) {
        const float other = squares[0];  // two chains of additions in turn
        squares[0] = squares[1];
        squares[1] = fmaf(x, x, other);
        return x;
    }
    __device__ __forceinline__ bool bad() const {
        return !(squares[0] + squares[1] < 5.192296858534828e33f);  // 2^112
    }
    __device__ __forceinline__ u32 word(float x) const { return (__float_as_uint(x) & ~1u) | tag; }
    __device__ __forceinline__ void store(float* where, float x) const {
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(where), "r"(word(x)) : "memory");
    }
    __device__ __forceinline__ void store4(float* where, const float* x) const {
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(where), "r"(word(x[0])),
                     "r"(word(x[1])), "r"(word(x[2])), "r"(word(x[3]))
                     : "memory");
    }
};

__device__ __forceinline__ bool stale(const uint4& x, u32 tag) { return ((x.x ^ tag | x.y ^ tag | x.z ^ tag | x.w ^ tag) & 1) != 0; }

// A tally, a word that carries its turn: no order to the sums is needed.
__device__ __forceinline__ u64 load_tally(const u64* where) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(where) : "memory");
    return word;
}
__device__ __forceinline__ void store_tally(u64* where, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(where), "l"(word) : "memory");
}
// This warp's share of the tallies into `mine` (4 floats), as await_producers; the loss by block 0 alone.
__device__ __forceinline__ void gather_tallies(const Buffers& buffers, u32 turn, float* mine) {
    const int lane = threadIdx.x & 31, p = (threadIdx.x >> 5) + lane * WORK_WARPS;
    static_assert(PRODUCERS <= 32 * WORK_WARPS, "a producer a lane");
    const u64 *weights = buffers.tallies(turn, 1) + p, *losses = buffers.tallies(turn, 0) + p;
    double loss = 0.;
    float weight = 0.f;
    bool bad = false;
    u32 spins = 0;
    if (p < PRODUCERS) {
        const u32 number = turn + 1 & 0x7fffffffu;
        u64 word = load_tally(weights), other = blockIdx.x == 0 ? load_tally(losses) : word;
        while ((u32)(word >> 33) != number) word = load_tally(weights), count_spin(spins);
        weight = __uint_as_float((u32)word);
        bad = word >> 32 & 1;
        if (blockIdx.x == 0) {
            while ((u32)(other >> 33) != number) other = load_tally(losses), count_spin(spins);
            loss = __uint_as_float((u32)other);
        }
    }
    __syncwarp();
    weight = warp_sum(weight);
    bad = __any_sync(~0u, bad);
    if (blockIdx.x == 0) loss = warp_sum(loss);
    if (lane == 0) {
        mine[0] = weight;
        mine[1] = bad ? 1.f : 0.f;
        *(double*)(mine + 2) = loss;
    }
}

// This warp's share of the sum of a chunk over all producers, into `mine`; `meanwhile` between asking and waiting.
template <class Meanwhile>
__device__ __forceinline__ void sum_tagged(
    const float* partials, u32 tag, int chunk, float* mine, const Meanwhile& meanwhile) {
    constexpr int TURNS = (PRODUCERS + WORK_WARPS - 1) / WORK_WARPS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool some = chunk * CHUNK + 4 * lane < FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(LAYERS));
    const float* source = partials + (i64)warp * PARTIAL_STRIDE + chunk * CHUNK + 4 * lane;
    const uint4 nothing = make_uint4(tag, tag, tag, tag);
    uint4 x[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
        x[i] = some && warp + i * WORK_WARPS < PRODUCERS ? load_fresh(source + (i64)i * WORK_WARPS * PARTIAL_STRIDE)
                                                         : nothing;
    meanwhile();
    u32 spins = 0;
    while (true) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) any |= stale(x[i], tag);
        if (!any) break;
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            if (stale(x[i], tag)) x[i] = load_fresh(source + (i64)i * WORK_WARPS * PARTIAL_STRIDE);
        count_spin(spins);
    }
    __syncwarp();
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        sum.x += __uint_as_float(x[i].x & ~1u), sum.y += __uint_as_float(x[i].y & ~1u);
        sum.z += __uint_as_float(x[i].z & ~1u), sum.w += __uint_as_float(x[i].w & ~1u);
    }
    *(float4*)(mine + 4 * lane) = sum;
}

}  // namespace narrow
