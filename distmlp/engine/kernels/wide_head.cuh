// The output layer of a network with few outputs, and the error of the layer below it, in one phase: a warp takes
// whole rows, so nothing has to be shared between forward, loss and backward.
#pragma once
#include "wide_output.cuh"

#define HEAD_CHUNK 128                                  // columns of a row that a warp takes at a time, a quad a lane
#define HEAD_AHEAD (HEAD_ROWS < 4 ? 4 / HEAD_ROWS : 1)  // chunks whose loads are under way at once

#if HEAD_OUTPUTS
// Shared memory: the weights as float, an output after the other, and the warps' sums of errors; both padded with
// zeros to whole chunks. plan.py reckons the same.
struct Head {
    int width;  // of the layer below, whole chunks
    float* weight;
    float* sums;

    __device__ __forceinline__ explicit Head(const Layer& layer)
        : width(ceil_div(layer.fan_in, HEAD_CHUNK) * HEAD_CHUNK), weight((float*)dynamic_shared),
          sums(weight + HEAD_OUTPUTS * width) {}

    __device__ __forceinline__ void load(const Layer& layer) const {
        for (int k = threadIdx.x; k < width; k += THREADS) {
            const Element* from = layer.weight + (i64)k * layer.ld_out;
#pragma unroll
            for (int o = 0; o < HEAD_OUTPUTS; ++o)
                weight[o * width + k] = k < layer.fan_in && o < layer.fan_out ? to_float(from[o]) : 0.f;
        }
    }
    __device__ __forceinline__ float4 quad(int o, int column) const {
        return *(const float4*)(weight + o * width + column);
    }
};

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& v) {
    sum.x = fmaf(factor, v.x, sum.x), sum.y = fmaf(factor, v.y, sum.y);
    sum.z = fmaf(factor, v.z, sum.z), sum.w = fmaf(factor, v.w, sum.w);
}

// Loss and error of a row by a warp; lane o brings output o and what is wanted. Errors go to memory and to `errors`.
__device__ __forceinline__ float head_error(
    const Layer& layer, const Raw& raw, const StepInfo& info, const Batch& batch, int r, float z, float target,
    float* errors, u32& largest) {
    const int lane = threadIdx.x & 31;
    const bool mine = lane < layer.fan_out;
    if (LOSS == SOFTMAX_CROSS_ENTROPY) {
        if (lane < HEAD_OUTPUTS) errors[lane] = mine ? z : 0.f;
        __syncwarp();
        return softmax_error(
            layer, raw, info, batch, errors, r, largest, [&](int c, float error) { errors[c] = error; });
    }
    const float weight = row_weight(batch, r) / (float)layer.fan_out;
    float loss = 0.f, error = 0.f;
    if (mine) {
        float of_activation = 0.f, of_loss = 0.f;
        const float y = activate(OUTPUT_ACTIVATION, z, of_activation);
        loss = weight * output_loss(y, target, ENGINE.huber_delta, of_loss);
        error = weight * of_loss * of_activation;
        largest = max(largest, magnitude_bits(error));
    }
    if (lane < layer.ld_out) layer.error[(i64)r * layer.ld_out + lane] = to_element(error);
    if (lane < HEAD_OUTPUTS) errors[lane] = error;
    return loss;
}

// Outputs, loss, their errors and those of the last hidden layer for rows [r0, r0 + HEAD_ROWS) by a warp; adds its
// hidden errors to `sums`.
__device__ __forceinline__ float head_rows(
    const Head& head, const Layer& layer, const Layer& below, const Raw& raw, const StepInfo& info, const Batch& batch,
    int r0, float (*errors)[HEAD_OUTPUTS], float* sums, u32& largest, u32& largest_below) {
    const int lane = threadIdx.x & 31, own = lane * 4, ld = below.ld_out;
    const int rows = min(HEAD_ROWS, info.rows - r0);
    const bool mine = lane < layer.fan_out;
    const float bias = mine ? ENGINE.parameters[layer.bias_offset + lane] : 0.f;
    float target[HEAD_ROWS] = {};
#pragma unroll
    for (int i = 0; i < HEAD_ROWS; ++i)
        if (LOSS != SOFTMAX_CROSS_ENTROPY && mine && i < rows)
            target[i] = raw.targets[raw_row(raw, info.first, r0 + i) * layer.fan_out + lane];
    const Element* input = below.output + (i64)r0 * ld;
    float output[HEAD_ROWS][HEAD_OUTPUTS] = {};
    for (int c0 = own; c0 < head.width; c0 += HEAD_AHEAD * HEAD_CHUNK) {
        float4 known[HEAD_AHEAD][HEAD_ROWS];
#pragma unroll
        for (int a = 0; a < HEAD_AHEAD; ++a)
#pragma unroll
            for (int i = 0; i < HEAD_ROWS; ++i)
                known[a][i] = c0 + a * HEAD_CHUNK < ld && i < rows
                                  ? load_quad(input + (i64)i * ld + c0 + a * HEAD_CHUNK) : zeros();
#pragma unroll
        for (int a = 0; a < HEAD_AHEAD; ++a) {
            if (c0 + a * HEAD_CHUNK >= head.width) break;
#pragma unroll
            for (int o = 0; o < HEAD_OUTPUTS; ++o) {
                const float4 weight = head.quad(o, c0 + a * HEAD_CHUNK);
#pragma unroll
                for (int i = 0; i < HEAD_ROWS; ++i) output[i][o] = dot(known[a][i], weight, output[i][o]);
            }
        }
    }
    float loss = 0.f;
    float error[HEAD_ROWS][HEAD_OUTPUTS];
#pragma unroll
    for (int i = 0; i < HEAD_ROWS; ++i) {
        float z = bias;
#pragma unroll
        for (int o = 0; o < HEAD_OUTPUTS; ++o) {
            const float sum = warp_sum(output[i][o]);
            if (lane == o) z += sum;
        }
        if (i < rows) loss += head_error(layer, raw, info, batch, r0 + i, z, target[i], errors[i], largest);
        else if (lane < HEAD_OUTPUTS) errors[i][lane] = 0.f;
        __syncwarp();
#pragma unroll
        for (int o = 0; o < HEAD_OUTPUTS; ++o) error[i][o] = errors[i][o];
    }
    const int kind = hidden_activation(below);
    Element* to = below.error + (i64)r0 * ld;
    const Element* slopes = stores_slope(kind) ? to : input;
    for (int c0 = own; c0 < head.width; c0 += HEAD_AHEAD * HEAD_CHUNK) {
        float4 known[HEAD_AHEAD][HEAD_ROWS];
#pragma unroll
        for (int a = 0; a < HEAD_AHEAD; ++a)
#pragma unroll
            for (int i = 0; i < HEAD_ROWS; ++i)
                known[a][i] = c0 + a * HEAD_CHUNK < ld && i < rows
                                  ? load_quad(slopes + (i64)i * ld + c0 + a * HEAD_CHUNK) : zeros();
#pragma unroll
        for (int a = 0; a < HEAD_AHEAD; ++a) {
            const int c = c0 + a * HEAD_CHUNK;
            if (c >= head.width) break;
            float4 whole[HEAD_ROWS], sum = zeros();
#pragma unroll
            for (int i = 0; i < HEAD_ROWS; ++i) whole[i] = zeros();
#pragma unroll
            for (int o = 0; o < HEAD_OUTPUTS; ++o) {
                const float4 weight = head.quad(o, c);
#pragma unroll
                for (int i = 0; i < HEAD_ROWS; ++i) add_scaled(whole[i], error[i][o], weight);
            }
#pragma unroll
            for (int i = 0; i < HEAD_ROWS; ++i) {
                if (i >= rows || c >= ld) break;
                float4& v = whole[i];
                const auto slope = [&](float& x, int k) {  // weights of columns that pad are zero
                    const float y = part(known[a][i], k);
                    if (c + k < below.fan_out) x *= stores_slope(kind) ? y : slope_of_output(kind, y);
                };
                EACH_OF_FOUR(slope);
                store_quad(to + (i64)i * ld + c, v);
                largest_below = max(largest_below, magnitude_bits(v));
                add_to(sum, v);
            }
            add_to(*(float4*)(sums + c), sum);
        }
    }
    return loss;
}

// Before the barrier in front of `head`: what does not depend on it.
__device__ __forceinline__ void load_head(int rows) {
    const Layer& layer = LAYER(ENGINE.layers - 1);
    if (blockIdx.x * HEAD_TILE < rows) Head(layer).load(layer);
}

// Every block adds up what its rows give before it writes one part of the sums of columns and of the loss.
__device__ PHASE void head(const Raw& raw, const StepInfo& info, const Batch& batch, Flags& flags) {
    __shared__ float errors[HEAD_TILE][HEAD_OUTPUTS];
    const int l = ENGINE.layers - 1, warp = threadIdx.x >> 5;
    const Layer &layer = LAYER(l), &below = LAYER(l - 1);
    const Head head(layer);
    float* sums = head.sums + warp * head.width;
    u32 largest = 0, largest_below = 0;
    float loss = 0.f, output_sum = 0.f;
    if (blockIdx.x * HEAD_TILE >= info.rows) return;
    for (int c = (threadIdx.x & 31) * 4; c < head.width; c += HEAD_CHUNK) *(float4*)(sums + c) = zeros();
    for (int r0 = blockIdx.x * HEAD_TILE; r0 < info.rows; r0 += gridDim.x * HEAD_TILE) {
        __syncthreads();
        if (r0 + warp * HEAD_ROWS < info.rows)
            loss += head_rows(
                head, layer, below, raw, info, batch, r0 + warp * HEAD_ROWS, errors + warp * HEAD_ROWS, sums, largest,
                largest_below);
        __syncthreads();
        if (threadIdx.x < layer.fan_out)
            for (int r = 0; r < min(info.rows - r0, HEAD_TILE); ++r) output_sum += errors[r][threadIdx.x];
    }
    if (threadIdx.x < layer.fan_out) layer.column_sums[(i64)blockIdx.x * layer.ld_out + threadIdx.x] = output_sum;
    for (int c = threadIdx.x; c < below.ld_out; c += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) sum += head.sums[w * head.width + c];
        below.column_sums[(i64)blockIdx.x * below.ld_out + c] = sum;
    }
    put_loss(blockIdx.x, loss, flags);
    block_largest(&flags.error[l], largest);
    block_largest(&flags.error[l - 1], largest_below);
}
#endif
