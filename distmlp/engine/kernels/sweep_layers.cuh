// The sweeps of a block over its rows, layer by layer: forward, gradients of weights, errors.
//
// A tile of 64 rows lies in shared memory column block by column block: (columns, 64 rows, 16 bytes). Its place holds
// the input of the layer at hand on the way up and the errors of its output on the way down. What is met again on the
// way down lies as the same image in device memory, mostly still in L2: inputs of layers for the weight gradients,
// slopes (or what they are told from) for the errors.
#pragma once
#include "narrow_exchange.cuh"
#include "narrow_gates.cuh"

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
constexpr int SIGN_WORDS = 2;  // of a thread and a tile, for up to 128 columns
constexpr int GROUP_BARRIER = 1;  // the first warpgroup's, see sync_some
static_assert(TILES <= 2 * GROUPS, "a warpgroup has two tiles at most");
constexpr int COLUMN_BYTES = 64 * 16;  // a column block of a tile
constexpr int SLOT_BYTES = most_columns() * COLUMN_BYTES;
constexpr int STAGES = 3, STAGE_BYTES = SLOT_BYTES + COLUMN_BYTES;  // with the column of ones
constexpr int WEIGHTS_AT = TILES * SLOT_BYTES;
constexpr int STAGES_AT = WEIGHTS_AT + most_weight_bytes();
constexpr int SCRATCH_AT = STAGES_AT;  // of the exchange, when the stages are not in use
constexpr int STAGES_BYTES = larger(STAGES * STAGE_BYTES, larger(most_weight_bytes(), EXCHANGE_BYTES));
constexpr int BIASES_AT = STAGES_AT + STAGES_BYTES;
// Errors of the outputs wait in the stages where they fit, beside weights that may lie there and a column of ones; the
// input of the last layer then stays in its place, and need not be kept in device memory.
constexpr int TOP = LAYERS - 1;
constexpr int ONES_AT = STAGES_AT + (TOP & 1 ? weight_bytes(TOP) : 0);
constexpr int OUTPUT_ERRORS_AT = ONES_AT + COLUMN_BYTES;
constexpr int ROWS_READ_BEYOND = 8 * COLUMN_BYTES;  // an operand has 64 columns
constexpr bool TOP_STAYS =
    LAYERS > 1 && OUTPUT_ERRORS_AT + TILES * columns(LAYERS) * COLUMN_BYTES + ROWS_READ_BEYOND <= BIASES_AT;
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

// Bulk copies: no thread waits for them but at the barrier that counts their bytes, and no fence either.
__device__ __forceinline__ void init_arrivals(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u64* barrier) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void wait_arrivals(u64* barrier, u32 parity) {
    u32 done;
    do asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    while (!done);
}
// The other way; `read`: all but the last LEFT have left shared memory, `done`: all are in device memory. By one thread.
__device__ __forceinline__ void keep_bulk(void* to, u32 from, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes)
        : "memory");
}
template <int LEFT>
__device__ __forceinline__ void await_bulk_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void await_bulk_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What was written to device memory becomes visible to bulk copies (of threads behind a barrier, too).
__device__ __forceinline__ void publish_kept() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void copy_block(u32 to, const u8* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += BLOCK_THREADS * 16) copy16(to + i, from + i);
}

struct Sweep {
    u32 shared;
    u8* kept;         // (2, LAYERS, TILES, SLOT_BYTES) of this block: inputs of layers, slopes
    const u8* image;  // weights and biases
    int group, warp, lane;  // warp of its warpgroup
    int tiles;              // of this step
    u64* arrivals;          // (STAGES,) of tiles in the stages
    u32 staged;             // tiles that went through the stages before this layer

    __device__ __forceinline__ u8* kept_at(int what, int layer, int tile) const {
        return kept + (((i64)what * LAYERS + layer) * TILES + tile) * SLOT_BYTES;
    }
    __device__ __forceinline__ u32 slot(int tile) const { return shared + tile * SLOT_BYTES; }
    __device__ __forceinline__ u32 top_errors(int tile) const {
        return TOP_STAYS ? shared + OUTPUT_ERRORS_AT + tile * FIXED(columns(LAYERS) * COLUMN_BYTES) : slot(tile);
    }
    // Errors of layer L's output, and its inputs, on the way down.
    template <int L>
    __device__ __forceinline__ u32 errors_at(int tile) const { return L == TOP ? top_errors(tile) : slot(tile); }
    template <int L>
    __device__ __forceinline__ u32 inputs_at(int tile) const {
        return stays<L>() ? slot(tile) : stage_at(tile);
    }
    template <int L>
    static __device__ __forceinline__ constexpr bool stays() { return TOP_STAYS && L == TOP; }
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

    // What the slope of ReLU is told from, a bit for every output of the thread: of a tile in shared memory.
    template <int COLUMNS>
    __device__ __forceinline__ void read_signs(u32 tile, u32 (&bits)[SIGN_WORDS]) const {
#pragma unroll
        for (int i = 0; i < SIGN_WORDS; ++i) bits[i] = 0;
#pragma unroll
        for (int k = 0; k < COLUMNS / 2; ++k) {
            u32 a[4];
            load_blocks4<false>(a, fragment(tile) + k * 2 * COLUMN_BYTES);
#pragma unroll
            for (int i = 0; i < 4; ++i) bits[k >> 2] |= positive(a[i]) & 0x00010001u << (4 * (k & 3) + i);
        }
    }
    template <int COLUMNS>
    __device__ __forceinline__ void gate(u32 (&pairs)[2 * COLUMNS], const u32 (&bits)[SIGN_WORDS]) const {
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) pairs[i] &= spread_top_bits(bits[i >> 4] << (15 - (i & 15)));
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
        const Operand<COLUMN_BYTES, 128, false> a(slot(tile));
        const Operand<columns(L + 1) * BLOCK_BYTES, BLOCK_BYTES, true> w(weights_at(L));
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

    __device__ __forceinline__ bool first_of_group() const { return (threadIdx.x & 127) == 0; }
    __device__ __forceinline__ void sync_group() const { sync_some(GROUP_BARRIER + group, 128); }
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
                if (stores_slope(KIND)) keep<OUT>(kept_at(1, L + 1, tile), slope);
            } else {
                output(z, tile, next);
            }
            // The tile that was kept from this place has left; the warpgroup's other one, kept later, may not.
            if (first_of_group()) {
                if (group + GROUPS < tiles) await_bulk_read<1>();
                else await_bulk_read<0>();
            }
            sync_group();
            put<OUT>(L == TOP ? top_errors(tile) : slot(tile), next);
            if constexpr (L + 1 < (TOP_STAYS ? TOP : LAYERS)) {
                publish_operands();
                sync_group();
                if (first_of_group())
                    keep_bulk(kept_at(0, L + 1, tile), slot(tile), FIXED(columns(L + 1) * COLUMN_BYTES));
            }
        }
        if constexpr (L + 1 < LAYERS) forward<L + 1>(output);
    }

    __device__ __forceinline__ u32 stage(int tile) const { return (staged + tile) % STAGES; }
    __device__ __forceinline__ u32 stage_at(int tile) const { return shared + STAGES_AT + stage(tile) * STAGE_BYTES; }
    template <int L>
    __device__ __forceinline__ void ask_tile(int tile) const {
        if (!stays<L>() && threadIdx.x == 0 && tile < tiles)
            copy_bulk(stage_at(tile), kept_at(0, L, tile), FIXED(columns(L) * COLUMN_BYTES), arrivals + stage(tile));
    }

    // Between two tiles of a layer's way down: inputs of `tile` are there for all, all are done with the tile before.
    // Whoever wrote operands since has published them.
    template <int L>
    __device__ __forceinline__ void beat(int tile) const {
        if (tile == 0) wait_copies<0>();  // weights
        if (!stays<L>() && tile < tiles) wait_arrivals(arrivals + stage(tile), (staged + tile) / STAGES & 1);
        if (tile == 0) publish_operands();
        __syncthreads();
        if (tile < tiles) ask_tile<L>(tile + 2);
    }

    // Weight gradient of layer L: 64 outputs by the inputs and one.
    template <int L, int BLOCK>
    __device__ __forceinline__ void gradient(bool works, float* partial, Limit& limit) const {
        constexpr int COLUMNS = columns(L), ROWS = width(L + 1);
        float sums[4 * COLUMNS + 4];
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS + 4; ++i) sums[i] = 0.f;
        for (int tile = 0; tile < tiles; ++tile) {
            beat<L>(tile);
            const Operand<128, COLUMN_BYTES, true> dz(errors_at<L>(tile), BLOCK * 8 * COLUMN_BYTES);
            const Operand<128, COLUMN_BYTES, true> a(inputs_at<L>(tile));
            settle(sums);
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if constexpr (stays<L>()) {
                    const Operand<128, COLUMN_BYTES, true> one(shared, ONES_AT);
                    product<COLUMNS>(sums, dz.step(k), a.step(k));
                    product<1>(sums + 4 * COLUMNS, dz.step(k), one.step(k));
                } else {
                    product<COLUMNS + 1>(sums, dz.step(k), a.step(k));
                }
            }
            commit_products();
            wait_products();
            settle(sums);
        }
        beat<L>(tiles);
        if (!works) return;
        const int row = 64 * BLOCK + 16 * warp + (lane >> 2);
        const bool first = row < ROWS, second = row + 8 < ROWS;
        float4* out = (float4*)partial + chunk_of(L, BLOCK) * 32 + warp * 32 + lane;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float* x = sums + 4 * j;
            if (first) limit.pass(x[0]), limit.pass(x[1]);
            if (second) limit.pass(x[2]), limit.pass(x[3]);
            out[j * CHUNK] = make_float4(x[0], x[1], x[2], x[3]);
        }
        const float* ones = sums + 4 * COLUMNS;
        float* bias = partial + FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(L));
        if ((lane & 3) == 0 && first) bias[row] = limit.pass(ones[0]);
        if ((lane & 3) == 0 && second) bias[row + 8] = limit.pass(ones[2]);
    }
    static __device__ __forceinline__ constexpr int chunk_of(int layer, int block) {
        for (int i = 0; i < ITEM_COUNT; ++i)
            if (item(i).layer == layer && item(i).block == block) return item_chunk(i);
        return 0;
    }

    // Errors of layer L's input over those of its output, by two warpgroups in turn: the products of a tile run until
    // the next beat, when its weight gradient is done, too, and its place may be written.
    template <int L>
    __device__ __forceinline__ void errors(int turn) const {
        if constexpr (L > 0) {
            constexpr int IN = columns(L), KIND = activation(L - 1);
            if (turn == 1) beat<L>(0);
            int tile = turn;
            for (; tile < tiles; tile += 2) {
                float d[4 * IN];
#pragma unroll
                for (int i = 0; i < 4 * IN; ++i) d[i] = 0.f;
                beat<L>(tile);
                const Operand<COLUMN_BYTES, 128, false> dz(errors_at<L>(tile));
                const Operand<BLOCK_BYTES, columns(L + 1) * BLOCK_BYTES, false> w(shared, WEIGHTS_AT);
                settle(d);
                begin_products();
#pragma unroll
                for (int k = 0; k < FIXED(columns(L + 1) / 2); ++k) product<IN>(d, dz.step(k), w.step(k));
                commit_products();
                u32 signs[SIGN_WORDS];
                if constexpr (KIND == RELU) read_signs<IN>(inputs_at<L>(tile), signs);
                beat<L>(tile + 1);
                u32 next[2 * IN];
                if constexpr (KIND == RELU) {
                    wait_products();
                    settle(d);
#pragma unroll
                    for (int i = 0; i < 2 * IN; ++i) next[i] = pack_pair(d[2 * i], d[2 * i + 1]);
                    gate<IN>(next, signs);
                } else {
                    u8* from = kept_at(stores_slope(KIND) ? 1 : 0, L, tile);
                    u32 known[2 * IN];
#pragma unroll
                    for (int i = 0; i < 2 * IN; ++i) known[i] = __ldcg(word(from, i));
                    wait_products();
                    settle(d);
#pragma unroll
                    for (int i = 0; i < 2 * IN; ++i)
                        next[i] = backward_pair<KIND>(d[2 * i], d[2 * i + 1], known[i]);
                }
                put<IN>(slot(tile), next);
                publish_operands();
            }
            if (tile == tiles) beat<L>(tiles);
        } else {
            for (int tile = 0; tile <= tiles; ++tile) beat<L>(tile);
        }
    }

    // Weight gradient and errors of layer L side by side, and on to the first.
    template <int L>
    __device__ __forceinline__ void backward(float* partial, Limit& limit) {
        constexpr int BLOCKS = (padded(L + 1) + 63) / 64;
        if constexpr (L == LAYERS - 1) {
            if (first_of_group()) await_bulk_done();
            publish_kept();
        }
        __syncthreads();  // weights and stages are free
        if constexpr (L > 0) ask_weights<L>(shared + WEIGHTS_AT);
        ask_tile<L>(0);
        ask_tile<L>(1);
        for (int i = threadIdx.x; i < (stays<L>() ? 1 : STAGES) * 64; i += BLOCK_THREADS) {
            const int at = stays<L>() ? ONES_AT : STAGES_AT + i / 64 * STAGE_BYTES + FIXED(columns(L)) * COLUMN_BYTES;
            *(uint4*)(dynamic_shared + at + i % 64 * 16) = make_uint4(0x3f80u, 0u, 0u, 0u);
        }
        // Every branch meets the others at the same beats; with one block of rows two warpgroups do the same.
        if (group == 0) gradient<L, 0>(true, partial, limit);
        else if (group == 1) gradient<L, BLOCKS - 1>(BLOCKS > 1, partial, limit);
        else errors<L>(group - 2);
        if (!stays<L>()) staged += tiles;
        if constexpr (L > 0) backward<L - 1>(partial, limit);
    }
};

}  // namespace narrow
