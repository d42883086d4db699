// The sweeps of a block over its rows, layer by layer: forward, gradients of weights, errors.
//
// A tile of 64 rows lies in shared memory column block by column block: (columns, 64 rows, 16 bytes). Its place holds
// the input of the layer at hand on the way up and the errors of its output on the way down. What is met again on the
// way down lies as the same image in device memory, mostly still in L2: inputs of layers for the weight gradients,
// slopes (or what they are told from) for the errors.
#pragma once
#include "narrow_exchange.cuh"

namespace narrow {

constexpr int TILES = SWEEP_TILES;  // that a block holds at most
SHAPE_FN int larger(int a, int b) { return a > b ? a : b; }
SHAPE_FN int most_columns() {
    int most = 0;
    for (int i = 0; i <= LAYERS; ++i) most = larger(columns(i), most);
    return most;
}
SHAPE_FN int most_weight_bytes() {
    int most = 0;
    for (int i = 0; i < LAYERS; ++i) most = larger(weight_bytes(i), most);
    return most;
}
constexpr int COLUMN_BYTES = 64 * 16;  // a column block of a tile
constexpr int SLOT_BYTES = most_columns() * COLUMN_BYTES;
constexpr int STAGES = 3, STAGE_BYTES = SLOT_BYTES + COLUMN_BYTES;  // with the column of ones
constexpr int WEIGHTS_AT = TILES * SLOT_BYTES;
constexpr int STAGES_AT = WEIGHTS_AT + most_weight_bytes();
constexpr int SCRATCH_AT = STAGES_AT;  // of the exchange, when the stages are not in use
constexpr int STAGES_BYTES = larger(STAGES * STAGE_BYTES, larger(most_weight_bytes(), EXCHANGE_BYTES));
constexpr int BIASES_AT = STAGES_AT + STAGES_BYTES;
constexpr int SWEEP_SCALES_AT = BIASES_AT + IMAGE_BYTES - bias_at(0);
constexpr int SWEEP_BYTES = SWEEP_SCALES_AT + 3 * SCALES * 4;

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void copy_block(u32 to, const u8* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += BLOCK_THREADS * 16) copy16(to + i, from + i);
}

struct Sweep {
    u32 shared;
    u8* kept;         // (2, LAYERS, TILES, SLOT_BYTES) of this block: inputs of layers, slopes
    const u8* image;  // weights and biases
    int group, warp, lane;  // warp of its warpgroup
    int tiles;              // of this step

    __device__ __forceinline__ u8* kept_at(int what, int layer, int tile) const {
        return kept + (((i64)what * LAYERS + layer) * TILES + tile) * SLOT_BYTES;
    }
    __device__ __forceinline__ u32 slot(int tile) const { return shared + tile * SLOT_BYTES; }
    __device__ __forceinline__ u32 fragment(u32 tile) const {
        return tile + (2 * warp + (lane >> 3 & 1)) * 128 + (lane >> 4) * COLUMN_BYTES + (lane & 7) * 16;
    }
    // Of register 2 j + half in an image in device memory.
    __device__ __forceinline__ u32* word(u8* image_, int i) const {
        return (u32*)(image_ + (i >> 1) * COLUMN_BYTES + (16 * warp + (lane >> 2) + 8 * (i & 1)) * 16 + (lane & 3) * 4);
    }
    template <int COLUMNS>
    __device__ __forceinline__ void put(u32 tile, const u32 (&a)[2 * COLUMNS]) const {
#pragma unroll
        for (int k = 0; k < COLUMNS / 2; ++k)
            store_blocks4(
                fragment(tile) + k * 2 * COLUMN_BYTES, {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]}, 0);
    }
    template <int COLUMNS>
    __device__ __forceinline__ void keep(u8* where, const u32 (&a)[2 * COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) __stcg(word(where, i), a[i]);
    }

    // All copies of a thread under way are there, for the products of every thread.
    __device__ __forceinline__ void meet() const {
        wait_copies<0>();
        publish_operands();
        __syncthreads();
    }
    __device__ __forceinline__ u32 weights_at(int layer) const { return shared + (layer & 1 ? STAGES_AT : WEIGHTS_AT); }
    template <int L>
    __device__ __forceinline__ void ask_weights(u32 to) const {
        copy_block(to, image + FIXED(weight_at(L)), FIXED(weight_bytes(L)));
        commit_copies();
    }

    template <int L>
    __device__ __forceinline__ void multiply(float (&z)[4 * columns(L + 1)], int tile) const {
        const Operand<COLUMN_BYTES, 128, false> a{slot(tile)};
        const Operand<columns(L + 1) * BLOCK_BYTES, BLOCK_BYTES, true> w{weights_at(L)};
#pragma unroll
        for (int i = 0; i < FIXED(4 * columns(L + 1)); ++i) z[i] = 0.f;
        settle(z);
        begin_products();
#pragma unroll
        for (int k = 0; k < FIXED(columns(L) / 2); ++k) product<columns(L + 1)>(z, a.step(k), w.step(k));
        commit_products();
        wait_products();
        settle(z);
        const float* bias = (const float*)(dynamic_shared + BIASES_AT + FIXED(bias_at(L) - bias_at(0)));
#pragma unroll
        for (int j = 0; j < FIXED(columns(L + 1)); ++j) {
            const float2 b = *(const float2*)(bias + 8 * j + 2 * (lane & 3));
            z[4 * j] += b.x, z[4 * j + 1] += b.y, z[4 * j + 2] += b.x, z[4 * j + 3] += b.y;
        }
    }

    template <int L, class Output>
    __device__ __forceinline__ void forward(const Output& output) {
        meet();
        if constexpr (L + 1 < LAYERS) ask_weights<L + 1>(weights_at(L + 1));
        constexpr int OUT = columns(L + 1), KIND = activation(L);
        for (int tile = group; tile < tiles; tile += GROUPS) {
            float z[4 * OUT];
            multiply<L>(z, tile);
            u32 next[2 * OUT];
            if constexpr (L + 1 < LAYERS) {
                u32 slope[2 * OUT];
#pragma unroll
                for (int i = 0; i < 2 * OUT; ++i) {
                    if (KIND == RELU)
                        next[i] = pack_relu(z[2 * i], z[2 * i + 1]);
                    else
                        next[i] = activate_pair<KIND>(z[2 * i], z[2 * i + 1], slope[i]);
                }
                keep<OUT>(kept_at(0, L + 1, tile), next);
                if (stores_slope(KIND)) keep<OUT>(kept_at(1, L + 1, tile), slope);
            } else {
                output(z, tile, next);
            }
            put<OUT>(slot(tile), next);
        }
        if constexpr (L + 1 < LAYERS) forward<L + 1>(output);
    }

    template <int L>
    __device__ __forceinline__ void ask_tile(int tile) const {
        if (tile < tiles)
            copy_block(shared + STAGES_AT + tile % STAGES * STAGE_BYTES, kept_at(0, L, tile), FIXED(columns(L)) * COLUMN_BYTES);
        commit_copies();
    }

    // Weight gradient of layer L: warpgroups share rows (outputs, 64 each) and columns (inputs and one, halves).
    template <int L, int BLOCK, int FIRST, int COUNT>
    __device__ __forceinline__ void gradient_part(bool works, float* partial, Limit& limit) const {
        constexpr int SOME = COUNT;
        float sums[4 * SOME];
#pragma unroll
        for (int i = 0; i < 4 * SOME; ++i) sums[i] = 0.f;
        for (int tile = 0; tile < tiles; ++tile) {
            wait_copies<1>();
            publish_operands();
            __syncthreads();
            ask_tile<L>(tile + 2);
            const Operand<128, COLUMN_BYTES, true> dz{slot(tile) + BLOCK * 8 * COLUMN_BYTES};
            const Operand<128, COLUMN_BYTES, true> a{
                shared + STAGES_AT + tile % STAGES * STAGE_BYTES + FIRST * COLUMN_BYTES};
            settle(sums);
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) product<SOME>(sums, dz.step(k), a.step(k));
            commit_products();
            wait_products();
            settle(sums);
        }
        if (!works) return;
        constexpr int ROWS = width(L + 1);
        const int row = 64 * BLOCK + 16 * warp + (lane >> 2);
        const bool first = row < ROWS, second = row + 8 < ROWS;
        float4* out = (float4*)partial + chunk_of(L, BLOCK) * 32 + warp * 32 + lane;
#pragma unroll
        for (int j = 0; j < SOME; ++j) {
            const float* x = sums + 4 * j;
            if (FIRST + j < FIXED(columns(L))) {
                if (first) limit.pass(x[0]), limit.pass(x[1]);
                if (second) limit.pass(x[2]), limit.pass(x[3]);
                out[(FIRST + j) * CHUNK] = make_float4(x[0], x[1], x[2], x[3]);
            } else {
                float* bias = partial + FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(L));
                if ((lane & 3) == 0 && first) bias[row] = limit.pass(x[0]);
                if ((lane & 3) == 0 && second) bias[row + 8] = limit.pass(x[2]);
            }
        }
    }
    static __device__ __forceinline__ constexpr int chunk_of(int layer, int block) {
        for (int i = 0; i < ITEM_COUNT; ++i)
            if (item(i).layer == layer && item(i).block == block) return item_chunk(i);
        return 0;
    }

    template <int L>
    __device__ __forceinline__ void gradient(float* partial, Limit& limit) const {
        constexpr int ALL = columns(L) + 1, HALF = (ALL + 1) / 2, BLOCKS = (padded(L + 1) + 63) / 64;
        ask_tile<L>(0);
        ask_tile<L>(1);
        for (int i = threadIdx.x; i < STAGES * 64; i += BLOCK_THREADS)
            *(uint4*)(dynamic_shared + STAGES_AT + i / 64 * STAGE_BYTES + FIXED(columns(L)) * COLUMN_BYTES + i % 64 * 16) =
                make_uint4(0x3f80u, 0u, 0u, 0u);
        // Every branch meets the others at the same barriers; with one block of rows two warpgroups repeat its work.
        if (group == 0) gradient_part<L, 0, 0, HALF>(true, partial, limit);
        else if (group == 1) gradient_part<L, 0, HALF, ALL - HALF>(true, partial, limit);
        else if (group == 2) gradient_part<L, BLOCKS - 1, 0, HALF>(BLOCKS > 1, partial, limit);
        else gradient_part<L, BLOCKS - 1, HALF, ALL - HALF>(BLOCKS > 1, partial, limit);
    }

    // Errors of layer L's input, over those of its output.
    template <int L>
    __device__ __forceinline__ void errors() const {
        constexpr int IN = columns(L), KIND = activation(L - 1);
        for (int tile = group; tile < tiles; tile += GROUPS) {
            float d[4 * IN];
#pragma unroll
            for (int i = 0; i < 4 * IN; ++i) d[i] = 0.f;
            const Operand<COLUMN_BYTES, 128, false> dz{slot(tile)};
            const Operand<BLOCK_BYTES, columns(L + 1) * BLOCK_BYTES, false> w{shared + WEIGHTS_AT};
            settle(d);
            begin_products();
#pragma unroll
            for (int k = 0; k < FIXED(columns(L + 1) / 2); ++k) product<IN>(d, dz.step(k), w.step(k));
            commit_products();
            u8* from = kept_at(stores_slope(KIND) ? 1 : 0, L, tile);
            u32 known[2 * IN];
#pragma unroll
            for (int i = 0; i < 2 * IN; ++i) known[i] = __ldcg(word(from, i));
            wait_products();
            settle(d);
#pragma unroll
            for (int i = 0; i < 2 * IN; ++i) known[i] = backward_pair<KIND>(d[2 * i], d[2 * i + 1], known[i]);
            put<IN>(slot(tile), known);
        }
    }

    template <int L>
    __device__ __forceinline__ void backward(float* partial, Limit& limit) const {
        __syncthreads();  // weights and stages are free
        if constexpr (L > 0) ask_weights<L>(shared + WEIGHTS_AT);
        gradient<L>(partial, limit);
        if constexpr (L > 0) {
            meet();
            errors<L>();
            publish_operands();
            backward<L - 1>(partial, limit);
        }
    }
};

}  // namespace narrow
