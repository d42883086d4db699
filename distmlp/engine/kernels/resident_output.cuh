// The output layer, by every block for all rows: outputs, loss and error, then the error of the whole last hidden layer
// in registers, and from there backward into the block's group. No block waits for another in between.
#pragma once
#include "epilogue.cuh"
#include "resident_feed.cuh"

namespace resident {

// Sum of the sample weights, the same in every thread.
__device__ __forceinline__ float sum_of_weights(const Raw& raw, int rows) {
    if (!raw.weights) return (float)rows;
    double sum = 0.;
    for (int r = lane_id(); r < ROWS; r += 32) sum += shared<float>(WEIGHTS_AT)[r];
    return (float)warp_sum(sum);
}

// Network outputs without bias from the warps' shares. Ends with all threads at a barrier.
__device__ __forceinline__ void sum_outputs() {
    for (int i = warp_id(); i < TILES * OUTPUT_TILES; i += WARPS) {
        const float4 v = sum_shares<workers(depth(HIDDEN))>(i);
        float* at = shared<float>(OUTPUT_AT) + row_of(i / OUTPUT_TILES) * OUTPUT_STRIDE + 8 * (i % OUTPUT_TILES) + column();
        *(float2*)at = make_float2(v.x, v.y);
        *(float2*)(at + 8 * OUTPUT_STRIDE) = make_float2(v.z, v.w);
    }
    __syncthreads();
}

// Outputs become errors, zero beyond the batch and the outputs. Adds this thread's part of the weighted loss to `loss`;
// returns whether one is large or not finite.
__device__ __forceinline__ bool output_errors(int rows, float& loss) {
    float* output = shared<float>(OUTPUT_AT);
    const float *bias = shared<float>(FEW_AT) + OUTPUT_BIASES, *weights = shared<float>(WEIGHTS_AT);
    bool found = false;
    if (LOSS == SOFTMAX_CROSS_ENTROPY) {
        for (int r = warp_id(); r < ROWS; r += WARPS) {
            float* row = output + r * OUTPUT_STRIDE;
            const int c = lane_id();
            if (c < 8 * OUTPUT_TILES) row[c] = c < OUTPUTS && r < rows ? row[c] + bias[c] : 0.f;
            __syncwarp();
            if (r >= rows) continue;
            float error = 0.f;
            const float of_row = weights[r] * softmax_row(
                row, OUTPUTS, LABELS ? shared<int>(LABELS_AT)[r] : 0, shared<float>(TARGETS_AT) + r * OUTPUTS,
                [&](int, float slope) { error = weights[r] * slope; });
            __syncwarp();
            if (c < OUTPUTS) row[c] = error;
            found |= exceeds(error, LARGE_ERROR) || exceeds(of_row, 60);
            if (c == 0) loss += of_row;
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * 8 * OUTPUT_TILES; i += BLOCK_THREADS) {
            const int r = i / (8 * OUTPUT_TILES), c = i % (8 * OUTPUT_TILES);
            float error = 0.f;
            if (r < rows && c < OUTPUTS) {
                const float weight = weights[r] * (1.f / (float)OUTPUTS);
                float of_activation, of_loss = 0.f;
                const float y = activate(OUTPUT_ACTIVATION, output[r * OUTPUT_STRIDE + c] + bias[c], of_activation);
                const float part =
                    weight * output_loss(y, shared<float>(TARGETS_AT)[r * OUTPUTS + c], ENGINE.huber_delta, of_loss);
                error = weight * of_loss * of_activation;
                found |= exceeds(error, LARGE_ERROR) || exceeds(part, 60);
                loss += part;
            }
            output[r * OUTPUT_STRIDE + c] = error;
        }
    }
    return found;
}

// The errors of a row tile as an operand (rows, outputs).
__device__ __forceinline__ uint4 error_operand(int tile) {
    const float* at = shared<float>(OUTPUT_AT) + row_of(tile) * OUTPUT_STRIDE + column();
    const auto pair = [&](int offset) {
        const float2 v = *(const float2*)(at + offset);
        return pack_pair(v.x, v.y);
    };
    return make_uint4(
        pair(0), pair(8 * OUTPUT_STRIDE), OUTPUT_TILES > 1 ? pair(8) : 0u,
        OUTPUT_TILES > 1 ? pair(8 * OUTPUT_STRIDE + 8) : 0u);
}

// A pair of the error of the last hidden layer: `x`, `y` derivatives by its outputs, `kept` those outputs or the slopes.
__device__ __forceinline__ void apply_slopes(float& x, float& y, u32 kept) {
    constexpr int KIND = activation(HIDDEN - 1);
    const float a = __uint_as_float(kept << 16), b = __uint_as_float(kept & 0xffff0000u);
    x *= stores_slope(KIND) ? a : slope_of_output(KIND, a);
    y *= stores_slope(KIND) ? b : slope_of_output(KIND, b);
}

struct OutputLayer {
    static constexpr bool KEPT = TILES == CHUNK;  // operands stay in registers
    Operands<depth(HIDDEN)> hidden;
    u32 weights[LAST_TURNS][OUTPUT_TILES][2];

    // `matrix`: outputs of the last hidden layer. Ends with all threads at a barrier.
    __device__ __forceinline__ void forward(const u8* exchange, const u8* matrix, int turn) {
        const u32* from = (const u32*)(exchange + LAST_WEIGHT_AT + turn * LAST_WEIGHT_BYTES) + lane_id();
        if (KEPT) hidden.load(matrix, 0);
#pragma unroll
        for (int i = 0; i < LAST_TURNS; ++i) {
            const int block = warp_id() + i * WARPS;
#pragma unroll
            for (int n = 0; n < OUTPUT_TILES; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    weights[i][n][half] =
                        block < depth(HIDDEN) ? __ldcg(from + ((block * OUTPUT_TILES + n) * 2 + half) * 32) : 0u;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile += CHUNK) {
            if (!KEPT) hidden.load(matrix, tile);
#pragma unroll
            for (int t = 0; t < CHUNK; ++t)
#pragma unroll
                for (int n = 0; n < OUTPUT_TILES; ++n) {
                    float4 sum = zeros();
#pragma unroll
                    for (int i = 0; i < LAST_TURNS; ++i)
                        multiply(sum, hidden.v[i][t], weights[i][n][0], weights[i][n][1]);
                    share(warp_id(), (tile + t) * OUTPUT_TILES + n) = sum;
                }
        }
        __syncthreads();
    }

    // From the errors in shared memory; `matrix`: outputs or slopes of the last hidden layer. Keeps the block's own error
    // of that layer, and leaves shares of the derivative by the block's group below it.
    __device__ __forceinline__ void backward(const u8* matrix, const u32 (&below)[LAST_TURNS][2]) {
#pragma unroll
        for (int i = 0; i < LAST_TURNS; ++i)
#pragma unroll
            for (int n = 0; n < OUTPUT_TILES; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) weights[i][n][half] = transpose(weights[i][n][half]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile += CHUNK) {
            if (!KEPT || stores_slope(activation(HIDDEN - 1))) hidden.load(matrix, tile);
#pragma unroll
            for (int t = 0; t < CHUNK; ++t) {
                const uint4 error = error_operand(tile + t);
                float4 sum = zeros();
#pragma unroll
                for (int i = 0; i < LAST_TURNS; ++i) {
                    float4 c[2];
                    uint4& kept = hidden.v[i][t];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        c[half] = zeros();
                        multiply(
                            c[half], error, weights[i][0][half], OUTPUT_TILES > 1 ? weights[i][OUTPUT_TILES - 1][half] : 0u);
                        apply_slopes(c[half].x, c[half].y, half ? kept.z : kept.x);
                        apply_slopes(c[half].z, c[half].w, half ? kept.w : kept.y);
                    }
                    const uint4 a = make_uint4(
                        pack_pair(c[0].x, c[0].y), pack_pair(c[0].z, c[0].w), pack_pair(c[1].x, c[1].y),
                        pack_pair(c[1].z, c[1].w));
                    if (HIDDEN > 1) multiply(sum, a, below[i][0], below[i][1]);
                    if (warp_id() + i * WARPS == blockIdx.x >> 1) {
                        if (blockIdx.x & 1) keep_delta<HIDDEN - 1>(tile + t, c[1], a.z, a.w);
                        else keep_delta<HIDDEN - 1>(tile + t, c[0], a.x, a.y);
                    }
                }
                if (HIDDEN > 1) share(warp_id(), tile + t) = sum;
            }
        }
    }
};

}  // namespace resident
