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
__device__ __forceinline__ Tile error_operand(int t) {
    const float* at = shared<float>(OUTPUT_AT) + row_of(t) * OUTPUT_STRIDE + column();
    const auto pair = [&](int offset) {
        const float2 v = *(const float2*)(at + offset);
        return pack(v.x, v.y);
    };
    return Tile{
        pair(0), pair(8 * OUTPUT_STRIDE), OUTPUT_TILES > 1 ? pair(8) : pair_of(0u),
        OUTPUT_TILES > 1 ? pair(8 * OUTPUT_STRIDE + 8) : pair_of(0u)};
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
    store_tile(turned, place.tile(t), transpose(error_operand(t)));
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
__device__ __forceinline__ void apply_slopes(float& x, float& y, const Pair& kept) {
    constexpr int KIND = activation(HIDDEN - 1);
    const float2 v = unpack(kept);
    x *= stores_slope(KIND) ? v.x : slope_of_output(KIND, v.x);
    y *= stores_slope(KIND) ? v.y : slope_of_output(KIND, v.y);
}

// What ReLU keeps of its outputs, in the place of their registers: which are positive.
struct Signs {
    static constexpr int COUNT = turns(DEPTH<HIDDEN>) * GROUP_TILES;
    u32 bits[(COUNT + 3) / 4];

    __device__ __forceinline__ explicit Signs(const Operand<DEPTH<HIDDEN>, GROUP_TILES>& hidden) : bits() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Tile& v = hidden.v[i];
            bits[i / 4] |= (of(v.x) | of(v.y) << 2 | of(v.z) << 4 | of(v.w) << 6) << i % 4 * 8;
        }
    }
    __device__ __forceinline__ Tile operator[](int i) const {
        return {pair(i, 0), pair(i, 2), pair(i, 4), pair(i, 6)};
    }

   private:
    static __device__ __forceinline__ u32 of(const Pair& v) {
        const float2 y = unpack(v);
        return (y.x > 0.f ? 1u : 0u) | (y.y > 0.f ? 2u : 0u);
    }
    __device__ __forceinline__ Pair pair(int i, int bit) const {
        const u32 own = bits[i / 4] >> (i % 4 * 8 + bit);
        return pack(own & 1 ? 1.f : 0.f, own & 2 ? 1.f : 0.f);
    }
};
constexpr bool SIGNS_DO = PRODUCT != BF16 && (activation(HIDDEN - 1) == RELU || activation(HIDDEN - 1) == LEAKY_RELU);

struct OutputLayer {
    typedef Operand<DEPTH<HIDDEN>, GROUP_TILES> Rows;
    Rows hidden;
    Operand<DEPTH<HIDDEN>, 1, OUTPUT_TILES == 1> weights;

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
                        const Tile& w = weights.v[i];
                        multiply(sum, hidden.v[i * GROUP_TILES + t], n ? w.z : w.x, n ? w.w : w.y);
                    }
                    share(warp_id(), t * OUTPUT_TILES + n) = sum;
                }
        __syncthreads();
        sum_outputs();
    }

    // From the errors in shared memory; `kept`: outputs or slopes of the last hidden layer. Stores the block's own error of
    // that layer, and leaves shares of the derivative by the block's columns below it.
    template <class Kept>
    __device__ __forceinline__ void backward(
        u8* exchange, int step, const Place& place, const Kept& kept, const Operand<DEPTH<HIDDEN>, COLUMN_BLOCKS>& below) {
        constexpr int TURNS = turns(DEPTH<HIDDEN>);
        float4 sum[GROUP_TILES][2 * COLUMN_BLOCKS] = {};
        Tile error[GROUP_TILES];
#pragma unroll
        for (int t = 0; t < GROUP_TILES; ++t) error[t] = error_operand(t);
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const Tile w = transpose(weights.v[i]);
            const int own = warp_id() + i * WARPS - place.block;
#pragma unroll
            for (int t = 0; t < GROUP_TILES; ++t) {
                const Tile& k = kept[i * GROUP_TILES + t];
                float4 low = zeros(), high = zeros();
                multiply(low, error[t], w.x, OUTPUT_TILES > 1 ? w.z : pair_of(0u));
                multiply(high, error[t], w.y, OUTPUT_TILES > 1 ? w.w : pair_of(0u));
                apply_slopes(low.x, low.y, k.x), apply_slopes(low.z, low.w, k.y);
                apply_slopes(high.x, high.y, k.z), apply_slopes(high.z, high.w, k.w);
                const Tile a = {
                    pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w)};
                if (HIDDEN > 1)
#pragma unroll
                    for (int n = 0; n < COLUMN_BLOCKS; ++n) {
                        const Tile& b = below.v[i * COLUMN_BLOCKS + n];
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
