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

constexpr int CHUNK = 128;  // parameters a block sums at a time: one float4 a lane, producers shared by the warps
constexpr int CHUNKS = (FLAT_SIZE + CHUNK - 1) / CHUNK;

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
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, at = chunk * CHUNK + 4 * lane;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (at < FLAT_SIZE) {
        const float* source = partials + (i64)warp * PARTIAL_STRIDE + at;
        for (int p = warp; p < count; p += 16 * WARPS) {  // sixteen loads in flight
            float4 x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i, source += (i64)WARPS * PARTIAL_STRIDE)
                x[i] = p + i * WARPS < count ? load_fresh(source) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < 16; ++i) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
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
__device__ __forceinline__ StepTotals sum_tallies(const float* partials, int count) {
    StepTotals sum = {0., 0.f, false};
#pragma unroll 4
    for (int p = threadIdx.x & 31; p < count; p += 32) {
        const float4 x = load_fresh(partials + (i64)p * PARTIAL_STRIDE + FLAT_SIZE);
        sum.loss += x.x;
        sum.weight += x.y;
        sum.bad |= x.w != 0.f;
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

// The image of the parameters as they are, once a launch.
__device__ __forceinline__ void publish_all(const Buffers& buffers) {
    for (int e = blockIdx.x * BLOCK_THREADS + threadIdx.x; e < FLAT_SIZE; e += gridDim.x * BLOCK_THREADS) {
        const Place place = locate(e);
        if (place.layer >= 0) publish(buffers, place, __ldcg(ENGINE.parameters + e));
    }
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
    for (int e = blockIdx.x * BLOCK_THREADS + threadIdx.x; e < FLAT_SIZE; e += gridDim.x * BLOCK_THREADS) {
        const Place place = locate(e);
        if (place.in < 0) continue;
        const Layer& layer = ENGINE.layer[place.layer];
        layer.weight[(i64)place.in * layer.ld_out + place.out] = to_element(__ldcg(ENGINE.parameters + e));
    }
}

}  // namespace narrow
