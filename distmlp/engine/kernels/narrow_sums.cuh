// Weight gradients of a block: kept in registers over all its tiles, written out once a step.
#pragma once
#include "narrow_chain.cuh"
#include "narrow_slots.cuh"

namespace narrow {

constexpr int SUMS = NARROW_SUMS;

// Sums of one item over the tile in shared memory.
template <int I>
__device__ __forceinline__ void add_item(float* sums, u32 shared) {
    constexpr Item ITEM = item(I);
    constexpr int L = ITEM.layer, FIRST = ITEM.block * 8 * BLOCK_BYTES;
    const Operand<columns(L + 1) * BLOCK_BYTES, BLOCK_BYTES, true> dz{shared + FIXED(delta_at(L + 1))};
    const Operand<activation_columns(L) * BLOCK_BYTES, BLOCK_BYTES, true> a{shared + FIXED(activation_at(L))};
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) {
        if constexpr (ITEM.out_major) {
            auto left = dz.step(k);
            left.address += FIRST;
            product<activation_columns(L)>(sums + ITEM.offset, left, a.step(k));
        } else {
            auto left = a.step(k);
            left.address += FIRST;
            product<columns(L + 1)>(sums + ITEM.offset, left, dz.step(k));
        }
    }
}

template <int GROUP, int I>
__device__ __forceinline__ void add_items(float* sums, u32 shared) {
    if constexpr (I < ITEM_COUNT) {
        if constexpr (item(I).group == GROUP) add_item<I>(sums, shared);
        add_items<GROUP, I + 1>(sums, shared);
    }
}

// Collects whether a sum is not finite, or so large (2^56) that the sum over warps and blocks might not have a finite
// square (see largest_sum): a block that says no vouches for the whole gradient, and no further barrier is needed to
// know before the update.
struct Limit {
    bool bad;
    __device__ __forceinline__ float pass(float x) {
        bad |= magnitude_bits(x) >= (56u + 127u) << 23;
        return x;
    }
    // For what is never squared.
    __device__ __forceinline__ float pass_finite(float x) {
        bad |= !is_finite(x);
        return x;
    }
};

template <int I>
__device__ __forceinline__ void write_item(const float* sums, float* partial, Limit& limit) {
    constexpr Item ITEM = item(I);
    constexpr int COLUMNS = item_columns(I), ROWS = ITEM.out_major ? width(ITEM.layer + 1) : width(ITEM.layer);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int row = 64 * ITEM.block + 16 * warp + (lane >> 2);
    // Rows beyond the matrix hold sums of whatever lay there.
    const bool first = ROWS % 64 == 0 || row < ROWS, second = ROWS % 64 == 0 || row + 8 < ROWS;
    float4* out = (float4*)partial + FIXED(item_chunk(I) * 32) + warp * 32 + lane;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const float* x = sums + ITEM.offset + 4 * j;
        if (first) limit.pass(x[0]), limit.pass(x[1]);
        if (second) limit.pass(x[2]), limit.pass(x[3]);
        out[j * CHUNK] = make_float4(x[0], x[1], x[2], x[3]);
    }
    if constexpr (ITEM.out_major) {  // the column of ones
        const float* ones = sums + ITEM.offset + 4 * COLUMNS;
        float* bias = partial + FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(ITEM.layer));
        if ((lane & 3) == 0 && row < ROWS) bias[row] = limit.pass(ones[0]);
        if ((lane & 3) == 0 && row + 8 < ROWS) bias[row + 8] = limit.pass(ones[2]);
    }
}

template <int GROUP, int I>
__device__ __forceinline__ void write_items(const float* sums, float* partial, Limit& limit) {
    if constexpr (I < ITEM_COUNT) {
        if constexpr (item(I).group == GROUP) write_item<I>(sums, partial, limit);
        write_items<GROUP, I + 1>(sums, partial, limit);
    }
}

// The block's sums to its place among the partial sums.
template <int GROUP>
__device__ __forceinline__ void write_sums(int group, float (&sums)[SUMS], float* partial, Limit& limit) {
    if constexpr (GROUP < GROUPS) {
        if (group == GROUP)
            write_items<GROUP, 0>(sums, partial, limit);
        else
            write_sums<GROUP + 1>(group, sums, partial, limit);
    }
}

// Adds a tile to the sums of this warpgroup's items. One branch a warpgroup, with its products begun and awaited
// inside: products in flight across a branch would make the compiler serialise them.
template <int GROUP>
__device__ __forceinline__ void add_tile(int group, float (&sums)[SUMS], u32 shared) {
    if constexpr (GROUP < GROUPS) {
        if (group == GROUP) {
            settle(sums);
            begin_products();
            add_items<GROUP, 0>(sums, shared);
            commit_products();
            wait_products();
            settle(sums);
        } else {
            add_tile<GROUP + 1>(group, sums, shared);
        }
    }
}

// A number of step `number`, with whether the block's sums are bad.
__device__ __forceinline__ u64 tagged(float x, u32 number, bool bad) {
    return (u64)(number << 1 | (bad ? 1u : 0u)) << 32 | __float_as_uint(x);
}
__device__ __forceinline__ void store_release(u64* where, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(where), "l"(value) : "memory");
}

// A thread's totals over the lanes of its warp: loss, weight and, from `mine + 4` on, output biases.
__device__ __forceinline__ void sum_over_warp(Totals& totals, float* mine, Limit& limit) {
    const int lane = threadIdx.x & 31;
    if (CHAIN_SUMS_BIAS) {
#pragma unroll
        for (int i = 0; i < BIAS_SUMS; ++i) {
#pragma unroll
            for (int mask = 4; mask < 32; mask <<= 1) totals.bias[i] += __shfl_xor_sync(~0u, totals.bias[i], mask);
            if (lane < 4) mine[4 + (i >> 1) * 8 + 2 * lane + (i & 1)] = limit.pass(totals.bias[i]);
        }
    }
    const float loss = warp_sum(totals.loss), weight = warp_sum(totals.weight);
    if (lane > 0) return;
    mine[0] = limit.pass_finite(loss);
    mine[1] = limit.pass(weight);
}

// Output biases and the tally of the block: over the warps in their order. The tally comes last and says that all
// partial sums of the block are there. `scratch`: what sum_over_warp left, STRIDE floats a warp. Every thread of the
// block takes part.
template <int STRIDE>
__device__ __forceinline__ void deliver(
    const float* scratch, float* partial, u64* loss_tally, u64* weight_tally, u32 number, const Limit& limit) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool bad = __syncthreads_or(limit.bad);
    if (warp > 0) return;
    static_assert(!CHAIN_SUMS_BIAS || OUTPUTS <= 32, "one warp adds up the output biases");
    if (CHAIN_SUMS_BIAS && lane < OUTPUTS) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += scratch[w * STRIDE + 4 + lane];
        partial[FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(LAYERS - 1)) + lane] = sum;
    }
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        sum[0] += scratch[w * STRIDE];
        sum[1] += scratch[w * STRIDE + 1];
    }
    __syncwarp();
    if (lane == 0) {
        const bool any = bad || !is_finite(sum[0]);
        *loss_tally = tagged(sum[0], number, any);
        store_release(weight_tally, tagged(sum[1], number, any));
    }
}

__device__ __forceinline__ void finish_sums(
    Totals& totals, float* scratch, float* partial, u64* loss_tally, u64* weight_tally, u32 number, Limit& limit) {
    sum_over_warp(totals, scratch + (threadIdx.x >> 5) * WARP_SUMS, limit);
    deliver<WARP_SUMS>(scratch, partial, loss_tally, weight_tally, number, limit);
}

}  // namespace narrow
