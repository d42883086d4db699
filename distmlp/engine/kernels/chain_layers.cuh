// A block's rows through all layers, forward and backward, by four warpgroups. Operands are swapped: a product has 64 features
// of the layer and the rows of the block, so that few rows fill the tensor cores. Warpgroup g takes panels g, g + 4, …
// of the features; a thread holds features f and f + 8 of rows 8 j + 2 q and 8 j + 2 q + 1 in sums 4 j to 4 j + 3.
#pragma once
#include "chain_rows.cuh"

namespace chain {

// ReLU and its leaky kin need a bit an output; others keep the output or the slope itself.
constexpr bool BITS = HIDDEN_ACTIVATION == RELU || HIDDEN_ACTIVATION == LEAKY_RELU;
constexpr int KEPT = BITS ? 1 : PAIRS;  // words a thread and 64 features

// Larger of two pairs of bfloat16 magnitudes; NaN is the largest.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 pair) {
    u32 most;
    asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(pair & 0x7fff7fffu));
    return most;
}
__device__ __forceinline__ float2 unpack(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

struct Largest {
    u32 activation, error;  // pairs of bfloat16
};

// What a thread knows of its place.
struct Place {
    int group, warp, lane, q;  // warp of its group

    __device__ __forceinline__ Place()
        : group(__shfl_sync(~0u, threadIdx.x >> 7, 0)), warp(threadIdx.x >> 5 & 3), lane(threadIdx.x & 31), q(threadIdx.x & 3) {}
    // First of the thread's two features in panel `p`.
    __device__ __forceinline__ int feature(int p) const { return 64 * p + 16 * warp + (lane >> 2); }
    // Pair 2 j + h: feature h of the two, rows of column block j, to panel `p` of a buffer.
    __device__ __forceinline__ void store(u32 buffer, int p, const u32 (&pairs)[PAIRS]) const {
        const int row = 8 * (lane >> 4) + (lane & 7), chunk = 2 * warp + (lane >> 3 & 1);
        const u32 at = buffer + p * PANEL_BYTES + row * 128 + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
        for (int i = 0; i < BLOCKS8 / 2; ++i)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + i * 2048),
                         "r"(pairs[4 * i]), "r"(pairs[4 * i + 1]), "r"(pairs[4 * i + 2]), "r"(pairs[4 * i + 3])
                         : "memory");
    }
};

// A block's panels of one matrix to device memory, by one thread.
__device__ __forceinline__ void copy_panels_out(u32 from, int first_piece, int count) {
    const int row = blockIdx.x * ROWS;
    u8* to = context.buffers.piece(first_piece + row / 64 * count) + row % 64 * 128;
#pragma unroll 1
    for (int p = 0; p < count; ++p) copy_out(to + (i64)p * PIECE_BYTES, from + p * PANEL_BYTES, PANEL_BYTES);
    commit_copies_out();
}

template <class P>
__device__ __forceinline__ int hidden_kind(const P& part) {
    return HIDDEN_ACTIVATION == MIXED ? part.activation : HIDDEN_ACTIVATION;
}

// Outputs of a hidden layer from the sums; leaves what their slopes are told from in `kept`.
__device__ __forceinline__ void activate_sums(
    int kind, const float (&sums)[SUMS], float b0, float b1, u32 (&pairs)[PAIRS], u32 (&kept)[KEPT]) {
    if (BITS) kept[0] = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const float b = i & 1 ? b1 : b0, x = sums[2 * i] + b, y = sums[2 * i + 1] + b;
        if (HIDDEN_ACTIVATION == RELU) {
            asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(y), "f"(x));
        } else {
            float slope_x, slope_y;
            const float u = activate(kind, x, slope_x), v = activate(kind, y, slope_y);
            pairs[i] = pack_pair(u, v);
            if (!BITS) kept[i] = stores_slope(kind) ? pack_pair(slope_x, slope_y) : pairs[i];
        }
        if (BITS) {
            u32 positive;
            asm("{ .reg .b32 zero; mov.b32 zero, 0; set.gt.u32.bf16x2 %0, %1, zero; }" : "=r"(positive) : "r"(pairs[i]));
            kept[0] |= positive & 0x00010001u << i;
        }
    }
}

// Derivatives by the outputs to errors, in place.
__device__ __forceinline__ void apply_slopes(int kind, float (&sums)[SUMS], const u32 (&kept)[KEPT]) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        if (BITS) {
            const float below = HIDDEN_ACTIVATION == RELU ? 0.f : LEAKY_SLOPE;
            const bool low = kept[0] >> i & 1, high = kept[0] >> (16 + i) & 1;
            sums[2 * i] = low ? sums[2 * i] : HIDDEN_ACTIVATION == RELU ? 0.f : below * sums[2 * i];
            sums[2 * i + 1] = high ? sums[2 * i + 1] : HIDDEN_ACTIVATION == RELU ? 0.f : below * sums[2 * i + 1];
        } else {
            const float2 k = unpack(kept[i]);
            sums[2 * i] *= stores_slope(kind) ? k.x : slope_of_output(kind, k.x);
            sums[2 * i + 1] *= stores_slope(kind) ? k.y : slope_of_output(kind, k.y);
        }
    }
}

// Errors to bfloat16, and their sums over the block's rows to device memory.
template <class P>
__device__ __forceinline__ void finish_errors(
    const P& part, const Place& place, int panel, bool works, const float (&sums)[SUMS],
    u32 (&pairs)[PAIRS], Largest& largest) {
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        pairs[i] = pack_pair(sums[2 * i], sums[2 * i + 1]);
        (i & 1 ? high : low) += sums[2 * i] + sums[2 * i + 1];
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask <<= 1) {
        low += __shfl_xor_sync(~0u, low, mask);
        high += __shfl_xor_sync(~0u, high, mask);
    }
    if (!works) return;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) largest.error = larger_pair(largest.error, pairs[i]);
    if (place.q == 0) {
        float* to = context.buffers.column_sums + (i64)(part.feature + place.feature(panel)) * gridDim.x + blockIdx.x;
        __stcg(to, low);
        __stcg(to + 8 * gridDim.x, high);
    }
}

// The last layer's weights stay in the ring on the way back, where they leave room for two more stages.
constexpr bool TURNS_AT_ONCE =
    panels(LAYERS) <= GROUPS && panels(LAYERS - 1) <= GROUPS && panels(LAYERS - 1) + 2 <= STAGES && LAYERS > 1;

// The weights of all layers, forward and backward, into the ring, by one thread of each block of the pair; `done` of the
// launch are the steps before.
__device__ __noinline__ Ring stream_weights(Ring ring, u32 done) {
    const Buffers& buffers = context.buffers;
    const u32 rank = rank_in_pair();
    await_update(LAYERS, done);
    fence_copies();
#pragma unroll 1
    for (int phase = 0; phase < 2 * LAYERS - 1; ++phase) {
        if (TURNS_AT_ONCE && phase == LAYERS) continue;
        const bool forward = phase < LAYERS;
        if (forward) {
            await_update(phase, done);
            fence_copies();
        }
        const Part& part = part_of(forward ? phase : 2 * LAYERS - 1 - phase);
        const int outer = forward ? part.out : part.in, depth = forward ? part.in : part.out;
        // Pieces of a stage, and from stage to stage, lie so far apart.
        const i64 apart = forward ? PIECE_BYTES : part.out * PIECE_BYTES;
        const i64 next = forward ? part.out * PIECE_BYTES : PIECE_BYTES;
#pragma unroll 1
        for (int group = 0; group < outer; group += GROUPS) {
            const int count = outer - group < GROUPS ? outer - group : GROUPS, half = (count + 1) >> 1;
            const int first = rank ? half : 0, own = rank ? count - half : half;
            const u8* from = buffers.piece(part.pieces) + (group + first) * apart;
#pragma unroll 1
            for (int k = 0; k < depth; ++k) {
                ring.await_empty();
                const u32 full = ring.full(ring.stage), at = ring.address() + first * PIECE_BYTES;
                expect_bytes(full, count * PIECE_BYTES);
                if (forward) {
                    if (own) copy_to_pair(at, from, own * PIECE_BYTES, full);
                } else {
                    if (own) copy_to_pair(at, from, PIECE_BYTES, full);
                    if (own > 1) copy_to_pair(at + PIECE_BYTES, from + apart, PIECE_BYTES, full);
                }
                from += next;
                ring.advance();
            }
        }
    }
    return ring;
}

}  // namespace chain
