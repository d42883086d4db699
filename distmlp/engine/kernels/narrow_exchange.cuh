// What happens between the blocks of a narrow step: every block sums chunks of the gradient over all blocks in a fixed
// order, updates its parameters, and publishes them as the image that all blocks load into shared memory.
//
// No barrier stands in between. Every word says by itself whether it has been written: unwritten words hold
// UNWRITTEN, which no sum and no weight is. Who has read partial sums marks them unwritten again; of the image, which
// all read, there are three copies, and an owner clears the next one when nobody can be reading it any more.
// What makes that safe, with publication k and step s, where `order_exchange` is a fence between a step's tiles and its
// partial sums in every thread:
//   partial sums  of step s are cleared by their reader in step s, fenced in step s + 1 before it publishes; they are
//                 written again in step s + 2 by a block that has loaded what was published in step s + 1, and fenced.
//   image k + 1   is cleared before publication k and fenced; whoever reads image k + 1 has loaded image k and fenced.
//                 Its readers of three publications ago have all delivered partial sums since, which the owner has read.
//   tallies       carry the number of their step; they too come in two copies.
#pragma once
#include "narrow_sums.cuh"
#include "update.cuh"

namespace narrow {

constexpr u32 UNWRITTEN = 0xffffffffu;
constexpr int IMAGES = 3;

struct Buffers {
    float* partials;  // (2, blocks, PARTIAL_STRIDE)
    u8* images;       // (IMAGES, IMAGE_BYTES): bf16 weights in blocks, float32 biases; the padding is zero

    __device__ __forceinline__ float* partials_of(int s) const {
        return partials + (s & 1) * (i64)gridDim.x * PARTIAL_STRIDE;
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
__device__ __forceinline__ u64 load_fresh_pair(const u64* where) {
    u64 x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(where) : "memory");
    return x;
}

__device__ __forceinline__ void order_exchange() { __threadfence(); }

// Which of a lane's four words of a chunk are ever written: not the padding between biases.
__device__ __forceinline__ u32 written_words(int chunk) {
    if (chunk < WEIGHT_CHUNKS) return 15u;
    u32 words = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) words |= (locate(chunk, 4 * (threadIdx.x & 31) + i).flat >= 0 ? 1u : 0u) << i;
    return words;
}
__device__ __forceinline__ bool ready(const uint4& x, u32 words) {
    return (x.x != UNWRITTEN || !(words & 1u)) && (x.y != UNWRITTEN || !(words & 2u)) &&
           (x.z != UNWRITTEN || !(words & 4u)) && (x.w != UNWRITTEN || !(words & 8u));
}

// This warp's share of the sum of a chunk over producers, into `mine` (128 floats). With WAIT the sums are waited for,
// and cleared.
template <bool WAIT>
__device__ __forceinline__ void sum_chunk(float* partials, int count, int chunk, u32 words, float* mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = warp; p < count; p += 16 * WARPS) {  // sixteen loads in flight
        float* source = partials + (i64)p * PARTIAL_STRIDE + chunk * CHUNK + 4 * lane;
        uint4 x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            x[i] = p + i * WARPS < count ? load_fresh(source + (i64)i * WARPS * PARTIAL_STRIDE) : make_uint4(0, 0, 0, 0);
        if (WAIT) {
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (!ready(x[i], words)) {
                        waiting = true;
                        x[i] = load_fresh(source + (i64)i * WARPS * PARTIAL_STRIDE);
                    }
            } while (waiting);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
            sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
        }
        if (WAIT) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (p + i * WARPS < count)
                    *(uint4*)(source + (i64)i * WARPS * PARTIAL_STRIDE) =
                        make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
        }
    }
    *(float4*)(mine + 4 * lane) = sum;
}

// The tally over all producers, to every thread: the same bits in every block.
struct StepTotals {
    double loss;
    float weight;
    bool bad;
};
__device__ __forceinline__ StepTotals sum_tallies(const float* partials, int count, u32 number) {
    StepTotals sum = {0., 0.f, false};
#pragma unroll 1
    for (int first = 0; first < count; first += 128) {
        u64 loss[4], weight[4];
        bool waiting;
        do {  // four producers a lane
            waiting = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int p = first + 32 * i + (threadIdx.x & 31);
                loss[i] = weight[i] = tagged(0.f, number, false);
                if (p < count) {
                    const u64* tally = (const u64*)(partials + (i64)p * PARTIAL_STRIDE + TALLY_AT);
                    loss[i] = load_fresh_pair(tally);
                    weight[i] = load_fresh_pair(tally + 1);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) waiting |= (u32)(loss[i] >> 33) != number || (u32)(weight[i] >> 33) != number;
        } while (waiting);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum.loss += __uint_as_float((u32)loss[i]);
            sum.weight += __uint_as_float((u32)weight[i]);
            sum.bad |= loss[i] >> 32 & 1;
        }
    }
    sum.loss = warp_sum(sum.loss);
    sum.weight = warp_sum(sum.weight);
    sum.bad = __any_sync(~0u, sum.bad);
    return sum;
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

// Everything unwritten, before the first step of a launch; a barrier must follow.
__device__ __forceinline__ void clear_exchange(const Buffers& buffers) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int parity = 0; parity < 2; ++parity) {
        float* partials = buffers.partials_of(parity);
        for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x)
            for (int p = warp; p < gridDim.x; p += WARPS)
                *(uint4*)(partials + (i64)p * PARTIAL_STRIDE + chunk * CHUNK + 4 * lane) =
                    make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
        if (threadIdx.x < 2) ((u64*)(partials + (i64)blockIdx.x * PARTIAL_STRIDE + TALLY_AT))[threadIdx.x] = 0;
    }
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
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int v = threadIdx.x + i * BLOCK_THREADS;
        x[i] = v < VECTORS ? load_fresh(image + 16 * v) : make_uint4(0, 0, 0, 0);
    }
    bool waiting;
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
