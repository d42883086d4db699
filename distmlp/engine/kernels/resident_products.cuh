// Products of the resident kernel: operands as they are exchanged, sums over the warps of a block.
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "resident_shape.cuh"

extern __shared__ __align__(1024) u8 dynamic_shared[];

namespace resident {

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
template <class T>
__device__ __forceinline__ T* shared(int at) {
    return (T*)(dynamic_shared + at);
}

// The lanes' pairs are an 8 x 8 matrix of bf16, row lane / 4; it comes back transposed.
__device__ __forceinline__ u32 transpose(u32 pairs) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pairs));
    return other;
}
__device__ __forceinline__ uint4 transpose(uint4 v) {
    return make_uint4(transpose(v.x), transpose(v.y), transpose(v.z), transpose(v.w));
}
__device__ __forceinline__ void multiply(float4& sum, const uint4& a, u32 b0, u32 b1) {
    const u32 operand[4] = {a.x, a.y, a.z, a.w};
    float c[4] = {sum.x, sum.y, sum.z, sum.w};
    mma_bf16(c, operand, b0, b1);
    sum = make_float4(c[0], c[1], c[2], c[3]);
}

// A warp's tiles of a matrix of BLOCKS blocks of features: blocks warp, warp + WARPS, …; row tiles from `tile` on.
template <int BLOCKS>
struct Operands {
    uint4 v[turns(BLOCKS)][CHUNK];

    __device__ __forceinline__ void load(const u8* matrix, int tile) {
#pragma unroll
        for (int i = 0; i < turns(BLOCKS); ++i) {
            const int block = warp_id() + i * WARPS;
#pragma unroll
            for (int t = 0; t < CHUNK; ++t)
                v[i][t] = block < BLOCKS ? __ldcg((const uint4*)matrix + (block * TILES + tile + t) * 32 + lane_id())
                                         : make_uint4(0, 0, 0, 0);
        }
    }
};

__device__ __forceinline__ float4& share(int warp, int tile) {  // `tile` counts row tiles and output tiles
    return shared<float4>(SHARES_AT)[(warp * TILES * OUTPUT_TILES + tile) * 32 + lane_id()];
}
// All warps' shares of a tile, in their order. Behind a __syncthreads.
template <int COUNT>
__device__ __forceinline__ float4 sum_shares(int tile) {
    float4 sum = share(0, tile);
#pragma unroll
    for (int w = 1; w < COUNT; ++w) {
        const float4 v = share(w, tile);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
}

// This warp's share of (rows, features) times eight columns, whose operand is `b`.
template <int BLOCKS>
__device__ __forceinline__ void multiply_rows(const u8* matrix, const u32 (&b)[turns(BLOCKS)][2]) {
    if (warp_id() >= BLOCKS) return;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += CHUNK) {
        Operands<BLOCKS> a;
        a.load(matrix, tile);
#pragma unroll
        for (int t = 0; t < CHUNK; ++t) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < turns(BLOCKS); ++i) multiply(sum, a.v[i][t], b[i][0], b[i][1]);
            share(warp_id(), tile + t) = sum;
        }
    }
}

// Half a tile (rows, eight features) to its place in an exchanged matrix: group `group` of eight features.
__device__ __forceinline__ void store_half(u8* matrix, int group, int tile, u32 upper, u32 lower) {
    __stcg((uint2*)matrix + (((group >> 1) * TILES + tile) * 32 + lane_id()) * 2 + (group & 1), make_uint2(upper, lower));
}

// Rows of a lane's sums of tile `tile`: row and row + 8; columns: column and column + 1.
__device__ __forceinline__ int row_of(int tile) { return 16 * tile + (lane_id() >> 2); }
__device__ __forceinline__ int column() { return 2 * (lane_id() & 3); }

// The block's error of hidden layer L, as the weight gradient and the bias gradient want it.
template <int L>
__device__ __forceinline__ void keep_delta(int tile, const float4& v, u32 upper, u32 lower) {
    u32* delta = shared<u32>(DELTA_AT) + (L * TILES + tile) * 64 + lane_id();
    delta[0] = transpose(upper);
    delta[32] = transpose(lower);
    float2 sum = make_float2(v.x + v.z, v.y + v.w);
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) {
        sum.x += __shfl_xor_sync(~0u, sum.x, mask);
        sum.y += __shfl_xor_sync(~0u, sum.y, mask);
    }
    if (lane_id() < 4) *(float2*)(shared<float>(SUMS_AT) + (L * TILES + tile) * 8 + column()) = sum;
}

// Operand of the forward product from the block's own weights of layer L.
template <int L>
__device__ __forceinline__ void load_weights(u32 (&b)[turns(depth(L))][2]) {
#pragma unroll
    for (int i = 0; i < turns(depth(L)); ++i) {
        const int block = warp_id() + i * WARPS;
        if (block >= depth(L)) break;
        const float4 w = shared<float4>(FIXED(state_at(L)))[block * STATES * 32 + lane_id()];
        b[i][0] = pack_pair(w.x, w.y);
        b[i][1] = pack_pair(w.z, w.w);
    }
}
// Operand of the backward product of layer L into the block's group of inputs.
template <int L>
__device__ __forceinline__ void load_backward_weights(const u8* exchange, int turn, u32 (&b)[turns(depth(L + 1))][2]) {
    const u32* from = (const u32*)(exchange + FIXED(backward_at(L, 0)) + turn * FIXED(backward_bytes(L))) +
                      blockIdx.x * (2 * depth(L + 1) * 32) + lane_id();
#pragma unroll
    for (int i = 0; i < turns(depth(L + 1)); ++i) {
        const int block = warp_id() + i * WARPS;
        const bool there = block < depth(L + 1) && blockIdx.x < groups(L);
        b[i][0] = there ? __ldcg(from + 2 * block * 32) : 0u;
        b[i][1] = there ? __ldcg(from + (2 * block + 1) * 32) : 0u;
    }
}

}  // namespace resident
