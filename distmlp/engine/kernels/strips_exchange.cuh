// What happens between the blocks of a step of the strips kernel: behind a barrier every block adds up some parameters'
// gradients over all blocks in their order, updates them, and publishes them in the image that all blocks load.
#pragma once
#include "strips_layers.cuh"
#include "update.cuh"

namespace strips {

// A parameter among the partial sums and in the image. `flat` < 0: padding.
struct Place {
    int flat, image;
    int layer, in, out;  // in < 0: a bias
};
template <int L>
__device__ __forceinline__ void locate_in(int at, Place& place) {
    if constexpr (L < LAYERS) {
        constexpr int COLUMNS = padded(L + 1), WEIGHT = weight_at(L), BIAS = bias_at(L);
        if (at >= WEIGHT && at < WEIGHT + weight_floats(L)) {
            const int in = (at - WEIGHT) / COLUMNS, out = (at - WEIGHT) % COLUMNS;
            if (in < width(L) && out < width(L + 1))
                place = {
                    FIXED(flat_weight(L)) + in * width(L + 1) + out, WEIGHT + weight_place(in, out, COLUMNS), L, in, out};
        } else if (at >= BIAS && at < BIAS + COLUMNS) {
            if (at - BIAS < width(L + 1)) place = {FIXED(flat_bias(L)) + at - BIAS, at, L, -1, at - BIAS};
        } else {
            locate_in<L + 1>(at, place);
        }
    }
}
__device__ __forceinline__ Place locate(int at) {
    Place place = {-1, 0, 0, 0, 0};
    locate_in<0>(at, place);
    return place;
}

struct Buffers {
    float* partials;  // (blocks, PARTIAL_STRIDE), then (blocks,) tallies
    float* image;     // PARAMETERS: weights in their places, biases; the padding is zero

    __device__ __forceinline__ float4* tallies() const { return (float4*)(partials + (i64)gridDim.x * PARTIAL_STRIDE); }
};

__device__ __forceinline__ void publish(float* image, const Place& place, float value) {
    image[place.image] = place.in < 0 ? value : to_element(value);
}
// f(place) for the parameters of this block's chunks.
template <class F>
__device__ __forceinline__ void for_each_own(const F& f) {
    for (int at = blockIdx.x * CHUNK + threadIdx.x % CHUNK; at < PARAMETERS; at += gridDim.x * CHUNK) {
        if (threadIdx.x >= CHUNK) break;
        const Place place = locate(at);
        if (place.flat >= 0) f(place);
    }
}
__device__ __forceinline__ void publish_all(float* image) {
    for_each_own([&](const Place& place) { publish(image, place, __ldcg(ENGINE.parameters + place.flat)); });
}
// The weight copies that the forward-only kernels read, once a launch.
__device__ __forceinline__ void copy_weights() {
    for_each_own([](const Place& place) {
        if (place.in < 0) return;
        const Layer& layer = ENGINE.layer[place.layer];
        layer.weight[(i64)place.in * layer.ld_out + place.out] = to_element(__ldcg(ENGINE.parameters + place.flat));
    });
}

// The tally of a step: the same bits in every block.
struct StepTotals {
    double loss;
    float weight;
    bool bad;
};

// The block's tally to its place. The block synchronises.
__device__ __forceinline__ void deliver(const Totals& totals, const Limit& limit, float4* tally) {
    __shared__ float sums[2][WARPS];
    const float loss = warp_sum(totals.loss), weight = warp_sum(totals.weight);
    if ((threadIdx.x & 31) == 0) sums[0][threadIdx.x >> 5] = loss, sums[1][threadIdx.x >> 5] = weight;
    Limit all = {(bool)__syncthreads_or(limit.bad)};
    if (threadIdx.x > 0) return;
    float4 x = zeros();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) x.x += sums[0][w], x.y += sums[1][w];
    all.pass(x.y);
    x.z = all.bad || !is_finite(x.x) ? 1.f : 0.f;  // the loss is never squared
    *tally = x;
}
__device__ __forceinline__ StepTotals collect(const Buffers& buffers, int count) {
    __shared__ double losses[WARPS];
    __shared__ float weights[WARPS];
    double loss = 0.;
    float weight = 0.f;
    bool bad = false;
    for (int p = threadIdx.x; p < count; p += BLOCK_THREADS) {
        const float4 x = __ldcg(buffers.tallies() + p);
        loss += x.x, weight += x.y, bad |= x.z != 0.f;
    }
    loss = warp_sum(loss), weight = warp_sum(weight);
    if ((threadIdx.x & 31) == 0) losses[threadIdx.x >> 5] = loss, weights[threadIdx.x >> 5] = weight;
    StepTotals totals = {0., 0.f, (bool)__syncthreads_or(bad)};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) totals.loss += losses[w], totals.weight += weights[w];
    return totals;
}

// f(place, gradient summed over `count` blocks) for this block's chunks, as many at a time as it has up to four.
template <class F>
__device__ __forceinline__ void for_each_sum(const Buffers& buffers, int count, const F& f) {
    constexpr int TOGETHER = CHUNKS > 2 * STRIP_BLOCKS ? 4 : CHUNKS > STRIP_BLOCKS ? 2 : 1, SHARES = WARPS / TOGETHER;
    static_assert(WARPS * CHUNK * 4 <= BIASES_AT - WEIGHTS_AT, "sums of chunks take the place of weights and stages");
    float* scratch = (float*)(dynamic_shared + WEIGHTS_AT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, share = warp / TOGETHER;
    for (int first = blockIdx.x; first < CHUNKS; first += TOGETHER * gridDim.x) {
        const int chunk = first + warp % TOGETHER * gridDim.x;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        if (chunk < CHUNKS) {
            const float4* source = (const float4*)(buffers.partials + chunk * CHUNK) + lane;
            for (int p = share; p < count; p += 16 * SHARES) {  // sixteen loads in flight
                float4 x[16];
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    x[i] = p + i * SHARES < count ? __ldcg(source + (i64)(p + i * SHARES) * (PARTIAL_STRIDE / 4))
                                                  : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int i = 0; i < 16; ++i) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
            }
        }
        __syncthreads();  // `scratch` has been read
        *(float4*)(scratch + warp * CHUNK + 4 * lane) = sum;
        __syncthreads();
        for (int e = threadIdx.x; e < TOGETHER * CHUNK; e += BLOCK_THREADS) {
            const int own = first + e / CHUNK * gridDim.x;
            if (own >= CHUNKS) break;
            const Place place = locate(own * CHUNK + e % CHUNK);
            float total = 0.f;
#pragma unroll
            for (int s = 0; s < SHARES; ++s) total += scratch[s * TOGETHER * CHUNK + e];
            if (place.flat >= 0) f(place, total);
        }
    }
    __syncthreads();
}

// Sums, update and publication of step `s`; a barrier must follow.
__device__ __forceinline__ void update_directly(
    int s, int count, const Buffers& buffers, const Hyper& hyper, Progress& progress) {
    const StepTotals totals = collect(buffers, count);
    if (!totals.bad && totals.weight != 0.f) {
        Hyper h = hyper;
        h.scale = 1.f / totals.weight;
        for_each_sum(buffers, count, [&](const Place& place, float sum) {
            publish(buffers.image, place, update_parameter(h, place.flat, sum));
        });
        ++progress.step;
    } else if (totals.bad) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ENGINE.results[s] = StepResult{
            totals.loss, totals.weight, !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
}

// The sums to the flat gradient, the tally behind it.
__device__ __forceinline__ void reduce_to_gradient(int s, const StepInfo& info, int count, const Buffers& buffers) {
    const StepTotals totals = collect(buffers, count);
    for_each_sum(buffers, count, [](const Place& place, float sum) { ENGINE.gradient[place.flat] = sum; });
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    float* tally = ENGINE.gradient + ENGINE.size;
    for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
    tally[TALLY_LOSS] = totals.bad ? __int_as_float(0x7fc00000) : (float)totals.loss;
    tally[TALLY_WEIGHT] = totals.weight;
    tally[TALLY_ROWS] = (float)info.rows;
    ENGINE.results[s] = StepResult{totals.loss, totals.weight, DONE};
}

}  // namespace strips
