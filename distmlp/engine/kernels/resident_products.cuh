// Products of the resident kernel, sums over the warps of a block, and what leaves it of an error.
#pragma once
#include "resident_ranks.cuh"

namespace resident {

#if PRODUCT != BF16
// Eight deep. For float32 three products: of what TF32 holds of an operand, and of what is left; tensor cores leave out what
// TF32 does not hold.
__device__ __forceinline__ void multiply(float (&c)[4], const Pair& upper, const Pair& lower, const Pair& b) {
    u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
#if PRODUCT == TF32X3
    u32 rest[4], of_b[2] = {b.x, b.y}, rest_of_b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(a[i], rest[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) split_tf32(of_b[i], rest_of_b[i]);
    mma_tf32(c, rest, of_b[0], of_b[1]);
    mma_tf32(c, a, rest_of_b[0], rest_of_b[1]);
    mma_tf32(c, a, of_b[0], of_b[1]);
#else
    mma_tf32(c, a, b.x, b.y);
#endif
}
#endif
__device__ __forceinline__ void multiply(float4& sum, const Tile& a, const Pair& b0, const Pair& b1) {
    float c[4] = {sum.x, sum.y, sum.z, sum.w};
#if PRODUCT == BF16
    const u32 operand[4] = {a.x, a.y, a.z, a.w};
    mma_bf16(c, operand, b0, b1);
#else
    multiply(c, a.x, a.y, b0);
    multiply(c, a.z, a.w, b1);
#endif
    sum = make_float4(c[0], c[1], c[2], c[3]);
}

// Weights as they multiply backward.
template <int BLOCKS, int PER>
__device__ __forceinline__ void turn_weights(Operand<BLOCKS, PER>& w) {
#pragma unroll
    for (int i = 0; i < w.COUNT; ++i) {
        const Tile v = transpose(w.v[i]);
        w.v[i] = Tile{v.x, v.z, v.y, v.w};
    }
}

__device__ __forceinline__ float4& share(int warp, int tile) {
    return shared<float4>(SCRATCH_AT)[(warp * SHARE_TILES + tile) * 32 + lane_id()];
}
// All warps' shares of a tile, in their order. Behind a __syncthreads.
template <int COUNT>
__device__ __forceinline__ float4 sum_shares(int tile) {
    float4 v[COUNT];
#pragma unroll
    for (int w = 0; w < COUNT; ++w) v[w] = share(w, tile);
#pragma unroll
    for (int w = 1; w < COUNT; ++w) v[0].x += v[w].x, v[0].y += v[w].y, v[0].z += v[w].z, v[0].w += v[w].w;
    return v[0];
}

// Number of a share: row tile of the group, group of eight columns of the block's.
__device__ __forceinline__ int own_tile(int t, int eight) { return t * 2 * COLUMN_BLOCKS + eight; }

// This warp's share of (group rows, features) times the block's columns, for a sum over BLOCKS blocks of features.
template <int BLOCKS>
__device__ __forceinline__ void multiply_rows(
    const Operand<BLOCKS, GROUP_TILES>& a, const Operand<BLOCKS, COLUMN_BLOCKS>& b) {
    if (warp_id() >= BLOCKS) return;
    float4 sum[GROUP_TILES][2 * COLUMN_BLOCKS] = {};
#pragma unroll
    for (int i = 0; i < turns(BLOCKS); ++i)
#pragma unroll
        for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
            for (int n = 0; n < COLUMN_BLOCKS; ++n) {
                const Tile &rows = a.v[i * GROUP_TILES + t], &w = b.v[i * COLUMN_BLOCKS + n];
                multiply(sum[t][2 * n], rows, w.x, w.y);
                multiply(sum[t][2 * n + 1], rows, w.z, w.w);
            }
#pragma unroll
    for (int t = 0; t < GROUP_TILES; ++t)
#pragma unroll
        for (int n = 0; n < 2 * COLUMN_BLOCKS; ++n) share(warp_id(), own_tile(t, n)) = sum[t][n];
}

// Rows of a lane's sums of row tile `tile`: row and row + 8; columns: column and column + 1.
__device__ __forceinline__ int row_of(int tile) { return 16 * tile + (lane_id() >> 2); }
__device__ __forceinline__ int column() { return 2 * (lane_id() & 3); }

// Error I of a row tile and a group of eight columns, as gradients of weights and of biases want it.
template <int I>
__device__ __forceinline__ void store_error(u8* exchange, int step, int group, int tile, const float4& v, const Pair& upper, const Pair& lower) {
    u8* turned = exchange + FIXED(error_turned_at(I)) + (step & 1) * MATRIX_BYTES<I>;
#if RESIDENT_RANKS > 1
    const u32 upper_turned = transpose(upper), lower_turned = transpose(lower);
    store_half(turned, group, tile, upper_turned, lower_turned);
    send_half(step, FIXED(sent_error_at(I)), group, tile, upper_turned, lower_turned);
#else
    store_half(turned, group, tile, transpose(upper), transpose(lower));
#endif
    float2 sum = make_float2(v.x + v.z, v.y + v.w);
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) {
        sum.x += __shfl_xor_sync(~0u, sum.x, mask);
        sum.y += __shfl_xor_sync(~0u, sum.y, mask);
    }
    float* sums = (float*)(exchange + FIXED(sums_at(I)) + (step & 1) * FIXED(sums_bytes(I)));
    if (lane_id() < 4) __stcg((float2*)(sums + tile * (16 * DEPTH<I>) + 8 * group + column()), sum);
#if RESIDENT_RANKS > 1
    if (lane_id() < 4)
        send(step, FIXED(sent_sums_at(I)) + 4 * (tile * (16 * DEPTH<I>) + 8 * group + column()), written_word(sum.x), written_word(sum.y));
#endif
}

}  // namespace resident
