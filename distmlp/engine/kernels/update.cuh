// The update as a phase of its own, from the flat gradient: for clipping, LAMB, several ranks, and whenever the
// magnitudes leave open whether a gradient is finite.
#pragma once
#include "barrier.cuh"
#include "epilogue.cuh"
#include "peers.cuh"

#ifndef MAX_UPDATE_LAYERS  // a kernel for fewer layers may have little shared memory to spare
#define MAX_UPDATE_LAYERS MAX_LAYERS
#endif
#ifndef RANKS_SUMMED  // whether the flat gradient is already that of all ranks
#define RANKS_SUMMED 0
#endif
struct Progress {  // the same in every block, at every moment between two barriers
    u64 step;
    u32 skipped;
    bool frozen;
};

__device__ __forceinline__ void set_hyper(Hyper& h, float rate, float scale, u64 step) {
    h.rate = rate;
    h.scale = scale;
    h.weight_decay = ENGINE.weight_decay;
    h.momentum = ENGINE.momentum;
    h.beta1 = (float)ENGINE.beta1;
    h.beta2 = (float)ENGINE.beta2;
    h.rho = (float)ENGINE.rho;
    h.rest1 = (float)(1. - ENGINE.beta1);
    h.rest2 = (float)(1. - ENGINE.beta2);
    h.rest_rho = (float)(1. - ENGINE.rho);
    h.epsilon = ENGINE.epsilon;
    h.ema_decay = ENGINE.ema_decay;
    if (OPTIMIZER >= ADAM) set_corrections(h, ENGINE.beta1, ENGINE.beta2, step);
}

// f(row, column) for every weight of a layer, in turn over the warps of the grid.
template <class F>
__device__ __forceinline__ void for_each_weight(const Layer& layer, const F& f) {
    const u32 segments = (layer.fan_out + 31) >> 5, warps = gridDim.x * (blockDim.x >> 5);
    // 32 bits count the segments of any layer that fits a device.
    for (u32 u = blockIdx.x + gridDim.x * (threadIdx.x >> 5); u < layer.fan_in * segments; u += warps) {
        const int row = u / segments, c = u % segments * 32 + (threadIdx.x & 31);
        if (c < layer.fan_out) f(row, c);
    }
}
template <class F>
__device__ __forceinline__ void for_each_bias(const Layer& layer, const F& f) {
    for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < layer.fan_out; c += gridDim.x * blockDim.x) f(c);
}

// The largest magnitude in the gradient, and block sums of its squares.
struct Scan {
    double squares = 0.;
    u32 largest = 0;

    __device__ __forceinline__ void operator()(const float4& g) {
        largest = max(largest, magnitude_bits(g));
        if (ENGINE.clip_norm > 0.f)
            squares += (double)g.x * g.x + (double)g.y * g.y + ((double)g.z * g.z + (double)g.w * g.w);
    }
    __device__ __forceinline__ void finish(Flags& flags) {
        warp_largest(&flags.gradient_not_finite, largest);
        if (ENGINE.clip_norm > 0.f) {
            squares = block_sum(squares);
            if (threadIdx.x == 0) ENGINE.norm_partials[blockIdx.x] = squares;
        }
    }
};

__device__ __forceinline__ void scan_gradient(Scan& scan) {
    const float4* gradient = (const float4*)ENGINE.gradient;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < ENGINE.size / 4; i += (i64)gridDim.x * blockDim.x)
        scan(gradient[i]);
}

__device__ __forceinline__ double sum_of_blocks(const double* partials) {
    double sum = 0.;
    for (int b = threadIdx.x; b < gridDim.x; b += blockDim.x) sum += partials[b];
    return block_sum(sum);
}

// LAMB: directions to the gradient buffer, block sums of |parameter|^2 and |direction|^2 of every tensor; after the
// barrier every block knows every tensor's trust ratio and takes its share of the step.
__device__ __forceinline__ void update_lamb(const Hyper& h, GridBarrier& barrier) {
    __shared__ float trust[2 * MAX_UPDATE_LAYERS];
    double* partials = ENGINE.norm_partials + gridDim.x;
    const auto direct = [&](i64 at, double& size, double& length) {
        const float p = ENGINE.parameters[at];
        const float u = update_rule(h, p, ENGINE.gradient[at], ENGINE.first_slot[at], ENGINE.second_slot[at]);
        ENGINE.gradient[at] = u;
        size += (double)p * p;
        length += (double)u * u;
    };
    for (int tensor = 0; tensor < 2 * ENGINE.layers; ++tensor) {
        const Layer& layer = LAYER(tensor / 2);
        double size = 0., length = 0.;
        if (tensor % 2 == 0)
            for_each_weight(layer, [&](int r, int c) {
                direct(layer.weight_offset + (i64)r * layer.fan_out + c, size, length);
            });
        else
            for_each_bias(layer, [&](int c) { direct(layer.bias_offset + c, size, length); });
        size = block_sum(size);
        length = block_sum(length);
        if (threadIdx.x == 0) {
            partials[(2 * tensor) * (i64)gridDim.x + blockIdx.x] = size;
            partials[(2 * tensor + 1) * (i64)gridDim.x + blockIdx.x] = length;
        }
    }
    barrier.wait();
    for (int tensor = 0; tensor < 2 * ENGINE.layers; ++tensor) {
        const double size = sum_of_blocks(partials + (2 * tensor) * (i64)gridDim.x);
        const double length = sum_of_blocks(partials + (2 * tensor + 1) * (i64)gridDim.x);
        if (threadIdx.x == 0) trust[tensor] = size > 0. && length > 0. ? (float)sqrt(size / length) : 1.f;
    }
    __syncthreads();
    const auto move = [&](i64 at, float ratio) {
        const float p = ENGINE.parameters[at] - h.rate * ratio * ENGINE.gradient[at];
        ENGINE.parameters[at] = p;
        if (ENGINE.ema) ENGINE.ema[at] = average(h.ema_decay, ENGINE.ema[at], p);
        return p;
    };
    for (int l = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        for_each_weight(layer, [&](int r, int c) {
            const float p = move(layer.weight_offset + (i64)r * layer.fan_out + c, trust[2 * l]);
            layer.weight[(i64)r * layer.ld_out + c] = to_element(p);
        });
        for_each_bias(layer, [&](int c) { move(layer.bias_offset + c, trust[2 * l + 1]); });
    }
}

__device__ __forceinline__ void update_plain(const Hyper& h) {
    for (int l = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        for_each_weight(layer, [&](int r, int c) {
            const i64 at = layer.weight_offset + (i64)r * layer.fan_out + c;
            layer.weight[(i64)r * layer.ld_out + c] = to_element(update_parameter(h, at, ENGINE.gradient[at]));
        });
        for_each_bias(layer, [&](int c) {
            const i64 at = layer.bias_offset + c;
            update_parameter(h, at, ENGINE.gradient[at]);
        });
    }
}

// Apply what lies in the gradient buffer as step `s` of the table. The caller puts a barrier behind it.
__device__ RARELY void apply_gradient(int s, GridBarrier& barrier, Progress& progress) {
    __shared__ Hyper hyper;
    Flags& flags = ENGINE.control->flags[s & 1];
    const float* tally = ENGINE.gradient + ENGINE.size;
    Scan scan;
    const bool peers = SEVERAL_RANKS && !RANKS_SUMMED && ENGINE.needs_norm == PEERS_SUM;
    if (peers) exchange_gradient(scan);
    else scan_gradient(scan);
    scan.finish(flags);
    barrier.wait();
    if (peers && !finish_exchange()) {  // the host will say why
        progress.frozen = true;
        if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        return;
    }
    const float weight = tally[TALLY_WEIGHT], loss = tally[TALLY_LOSS];
    const bool finite =
        __uint_as_float(flags.gradient_not_finite) < largest_sum(weight) && is_finite(loss) && is_finite(weight);
    if (finite && weight != 0.f) {
        ++progress.step;
        double scale = 1. / weight;
        if (ENGINE.clip_norm > 0.f) {
            const double norm = sqrt(sum_of_blocks(ENGINE.norm_partials)) * fabs(scale);
            scale *= fmin(1., ENGINE.clip_norm / (norm + 1e-6));
        }
        if (threadIdx.x == 0) set_hyper(hyper, ENGINE.steps[s].rate, (float)scale, progress.step);
        __syncthreads();
        if (OPTIMIZER == LAMB) update_lamb(hyper, barrier);
        else update_plain(hyper);
    } else if (!finite) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        StepResult& result = ENGINE.results[s];
        result.loss = loss;
        result.weight = weight;
        result.status = finite ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT;
    }
}
