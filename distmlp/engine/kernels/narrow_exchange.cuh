// What happens between the blocks of a narrow step: every block sums chunks of the gradient over all blocks in a fixed
// order, updates its parameters, and publishes them as the image that all blocks load into shared memory.
//
// No barrier stands in between. A block's tally, released behind its partial sums, carries the number of the step:
// readers wait for it. Words of the image say by themselves whether they have been written: unwritten ones hold
// UNWRITTEN, which no weight is. There are two copies of the partial sums and three of the image:
//   partial sums  of step s are written again in step s + 2 by a block that has loaded what every owner published in
//                 step s + 1, after it had read the sums of step s.
//   image k + 1   is cleared by its owners before publication k, with a fence between; whoever reads image k + 1 has
//                 loaded image k before, with a fence between. Its readers of three publications ago have all
//                 delivered partial sums since then, which the owner has read.
#pragma once
#include "narrow_sums.cuh"
#include "update.cuh"

namespace narrow {

constexpr u32 UNWRITTEN = 0xffffffffu;
constexpr int IMAGES = 3;

struct Buffers {
    float* partials;  // (2, blocks, PARTIAL_STRIDE), then (2, 2, blocks) tallies of 8 bytes
    u8* images;       // (IMAGES, IMAGE_BYTES): bf16 weights in blocks, float32 biases; the padding is zero

    __device__ __forceinline__ float* partials_of(int s) const {
        return partials + (s & 1) * (i64)gridDim.x * PARTIAL_STRIDE;
    }
    // (blocks,) numbers behind the partial sums: losses (0) or weights (1).
    __device__ __forceinline__ u64* tallies(int s, int which) const {
        return (u64*)(partials + 2 * (i64)gridDim.x * PARTIAL_STRIDE) + (2 * (s & 1) + which) * gridDim.x;
    }
    __device__ __forceinline__ u8* image(u32 publication) const { return images + publication % IMAGES * IMAGE_BYTES; }
};

// Blocks that have tiles, and so partial sums.
__device__ __forceinline__ int producers(int rows) {
    const int tiles = (rows + TILE - 1) / TILE;
    return tiles < (int)gridDim.x ? tiles : (int)gridDim.x;
}

__device__ __forceinline__ uint4 load_fresh(const void* where) {  // written by another block: never from L1
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(where)
                 : "memory");
    return x;
}
// The tally of a step: the same bits in every block.
struct StepTotals {
    float weight;
    bool bad;
};

// Waits until this warp's producers (warp, warp + WARPS, …) have delivered; their tally into `mine` (4 floats).
__device__ __forceinline__ void await_producers(const Buffers& buffers, int s, u32 number, int count, float* mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    double loss = 0.;
    float weight = 0.f;
    bool bad = false;
    for (int p = warp + lane * WARPS; p < count; p += 32 * WARPS) {
        u64 word;
        do word = load_acquire(buffers.tallies(s, 1) + p);
        while ((u32)(word >> 33) != number);
        weight += __uint_as_float((u32)word);
        bad |= word >> 32 & 1;
        loss += __uint_as_float((u32)__ldcg(buffers.tallies(s, 0) + p));
    }
    __syncwarp();
    weight = warp_sum(weight);
    bad = __any_sync(~0u, bad);
    loss = warp_sum(loss);
    if (lane == 0) {
        mine[0] = weight;
        mine[1] = bad ? 1.f : 0.f;
        *(double*)(mine + 2) = loss;
    }
}
// Over the warps; the block has synchronised in between.
__device__ __forceinline__ StepTotals collect_totals(const float* scratch) {
    StepTotals totals = {0.f, false};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        totals.weight += scratch[w * WARP_SUMS + CHUNK];
        totals.bad |= scratch[w * WARP_SUMS + CHUNK + 1] != 0.f;
    }
    return totals;
}
__device__ __forceinline__ double collect_loss(const float* scratch) {
    double loss = 0.;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) loss += *(const double*)(scratch + w * WARP_SUMS + CHUNK + 2);
    return loss;
}

// This warp's share of the sum of a chunk over producers, into `mine` (128 floats).
__device__ __forceinline__ void sum_chunk(const float* partials, int count, int chunk, float* mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = warp; p < count; p += 16 * WARPS) {  // sixteen loads in flight
        const float* source = partials + (i64)p * PARTIAL_STRIDE + chunk * CHUNK + 4 * lane;
        uint4 x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            x[i] = p + i * WARPS < count ? load_fresh(source + (i64)i * WARPS * PARTIAL_STRIDE) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
            sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
        }
    }
    *(float4*)(mine + 4 * lane) = sum;
}

// One parameter with its slots, from device memory and back.
struct Parameter {
    float value, first, second, mean;

    __device__ __forceinline__ void load(int e) {
        first = second = mean = 0.f;
        value = ENGINE.parameters[e];
        if (has_first_slot()) first = ENGINE.first_slot[e];
        if (has_second_slot()) second = ENGINE.second_slot[e];
        if (ENGINE.ema) mean = ENGINE.ema[e];
    }
    __device__ __forceinline__ void store(int e) const {
        ENGINE.parameters[e] = value;
        if (has_first_slot()) ENGINE.first_slot[e] = first;
        if (has_second_slot()) ENGINE.second_slot[e] = second;
        if (ENGINE.ema) ENGINE.ema[e] = mean;
    }
};

// f(place) for the parameters of this block's chunks; threads 0 to 127.
template <class F>
__device__ __forceinline__ void for_each_own(const F& f) {
    for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x) {
        if (threadIdx.x >= CHUNK) break;
        const Place place = locate(chunk, threadIdx.x);
        if (place.flat >= 0) f(place);
    }
}

// No weight is UNWRITTEN: conversions give another NaN.
__device__ __forceinline__ void publish(u8* image, const Place& place, float value) {
    if (place.in < 0)
        *(float*)(image + place.image) = value;
    else
        *(u16*)(image + place.image) = to_element(value).bits;
}
__device__ __forceinline__ void publish_all(u8* image) {
    for_each_own([&](const Place& place) { publish(image, place, __ldcg(ENGINE.parameters + place.flat)); });
}
__device__ __forceinline__ void clear(u8* image, const Place& place) {
    if (place.in < 0)
        *(u32*)(image + place.image) = UNWRITTEN;
    else
        *(u16*)(image + place.image) = (u16)UNWRITTEN;
}

// No tally and nothing but the first image written, before the first step of a launch; a barrier must follow.
__device__ __forceinline__ void clear_exchange(const Buffers& buffers) {
    if (threadIdx.x < 4) buffers.tallies(threadIdx.x >> 1, threadIdx.x & 1)[blockIdx.x] = 0;
    for_each_own([&](const Place& place) {
        for (int i = 1; i < IMAGES; ++i) clear(buffers.image(i), place);
    });
}

// Halves of weights, whole words of biases.
__device__ __forceinline__ bool weights_ready(u32 x) {
    const u32 v = ~x;  // a half that is zero here is unwritten
    return ((v - 0x00010001u) & ~v & 0x80008000u) == 0;
}
__device__ __forceinline__ bool ready(const uint4& x, bool biases) {
    if (biases) return x.x != UNWRITTEN && x.y != UNWRITTEN && x.z != UNWRITTEN && x.w != UNWRITTEN;
    return weights_ready(x.x) && weights_ready(x.y) && weights_ready(x.z) && weights_ready(x.w);
}

// Image → shared memory, as it gets written.
__device__ __forceinline__ void load_image(const u8* image, u8* shared) {
    static_assert(IMAGE_BYTES % 16 == 0, "whole vectors");
    constexpr int VECTORS = IMAGE_BYTES / 16, TURNS = (VECTORS + BLOCK_THREADS - 1) / BLOCK_THREADS;
    constexpr int BIASES = bias_at(0) / 16;
    uint4 x[TURNS];
    bool waiting = threadIdx.x < VECTORS;
    while (waiting) {  // the first vector alone: all blocks asking for all words all the time would slow the writers
        x[0] = load_fresh(image + 16 * threadIdx.x);
        waiting = !ready(x[0], threadIdx.x >= BIASES);
    }
    if (threadIdx.x >= VECTORS) x[0] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 1; i < TURNS; ++i) {
        const int v = threadIdx.x + i * BLOCK_THREADS;
        x[i] = v < VECTORS ? load_fresh(image + 16 * v) : make_uint4(0, 0, 0, 0);
    }
    do {
        waiting = false;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int v = threadIdx.x + i * BLOCK_THREADS;
            if (!ready(x[i], v >= BIASES)) {
                waiting = true;
                x[i] = load_fresh(image + 16 * v);
            }
        }
    } while (waiting);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int v = threadIdx.x + i * BLOCK_THREADS;
        if (v < VECTORS) *(uint4*)(shared + 16 * v) = x[i];
    }
}

// The weight copies that the forward-only kernels read, once a launch.
__device__ __forceinline__ void copy_weights() {
    for_each_own([](const Place& place) {
        if (place.in < 0) return;
        const Layer& layer = ENGINE.layer[place.layer];
        layer.weight[(i64)place.in * layer.ld_out + place.out] = to_element(__ldcg(ENGINE.parameters + place.flat));
    });
}

}  // namespace narrow
