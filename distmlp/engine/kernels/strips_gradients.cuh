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
#pragma unroll 1
    for (int i = 0; i < STRIP_STAGES - 1; ++i) {
        if (i * STAGE_ROWS < rows) ask_stage<L>(strip, n, i);
        copy_commit();
    }
}

// Sums of the gradients of the weights and biases of layer L + n over the strip, onto those of the strips before. The
// first stages have been asked for.
//
// A warp has units of 32 x 32 weights: the thread (g, t) inputs 2 g and 2 g + 1 of either half (p), and outputs 8 j + 2 t
// and the next. Products go over rows 2 t and 2 t + 1 of eight. All operands come from shared memory, and sums go out,
// in the registers that the products want: moving them would take as long as the products.
template <int L>
__device__ __forceinline__ void sum_gradient(const Strip& at_large, int n, int rows, bool more, Limit& limit) {
    const Strip strip = at_large.here();
    constexpr int ACROSS = padded(L + 1) / 32, UNITS = units(L), TURNS = unit_turns(L), SHARES = shares(L);
    constexpr bool APART = PRODUCT != TF32;  // tensor cores truncate: sums of a stage are rounded onto those before
    constexpr bool SAME_COLUMNS = WARPS % ACROSS == 0;  // in all turns of a warp
    const int unit = UNITS < WARPS ? strip.warp % UNITS : strip.warp, share = UNITS < WARPS ? strip.warp / UNITS : 0;
    const bool busy = share < SHARES;
    float sums[TURNS][2][4][4], bias[TURNS][4];
    float* weights = strip.partial + FIXED(weight_at(L)) + n * FIXED(weight_floats(L));
    const auto output = [&](int turn, int p, int half) {  // of two sums, and eight further on the next two
        const int u = unit + turn * WARPS;
        return weights + (u / ACROSS * 32 + 16 * p + 2 * strip.g() + half) * padded(L + 1) + u % ACROSS * 32 +
               2 * strip.t();
    };
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const bool load = more && busy && share == 0 && unit + turn * WARPS < UNITS;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int p = i >> 3, half = i >> 2 & 1, j = i & 3;
            const float2 v = load ? *(const float2*)(output(turn, p, half) + 8 * j) : make_float2(0.f, 0.f);
            sums[turn][p][j][2 * half] = v.x, sums[turn][p][j][2 * half + 1] = v.y;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) bias[turn][j] = 0.f;
    }
    const u32 errors_at = strip.shared + 2 * strip.t() * (ROW_FLOATS * 4) + strip.g() * 4;
    const u32 inputs_at = strip.shared + STAGES_AT + 2 * strip.t() * (ROW_FLOATS * 4) + strip.g() * 8;
    const int stages = rows / STAGE_ROWS;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
        copy_wait<STRIP_STAGES - 2>();
        __syncthreads();
        if (stage + STRIP_STAGES - 1 < stages) ask_stage<L>(strip, n, stage + STRIP_STAGES - 1);
        copy_commit();
        if (!busy) continue;
        float part[TURNS][2][4][4] = {};
        float(&into)[TURNS][2][4][4] = APART ? part : sums;
        const u32 first_error = errors_at + (stage * STAGE_ROWS + 8 * share) * (ROW_FLOATS * 4);
        const u32 first_input = inputs_at + (stage % STRIP_STAGES * STAGE_ROWS + 8 * share) * (ROW_FLOATS * 4);
#pragma unroll
        for (int k = 0; k < (STAGE_ROWS / 8 + SHARES - 1) / SHARES; ++k) {
            if (STAGE_ROWS / 8 % SHARES > 0 && k * SHARES + share >= STAGE_ROWS / 8) break;
            const u32 e = first_error + k * (SHARES * 8 * ROW_FLOATS * 4);
            const u32 a = first_input + k * (SHARES * 8 * ROW_FLOATS * 4);
            Operand<2> b[4];
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                const int u = unit + turn * WARPS;
                if (UNITS % WARPS != 0 && UNITS > WARPS && u >= UNITS) break;
                Operand<4> left[2];
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    u32 r[4];
                    load_pair(r[0], r[1], a + u / ACROSS * 128 + 64 * p);
                    load_pair(r[2], r[3], a + u / ACROSS * 128 + 64 * p + ROW_FLOATS * 4);
#pragma unroll
                    for (int i = 0; i < 4; ++i) left[p].set(i, r[i]);
                }
                if (turn == 0 || !SAME_COLUMNS) {
                    const bool sums_bias = u < ACROSS;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const u32 v = load_word(e + u % ACROSS * 128 + 32 * j);
                        const u32 w = load_word(e + u % ACROSS * 128 + 32 * j + ROW_FLOATS * 4);
                        b[j].set(0, v), b[j].set(1, w);
                        if (sums_bias) bias[turn][j] += value_of_operand(v) + value_of_operand(w);
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int p = 0; p < 2; ++p) multiply(into[turn][p][j], left[p], b[j]);
            }
        }
        if (APART) {
#pragma unroll
            for (int i = 0; i < 32 * TURNS; ++i)
                sums[i >> 5][i >> 4 & 1][i >> 2 & 3][i & 3] += part[i >> 5][i >> 4 & 1][i >> 2 & 3][i & 3];
        }
    }
    if constexpr (SHARES > 1) {
        float* scratch = (float*)(dynamic_shared + STAGES_AT) + strip.lane;
        __syncthreads();  // the stages have been read
        if (busy && share > 0) {
            float* mine = scratch + ((share - 1) * UNITS + unit) * SHARE_FLOATS;
#pragma unroll
            for (int i = 0; i < 32; ++i) mine[32 * i] = sums[0][i >> 4][i >> 2 & 3][i & 3];
#pragma unroll
            for (int j = 0; j < 4; ++j) mine[32 * (32 + j)] = bias[0][j];
        }
        __syncthreads();
        if (share == 0) {
#pragma unroll 1
            for (int other = 0; other < SHARES - 1; ++other) {
                const float* theirs = scratch + (other * UNITS + unit) * SHARE_FLOATS;
#pragma unroll
                for (int i = 0; i < 32; ++i) sums[0][i >> 4][i >> 2 & 3][i & 3] += theirs[32 * i];
#pragma unroll
                for (int j = 0; j < 4; ++j) bias[0][j] += theirs[32 * (32 + j)];
            }
        }
    }
    if (share > 0) return;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int u = unit + turn * WARPS;
        if (u >= UNITS) break;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int p = i >> 3, half = i >> 2 & 1, j = i & 3;
            const float(&x)[4] = sums[turn][p][j];
            limit.pass(x[2 * half]), limit.pass(x[2 * half + 1]);
            *(float2*)(output(turn, p, half) + 8 * j) = make_float2(x[2 * half], x[2 * half + 1]);
        }
        if (u >= ACROSS) continue;
        float* out = strip.partial + FIXED(bias_at(L)) + n * padded(L + 1) + u * 32 + strip.g();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float sum = bias[turn][j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (more) sum += out[8 * j];
            __syncwarp();
            limit.pass(sum);
            if (strip.t() == 0) out[8 * j] = sum;
        }
    }
}

}  // namespace strips
