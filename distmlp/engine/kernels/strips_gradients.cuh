// Weight gradients of a strip, by the whole block: sums over rows, in registers of one warp for each 32 x 32 weights.
#pragma once
#include "strips_warp.cuh"

namespace strips {

// Collects whether a sum is not finite, or so large (2^56) that the sum over blocks might not have a finite square
// (see largest_sum): a block that says no vouches for its part of the gradient.
struct Limit {
    bool bad;
    __device__ __forceinline__ void pass(float x) { bad |= magnitude_bits(x) >= (56u + 127u) << 23; }
};

// A stage of the inputs of layer L + n.
template <int L>
__device__ __forceinline__ void ask_stage(const Strip& strip, int n, int stage) {
    constexpr int VECTORS = padded(L) / 4;
    const u32 to = strip.shared + STAGES_AT + stage % STRIP_STAGES * (STAGE_FLOATS * 4);
    const float* from = strip.kept + kept_of<L>(n) + stage * (STAGE_ROWS * padded(L));
    for_each<STAGE_ROWS * VECTORS>(
        [=](int i) { copy16(to + i / VECTORS * (ROW_FLOATS * 4) + i % VECTORS * 16, from + 4 * i); });
}
template <int L>
__device__ __forceinline__ void begin_stages(const Strip& strip, int n, int rows) {
    if constexpr (!KEEPS) {
#pragma unroll 1
        for (int i = 0; i < STRIP_STAGES - 1; ++i) {
            if (i * STAGE_ROWS < rows) ask_stage<L>(strip, n, i);
            copy_commit();
        }
    }
}

// What a warp multiplies of eight rows for its 32 x 32 weights, as it lies in shared memory.
struct EightRows {
    u32 inputs[2][4], errors[4][2];

    // The next row is `input_row` and `error_row` bytes further.
    __device__ __forceinline__ void load(u32 input, u32 error, int input_row, int error_row) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            load_pair(inputs[p][0], inputs[p][1], input + 64 * p);
            load_pair(inputs[p][2], inputs[p][3], input + 64 * p + input_row);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            errors[j][0] = load_word(error + 32 * j);
            errors[j][1] = load_word(error + 32 * j + error_row);
        }
    }
    __device__ __forceinline__ void multiply_into(float (&sums)[2][4][4]) const {
        Operand<4> left[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) left[i >> 2].set(i & 3, inputs[i >> 2][i & 3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            Operand<2> right;
            right.set(0, errors[j][0]), right.set(1, errors[j][1]);
#pragma unroll
            for (int p = 0; p < 2; ++p) multiply(sums[p][j], left[p], right);
        }
    }
};

// Sums of the gradients of the weights and biases of layer L + n over the strip, onto those of the strips before. The
// first stages have been asked for.
//
// A warp has a unit of 32 x 32 weights: the thread (g, t) inputs 2 g and 2 g + 1 of either half (p), and outputs 8 j + 2 t
// and the next. Products go over rows 2 t and 2 t + 1 of eight. All operands come from shared memory, and sums go out,
// in the registers that the products want: moving them would take as long as the products. All warps come from the same
// barrier, so each asks for its next rows ahead of the products of the last ones: else all would load, then all multiply.
template <int L>
__device__ __forceinline__ void sum_gradient(const Strip& at_large, int n, int rows, bool more, Limit& limit) {
    const Strip strip = at_large.here();
    constexpr int ACROSS = padded(L + 1) / 32, UNITS = units(L), SHARES = shares(L), STEPS = STAGE_ROWS / 8 / SHARES;
    constexpr int ERROR_ROW = row_bytes(L + 1), INPUT_ROW = row_bytes(L);
    constexpr bool APART = PRODUCT != TF32;  // tensor cores truncate: sums of a stage are rounded onto those before
    static_assert(UNITS <= WARPS, "a warp has one unit");
    const int unit = strip.warp % UNITS, share = strip.warp / UNITS;
    const bool busy = share < SHARES, sums_bias = unit < ACROSS;
    float sums[2][4][4], bias[4] = {};
    float* weights = strip.partial + FIXED(weight_at(L)) + n * FIXED(weight_floats(L));
    const auto output = [&](int p, int half) {  // of two sums, and eight further on the next two
        return weights + (unit / ACROSS * 32 + 16 * p + 2 * strip.g() + half) * padded(L + 1) + unit % ACROSS * 32 +
               2 * strip.t();
    };
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int p = i >> 3, half = i >> 2 & 1, j = i & 3;
        const float2 v = more && share == 0 ? *(const float2*)(output(p, half) + 8 * j) : make_float2(0.f, 0.f);
        sums[p][j][2 * half] = v.x, sums[p][j][2 * half + 1] = v.y;
    }
    const u32 errors_at = strip.row_address<L + 1>(n, 2 * strip.t()) + strip.g() * 4 + unit % ACROSS * 128;
    const u32 inputs_at = (KEEPS ? strip.row_address<L>(n, 0) : strip.shared + STAGES_AT) + 2 * strip.t() * INPUT_ROW +
                          strip.g() * 8 + unit / ACROSS * 128;
    const int stages = rows / STAGE_ROWS;
    EightRows last = {};
    const auto multiply_last = [&](float(&into)[2][4][4]) {
        last.multiply_into(into);
        if (sums_bias) {
#pragma unroll
            for (int j = 0; j < 4; ++j) bias[j] += value_of_operand(last.errors[j][0]) + value_of_operand(last.errors[j][1]);
        }
    };
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
        if constexpr (!KEEPS) {
            copy_wait<STRIP_STAGES - 2>();
            __syncthreads();
            if (stage + STRIP_STAGES - 1 < stages) ask_stage<L>(strip, n, stage + STRIP_STAGES - 1);
            copy_commit();
        }
        if (!busy) continue;
        float part[2][4][4] = {};
        float(&into)[2][4][4] = APART ? part : sums;
        const u32 error = errors_at + (stage * STAGE_ROWS + 8 * share) * ERROR_ROW;
        const u32 input = inputs_at + ((KEEPS ? stage : stage % STRIP_STAGES) * STAGE_ROWS + 8 * share) * INPUT_ROW;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            EightRows next;
            next.load(input + k * (SHARES * 8 * INPUT_ROW), error + k * (SHARES * 8 * ERROR_ROW), INPUT_ROW, ERROR_ROW);
            multiply_last(into);
            last = next;
        }
        if (APART) {
#pragma unroll
            for (int i = 0; i < 32; ++i) sums[i >> 4][i >> 2 & 3][i & 3] += part[i >> 4][i >> 2 & 3][i & 3];
        }
    }
    if (busy) {
        float part[2][4][4] = {};
        multiply_last(APART ? part : sums);
        if (APART) {
#pragma unroll
            for (int i = 0; i < 32; ++i) sums[i >> 4][i >> 2 & 3][i & 3] += part[i >> 4][i >> 2 & 3][i & 3];
        }
    }
    if constexpr (SHARES > 1) {
        float* scratch = (float*)(dynamic_shared + STAGES_AT) + strip.lane;
#pragma unroll
        for (int half = SHARES / 2; half > 0; half /= 2) {
            if (!KEEPS || half < SHARES / 2) __syncthreads();  // stages, and sums of the turn before, have been read
            if (share >= half && share < 2 * half) {
                float* mine = scratch + ((share - half) * UNITS + unit) * SHARE_FLOATS;
#pragma unroll
                for (int i = 0; i < 32; ++i) mine[32 * i] = sums[i >> 4][i >> 2 & 3][i & 3];
#pragma unroll
                for (int j = 0; j < 4; ++j) mine[32 * (32 + j)] = bias[j];
            }
            __syncthreads();
            if (share < half) {
                const float* theirs = scratch + (share * UNITS + unit) * SHARE_FLOATS;
#pragma unroll
                for (int i = 0; i < 32; ++i) sums[i >> 4][i >> 2 & 3][i & 3] += theirs[32 * i];
#pragma unroll
                for (int j = 0; j < 4; ++j) bias[j] += theirs[32 * (32 + j)];
            }
        }
    }
    if (share > 0) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int p = i >> 3, half = i >> 2 & 1, j = i & 3;
        const float x = sums[p][j][2 * half], y = sums[p][j][2 * half + 1];
        limit.pass(x), limit.pass(y);
        *(float2*)(output(p, half) + 8 * j) = make_float2(x, y);
    }
    if (!sums_bias) return;
    float* out = strip.partial + FIXED(bias_at(L)) + n * padded(L + 1) + unit * 32 + strip.g();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float sum = bias[j];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (more) sum += out[8 * j];
        __syncwarp();
        limit.pass(sum);
        if (strip.t() == 0) out[8 * j] = sum;
    }
}

}  // namespace strips
