// The output layer, by every block for all rows of its group: outputs, loss and error, then the error of the whole last
// hidden layer in registers, and from there backward to the block's columns of the layer below. No block waits for another in
// between.
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
    for (int i = warp_id(); i < GROUP_TILES * OUTPUT_TILES; i += WARPS) {
        const float4 v = sum_shares<workers(DEPTH<HIDDEN>)>(i);
        float* at = shared<float>(OUTPUT_AT) + row_of(i / OUTPUT_TILES) * OUTPUT_STRIDE + 8 * (i % OUTPUT_TILES) + column();
        *(float2*)at = make_float2(v.x, v.y);
        *(float2*)(at + 8 * OUTPUT_STRIDE) = make_float2(v.z, v.w);
    }
    __syncthreads();
}

// Outputs of the group's rows, of which the first `rows` exist, become errors, zero beyond the batch and the outputs.
// `weights`: of the rows. Adds this thread's part of the weighted loss to `loss`; returns whether one is large or not
// finite.
__device__ __forceinline__ bool output_errors(int rows, const float* weights, float& loss) {
    float* output = shared<float>(OUTPUT_AT);
    const float* bias = shared<float>(FEW_AT) + OUTPUT_BIASES;
    bool found = false;
    if (LOSS == SOFTMAX_CROSS_ENTROPY) {
        for (int r = warp_id(); r < GROUP_ROWS; r += WARPS) {
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
        for (int i = threadIdx.x; i < GROUP_ROWS * 8 * OUTPUT_TILES; i += BLOCK_THREADS) {
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

// The errors of a row tile of the group as an operand (rows, outputs).
__device__ __forceinline__ uint4 error_operand(int t) {
    const float* at = shared<float>(OUTPUT_AT) + row_of(t) * OUTPUT_STRIDE + column();
    const auto pair = [&](int offset) {
        const float2 v = *(const float2*)(at + offset);
        return pack_pair(v.x, v.y);
    };
    return make_uint4(
        pair(0), pair(8 * OUTPUT_STRIDE), OUTPUT_TILES > 1 ? pair(8) : 0u,
        OUTPUT_TILES > 1 ? pair(8 * OUTPUT_STRIDE + 8) : 0u);
}

// The group's output errors to where the output layer's gradients are made, by one of its blocks.
__device__ __forceinline__ void store_output_errors(u8* exchange, int step, const Place& place) {
    const int t = warp_id();
    if (t >= GROUP_TILES) return;
    u8* turned = exchange + FIXED(error_turned_at(LAYERS)) + (step & 1) * MATRIX_BYTES<LAYERS>;
#if RESIDENT_RANKS > 1
    const uint4 error = transpose(error_operand(t));
    __stcg((uint4*)turned + place.tile(t) * 32 + lane_id(), error);
    send(step, FIXED(sent_error_at(LAYERS)) + 16 * (place.tile(t) * 32 + lane_id()), error);
#else
    __stcg((uint4*)turned + place.tile(t) * 32 + lane_id(), transpose(error_operand(t)));
#endif
    if (lane_id() >= 16) return;
    float sum = 0.f;
    if (lane_id() < 8 * OUTPUT_TILES)
#pragma unroll
        for (int r = 0; r < 16; ++r) sum += shared<float>(OUTPUT_AT)[(16 * t + r) * OUTPUT_STRIDE + lane_id()];
    float* sums = (float*)(exchange + FIXED(sums_at(LAYERS)) + (step & 1) * FIXED(sums_bytes(LAYERS)));
    __stcg(sums + place.tile(t) * 16 + lane_id(), sum);
#if RESIDENT_RANKS > 1
    send(step, FIXED(sent_sums_at(LAYERS)) + 4 * (place.tile(t) * 16 + lane_id()), sum);
#endif
}

// A pair of the error of the last hidden layer: `x`, `y` derivatives by its outputs, `kept` those outputs or the slopes.
__device__ __forceinline__ void apply_slopes(float& x, float& y, u32 kept) {
    constexpr int KIND = activation(HIDDEN - 1);
    const float a = __uint_as_float(kept << 16), b = __uint_as_float(kept & 0xffff0000u);
    x *= stores_slope(KIND) ? a : slope_of_output(KIND, a);
    y *= stores_slope(KIND) ? b : slope_of_output(KIND, b);
}

struct OutputLayer {
    typedef Operand<DEPTH<HIDDEN>, GROUP_TILES> Rows;
    Rows hidden;
    Operand<DEPTH<HIDDEN>, 1> weights;

    // Ends with all threads at a barrier, the network's outputs in shared memory.
    __device__ __forceinline__ void forward() {
        if (warp_id() < DEPTH<HIDDEN>)
#pragma unroll
            for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
                for (int n = 0; n < OUTPUT_TILES; ++n) {
                    float4 sum = zeros();
#pragma unroll
                    for (int i = 0; i < turns(DEPTH<HIDDEN>); ++i) {
                        const uint4& w = weights.v[i];
                        multiply(sum, hidden.v[i * GROUP_TILES + t], n ? w.z : w.x, n ? w.w : w.y);
                    }
                    share(warp_id(), t * OUTPUT_TILES + n) = sum;
                }
        __syncthreads();
        sum_outputs();
    }

    // From the errors in shared memory; `kept`: outputs or slopes of the last hidden layer. Stores the block's own error of
    // that layer, and leaves shares of the derivative by the block's columns below it.
    __device__ __forceinline__ void backward(
        u8* exchange, int step, const Place& place, const Rows& kept, const Operand<DEPTH<HIDDEN>, COLUMN_BLOCKS>& below) {
        constexpr int TURNS = turns(DEPTH<HIDDEN>);
        float4 sum[GROUP_TILES][2 * COLUMN_BLOCKS] = {};
        uint4 error[GROUP_TILES];
#pragma unroll
        for (int t = 0; t < GROUP_TILES; ++t) error[t] = error_operand(t);
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const uint4 w = transpose(weights.v[i]);
            const int own = warp_id() + i * WARPS - place.block;
#pragma unroll
            for (int t = 0; t < GROUP_TILES; ++t) {
                const uint4& k = kept.v[i * GROUP_TILES + t];
                float4 low = zeros(), high = zeros();
                multiply(low, error[t], w.x, OUTPUT_TILES > 1 ? w.z : 0u);
                multiply(high, error[t], w.y, OUTPUT_TILES > 1 ? w.w : 0u);
                apply_slopes(low.x, low.y, k.x), apply_slopes(low.z, low.w, k.y);
                apply_slopes(high.x, high.y, k.z), apply_slopes(high.z, high.w, k.w);
                const uint4 a = make_uint4(
                    pack_pair(low.x, low.y), pack_pair(low.z, low.w), pack_pair(high.x, high.y),
                    pack_pair(high.z, high.w));
                if (HIDDEN > 1)
#pragma unroll
                    for (int n = 0; n < COLUMN_BLOCKS; ++n) {
                        const uint4& b = below.v[i * COLUMN_BLOCKS + n];
                        multiply(sum[t][2 * n], a, b.x, b.y);
                        multiply(sum[t][2 * n + 1], a, b.z, b.w);
                    }
                if (own >= 0 && own < COLUMN_BLOCKS && own + place.block < DEPTH<HIDDEN>) {
                    const int group = 2 * (own + place.block);
                    store_error<HIDDEN>(exchange, step, group, place.tile(t), low, a.x, a.y);
                    store_error<HIDDEN>(exchange, step, group + 1, place.tile(t), high, a.z, a.w);
                }
            }
        }
        if (HIDDEN == 1 || warp_id() >= DEPTH<HIDDEN>) return;
#pragma unroll
        for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_BLOCKS; ++n) share(warp_id(), own_tile(t, n)) = sum[t][n];
    }
};

}  // namespace resident
