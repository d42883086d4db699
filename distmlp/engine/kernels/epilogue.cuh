// What becomes of the results of a matrix product at (row, column .. column + 3) of a layer's matrix; columns are
// multiples of four. Each leaves in `v` what it stored, zero beyond the edges. Independent of the main loop.
#pragma once
#include "gather.cuh"
#include "losses.cuh"

#define EACH_OF_FOUR(f) f(v.x, 0), f(v.y, 1), f(v.z, 2), f(v.w, 3)

// Output of a hidden layer (and, where it must be kept, the slope) from z = `v` without bias.
__device__ __forceinline__ void hidden_output(
    const Layer& layer, const float* bias, int rows, int r, int c, float4& v, u32& largest) {
    if (r >= rows || c >= layer.ld_out) return;
    const int kind = hidden_activation(layer);
    const i64 at = (i64)r * layer.ld_out + c;
    float slope[4];
    const auto output = [&](float& x, int k) {
        slope[k] = 0.f;
        x = c + k < layer.fan_out ? activate(kind, x + bias[c + k], slope[k]) : 0.f;
    };
    EACH_OF_FOUR(output);
    if (stores_slope(kind)) store_quad(layer.error + at, make_float4(slope[0], slope[1], slope[2], slope[3]));
    store_quad(layer.output + at, v);
    largest = max(largest, magnitude_bits(v));
}

// Network output from z = `v` without bias, unpadded float (rows, outputs).
__device__ __forceinline__ void network_output(
    const Layer& layer, const float* bias, float* out, int rows, int r, int c, float4& v) {
    if (r >= rows) return;
    float* at = out + (i64)r * layer.fan_out + c;
    const auto output = [&](float x, int k) {
        float unused;
        if (c + k < layer.fan_out) at[k] = activate(OUTPUT_ACTIVATION, x + bias[c + k], unused);
    };
    EACH_OF_FOUR(output);
}

__device__ __forceinline__ float row_weight(const Batch& batch, int r) { return batch.weights ? batch.weights[r] : 1.f; }

// Error of the output layer from z = `v` without bias, for losses that are sums over outputs. Adds the weighted loss
// to `loss`.
__device__ __forceinline__ void output_error(
    const Layer& layer, const float* bias, const Batch& batch, int rows, int r, int c, float4& v, float& loss,
    u32& largest) {
    if (r >= rows || c >= layer.ld_out) {
        v = make_float4(0.f, 0.f, 0.f, 0.f);
        return;
    }
    const float weight = row_weight(batch, r) / (float)layer.fan_out;
    const float* target = batch.targets + (i64)r * layer.fan_out + c;
    const auto error = [&](float& x, int k) {
        float of_activation = 0.f, of_loss = 0.f;
        if (c + k < layer.fan_out) {
            const float y = activate(OUTPUT_ACTIVATION, x + bias[c + k], of_activation);
            loss += weight * output_loss(y, target[k], ENGINE.huber_delta, of_loss);
        }
        x = weight * of_loss * of_activation;
    };
    EACH_OF_FOUR(error);
    store_quad(layer.error + (i64)r * layer.ld_out + c, v);
    largest = max(largest, magnitude_bits(v));
}

// Error of a hidden layer from the derivative by its output.
__device__ __forceinline__ void hidden_error(const Layer& layer, int rows, int r, int c, float4& v, u32& largest) {
    if (r >= rows || c >= layer.ld_out) {
        v = make_float4(0.f, 0.f, 0.f, 0.f);
        return;
    }
    const int kind = hidden_activation(layer);
    const i64 at = (i64)r * layer.ld_out + c;
    const bool stored = stores_slope(kind);
    const float4 known = load_quad((stored ? layer.error : layer.output) + at);
    const float slope[4] = {known.x, known.y, known.z, known.w};
    const auto error = [&](float& x, int k) {
        x = c + k < layer.fan_out ? x * (stored ? slope[k] : slope_of_output(kind, slope[k])) : 0.f;
    };
    EACH_OF_FOUR(error);
    store_quad(layer.error + at, v);
    largest = max(largest, magnitude_bits(v));
}

// Parameter `at` of the flat buffers moves along its gradient sum; returns the new value.
__device__ __forceinline__ float update_parameter(const Hyper& h, i64 at, float sum) {
    float first = has_first_slot() ? ENGINE.first_slot[at] : 0.f;
    float second = has_second_slot() ? ENGINE.second_slot[at] : 0.f;
    const float p = update_rule(h, ENGINE.parameters[at], sum, first, second);
    if (has_first_slot()) ENGINE.first_slot[at] = first;
    if (has_second_slot()) ENGINE.second_slot[at] = second;
    ENGINE.parameters[at] = p;
    if (ENGINE.ema) ENGINE.ema[at] = average(h.ema_decay, ENGINE.ema[at], p);
    return p;
}

__device__ __forceinline__ float4 float4_at(const float* flat, i64 at) { return *(const float4*)(flat + at); }

// The same for four neighbours at a multiple of four.
__device__ __forceinline__ float4 update_quad(const Hyper& h, i64 at, float4 sum) {
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    float4 first = has_first_slot() ? float4_at(ENGINE.first_slot, at) : none;
    float4 second = has_second_slot() ? float4_at(ENGINE.second_slot, at) : none;
    float4 p = float4_at(ENGINE.parameters, at);
    p.x = update_rule(h, p.x, sum.x, first.x, second.x);
    p.y = update_rule(h, p.y, sum.y, first.y, second.y);
    p.z = update_rule(h, p.z, sum.z, first.z, second.z);
    p.w = update_rule(h, p.w, sum.w, first.w, second.w);
    if (has_first_slot()) *(float4*)(ENGINE.first_slot + at) = first;
    if (has_second_slot()) *(float4*)(ENGINE.second_slot + at) = second;
    *(float4*)(ENGINE.parameters + at) = p;
    if (ENGINE.ema) {
        float4 mean = float4_at(ENGINE.ema, at);
        mean.x = average(h.ema_decay, mean.x, p.x);
        mean.y = average(h.ema_decay, mean.y, p.y);
        mean.z = average(h.ema_decay, mean.z, p.z);
        mean.w = average(h.ema_decay, mean.w, p.w);
        *(float4*)(ENGINE.ema + at) = mean;
    }
    return p;
}

// Four weights of a layer from their gradient sums: masters, slots, average and copy at once.
__device__ __forceinline__ void weight_update(const Layer& layer, const Hyper& h, int r, int c, float4& v) {
    if (r >= layer.fan_in || c >= layer.fan_out) return;
    const i64 at = layer.weight_offset + (i64)r * layer.fan_out + c;
    Element* copy = layer.weight + (i64)r * layer.ld_out + c;
    if (layer.fan_out % 4 == 0) {
        store_quad(copy, update_quad(h, at, v));
        return;
    }
    const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (c + k < layer.fan_out) copy[k] = to_element(update_parameter(h, at + k, sums[k]));
}

__device__ __forceinline__ void weight_gradient(const Layer& layer, int r, int c, float4& v) {
    if (r >= layer.fan_in || c >= layer.fan_out) return;
    float* at = ENGINE.gradient + layer.weight_offset + (i64)r * layer.fan_out + c;
    if (layer.fan_out % 4 == 0) {
        *(float4*)at = v;
        return;
    }
    const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (c + k < layer.fan_out) at[k] = sums[k];
}
