// What happens between the blocks of a narrow step: every block sums a slice of the gradient over all blocks in a
// fixed order, updates its parameters, and publishes them as the image that all blocks load into shared memory.
#pragma once
#include "narrow_sums.cuh"
#include "update.cuh"

namespace narrow {

struct Buffers {
    float* partials;  // (blocks, PARTIAL_STRIDE)
    u8* image;        // (IMAGE_BYTES,) bf16 weights in blocks, float32 biases; the padding is zero
};

// `barrier.wait()`, with something for thread 32 to do while thread 0 waits.
template <class Work>
__device__ __forceinline__ void wait_meanwhile(GridBarrier& barrier, const Work& work) {
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier.target += gridDim.x;
        add_release(barrier.arrivals, 1);
        while (load_acquire(barrier.arrivals) < barrier.target) {
        }
    } else if (threadIdx.x == 32) {
        work();
    }
    __syncthreads();
}

// Blocks that have tiles, and so partial sums.
__device__ __forceinline__ int producers(int rows) {
    const int tiles = (rows + TILE - 1) / TILE;
    return tiles < (int)gridDim.x ? tiles : (int)gridDim.x;
}

__device__ __forceinline__ float4 load_fresh(const float* where) {  // written by another block: never from L1
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(where)
                 : "memory");
    return x;
}

// This warp's share of the sum over producers, into `mine` (128 floats).
__device__ __forceinline__ void sum_chunk(const float* partials, int count, int chunk, float* mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    const float* source = partials + (i64)warp * PARTIAL_STRIDE + chunk * CHUNK + 4 * lane;
    for (int p = warp; p < count; p += 16 * WARPS) {  // sixteen loads in flight
        float4 x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i, source += (i64)WARPS * PARTIAL_STRIDE)
            x[i] = p + i * WARPS < count ? load_fresh(source) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 16; ++i) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
    }
    *(float4*)(mine + 4 * lane) = sum;
}

// The tally over all producers, to every thread: the same bits in every block.
struct StepTotals {
    double loss;
    float weight;
    bool bad;
};
struct Tallies {  // of this lane's producers
    float4 x[4];

    __device__ __forceinline__ void load(const float* partials, int first, int count) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int p = first + 32 * i + (threadIdx.x & 31);
            x[i] = p < count ? load_fresh(partials + (i64)p * PARTIAL_STRIDE + TALLY_AT) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
    __device__ __forceinline__ void add_to(StepTotals& sum) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.loss += x[i].x, sum.weight += x[i].y, sum.bad |= x[i].w != 0.f;
    }
};
// `loaded`: the first 128.
__device__ __forceinline__ StepTotals sum_tallies(const Tallies& loaded, const float* partials, int count) {
    StepTotals sum = {0., 0.f, false};
    loaded.add_to(sum);
    for (int first = 128; first < count; first += 128) {
        Tallies part;
        part.load(partials, first, count);
        part.add_to(sum);
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

__device__ __forceinline__ void publish(const Buffers& buffers, const Place& place, float value) {
    if (place.in < 0)
        *(float*)(buffers.image + place.image) = value;
    else
        *(u16*)(buffers.image + place.image) = to_element(value).bits;
}

// f(place) for the parameters of this block's chunks; threads 0 to 127.
template <class F>
__device__ __forceinline__ void for_each_own(const F& f) {
    for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x) {
        if (threadIdx.x >= CHUNK) break;
        const Place place = locate(chunk, threadIdx.x);
        if (place.flat >= 0) f(place);
    }
}

// The image of the parameters as they are.
__device__ __forceinline__ void publish_all(const Buffers& buffers) {
    for_each_own([&](const Place& place) { publish(buffers, place, __ldcg(ENGINE.parameters + place.flat)); });
}

// Image → shared memory.
__device__ __forceinline__ void load_image(const Buffers& buffers, u8* shared) {
    static_assert(IMAGE_BYTES % 16 == 0, "whole vectors");
    constexpr int VECTORS = IMAGE_BYTES / 16, ROUNDS_ = (VECTORS + BLOCK_THREADS - 1) / BLOCK_THREADS;
    float4 x[ROUNDS_];
#pragma unroll
    for (int i = 0; i < ROUNDS_; ++i) {
        const int v = threadIdx.x + i * BLOCK_THREADS;
        if (v < VECTORS) x[i] = load_fresh((const float*)(buffers.image + 16 * v));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS_; ++i) {
        const int v = threadIdx.x + i * BLOCK_THREADS;
        if (v < VECTORS) *(float4*)(shared + 16 * v) = x[i];
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
