// Forward and backward tiles of the bulk kernel: what becomes of the products.
#pragma once
#include "bulk_store.cuh"
#include "losses.cuh"

// What the tiles of a step share.
struct StepView {
    const Raw& raw;
    const StepInfo& info;
    double* const& losses;  // parts of the loss, one a warp of an output tile

    __device__ __forceinline__ float weight(i64 raw_row) const { return raw.weights ? raw.weights[raw_row] : 1.f; }
};

// Largest magnitudes of what the tiles of a step hold, by warps of a block: outputs, errors, losses. See `Flags`.
__shared__ u32 near_largest[2 * MAX_BULK_LAYERS + 1];
__device__ __forceinline__ void tell_largest(int which, u32 bits) {
    bits = __reduce_max_sync(~0u, bits);
    if ((thread_anew() & 31) == 0) atomicMax(near_largest + which, bits);
}
__device__ __forceinline__ void clear_largest() {
    if (threadIdx.x < 2 * MAX_BULK_LAYERS + 1) near_largest[threadIdx.x] = 0;
}
// To those of all blocks, by those that multiply.
__device__ __forceinline__ void tell_all_largest(Flags& flags) {
    sync_consumers();
    const int i = threadIdx.x;
    if (i > 2 * MAX_BULK_LAYERS || !near_largest[i]) return;
    atomicMax(i < MAX_BULK_LAYERS       ? &flags.output[i + 1]
              : i < 2 * MAX_BULK_LAYERS ? &flags.error[i - MAX_BULK_LAYERS]
                                        : &flags.loss,
              near_largest[i]);
    near_largest[i] = 0;
}

// Asks for the biases of a tile, for a warp's share of shared memory. Tensors are padded to whole 128 bytes, so fours may be read
// as one.
__device__ __forceinline__ void ask_for_biases(u32 to, const Layer& layer, int n0) {
    const float* bias = ENGINE.parameters + layer.bias_offset;
    for (int i = thread_anew() & 31; i < BULK_N / 4; i += 32) {
        const int column = n0 + i * 4;
        const bool exists = column < layer.fan_out;
        copy_chunk_or_zeros(to + i * 16, bias + (exists ? column : 0), exists);
    }
}
__device__ __forceinline__ void add_biases(float (&c)[WIDEST / 2], u32 from) {
    await_chunks();
    __syncwarp();
    from += (thread_anew() & 3) * 8;
#pragma unroll
    for (int j = 0; j < BULK_N / 8; ++j) {
        const float2 pair = load_shared_pair(from + j * 32);
        c[j * 4] += pair.x, c[j * 4 + 2] += pair.x;
        c[j * 4 + 1] += pair.y, c[j * 4 + 3] += pair.y;
    }
    __syncwarp();
}

// Signs of the outputs of a tile, as the threads have them: one bit each, set where the output is positive.
__device__ __forceinline__ u32* signs_of_tile(int l, const Tile& tile) {
    const int m0 = tile.m0(), n0 = tile.n0();
    const int across = (LAYER(l).fan_out + BULK_N - 1) / BULK_N;
    return near_matrices[l].signs + (m0 / TILE_M * across + n0 / BULK_N) * (i64)(SIGN_WORDS * CONSUMERS) + thread_anew();
}

// Asks for the warp's part of them, to be read at `staging` when the products are done.
__device__ __forceinline__ void ask_for_signs(u32 staging, int l, const Tile& tile) {
    const int lane = thread_anew() & 31;
    const u32* from = signs_of_tile(l, tile) - lane;
    for (int i = lane; i < SIGN_WORDS * 8; i += 32)
        copy_chunk(staging + i * 16, from + (i >> 3) * CONSUMERS + (i & 7) * 4);
}
__device__ __forceinline__ void read_signs(u32 staging, u32 (&signs)[SIGN_WORDS]) {
    await_chunks();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SIGN_WORDS; ++i) signs[i] = load_shared(staging + i * 128 + (thread_anew() & 31) * 4);
    __syncwarp();
}

// Columns beyond the layer meet weights that are zero, rows beyond the batch become zero.
__device__ __forceinline__ void hidden_outputs(
    const float (&c)[WIDEST / 2], Writer& writer, const StepView& step, const Tile& tile) {
    const int l = tile.phase(), m0 = tile.m0(), n0 = tile.n0();
    const Matrices& to = near_matrices[l];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(LAYER(l)), row0 = m0 + at.warp * 16;
    const u32 masks[2] = {at.mask(0), at.mask(1)};
    Largest largest;
    const int columns = padded_columns(LAYER(l));
    u32 all_signs[SIGN_WORDS] = {};
    u32 sign = 0;
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        if (n0 + block * COLUMNS >= columns) break;
        Pair packed[PAIRS_OF_BLOCK], slopes[PAIRS_OF_BLOCK];
        const int word = block * PAIRS_OF_BLOCK / 16, bit = block * PAIRS_OF_BLOCK % 16;
        if (bit == 0) sign = 0;
#pragma unroll
        for (int i = 0; i < PAIRS_OF_BLOCK; ++i) {  // group i / 2, row i % 2
            const float* z = c + (block * PAIRS_OF_BLOCK + i) * 2;
            if (HIDDEN_ACTIVATION == RELU) {
                packed[i] = pack_relu(z[0], z[1]);
            } else {
                float slope_x, slope_y;
                const float x = activate(kind, z[0], slope_x), y = activate(kind, z[1], slope_y);
                packed[i] = pack_pair(x, y);
                slopes[i] = pack_pair(slope_x, slope_y);
            }
            packed[i] = packed[i] & masks[i % 2];
            if (TELLS_BY_SIGN) sign = add_signs(sign, packed[i], bit + i);
            largest.see(packed[i]);
        }
        if (TELLS_BY_SIGN) all_signs[word] = sign;
        const bool last = block + 1 == COLUMN_BLOCKS || n0 + (block + 1) * COLUMNS >= columns;
        put_outputs(writer, packed, to.output, row0, n0 / COLUMNS + block, last, [&] {
            if (!TELLS_BY_SIGN) return;
            u32* signs = signs_of_tile(tile.phase(), tile);
#pragma unroll
            for (int i = 0; i <= word; ++i) __stcg(signs + i * CONSUMERS, all_signs[i]);
        });
        if (stores_slope(kind)) put_outputs(writer, slopes, to.error, row0, n0 / COLUMNS + block, false, [] {});
    }
    tell_largest(tile.phase(), largest.bits());
}

// The layer that a phase of the chain multiplies by.
__device__ __forceinline__ int layer_of(int phase) { return phase < ENGINE.layers ? phase : 2 * ENGINE.layers - 1 - phase; }

// Where a warp's part of the sums of a tile's errors begins.
__device__ __forceinline__ float* sums_of_tile(int l, const Tile& tile) {
    const int rows = tile.m0() / 16 + (thread_anew() >> 5);
    return near_matrices[l].sums + (i64)rows * padded_columns(LAYER(l)) + tile.n0();
}

// Errors of layer l - 1 from the products E_l W_l'. `signs`: of that layer's outputs. Columns beyond the layer are zero,
// their weights are.
__device__ __forceinline__ void hidden_errors(
    const float (&c)[WIDEST / 2], const u32 (&signs)[SIGN_WORDS], Writer& writer, const StepView& step,
    const Tile& tile) {
    const int l = layer_of(tile.phase()), m0 = tile.m0(), n0 = tile.n0();
    const Matrices& to = near_matrices[l - 1];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(LAYER(l - 1)), row0 = m0 + at.warp * 16;
    const u32 masks[2] = {at.mask(0), at.mask(1)};
    StoredSlopes stored = {stores_slope(kind) ? to.error : to.output, row0, n0 / COLUMNS};
    if (!TELLS_BY_SIGN) stored.load(writer, 0);
    const int columns = padded_columns(LAYER(l - 1));
    const ColumnSums sums(sums_of_tile(l - 1, tile));
    Largest largest;
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        if (n0 + block * COLUMNS >= columns) break;
        if (!TELLS_BY_SIGN) {
            stored.take(writer);
            if (block + 1 < COLUMN_BLOCKS) stored.load(writer, block + 1);
        }
        Pair packed[PAIRS_OF_BLOCK];
        const int word = block * PAIRS_OF_BLOCK / 16, bit = block * PAIRS_OF_BLOCK % 16;
#pragma unroll
        for (int four = 0; four < PAIRS_OF_BLOCK / 4; ++four) {
            Pair slopes[4];
            if (!TELLS_BY_SIGN) stored.get(writer, four, slopes);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = four * 4 + k;  // group i / 2, row i % 2
                const float* z = c + (block * PAIRS_OF_BLOCK + i) * 2;
                if (HIDDEN_ACTIVATION == RELU) {
                    packed[i] = keep_positive(pack_pair(z[0], z[1]), signs[word], bit + i);
                } else if (TELLS_BY_SIGN) {
                    packed[i] = pack_pair(
                        z[0] * (signs[word] & 1u << bit + i ? 1.f : LEAKY_SLOPE),
                        z[1] * (signs[word] & 0x10000u << bit + i ? 1.f : LEAKY_SLOPE));
                } else {
                    const float kx = low_of(slopes[k]), ky = high_of(slopes[k]);
                    packed[i] = pack_pair(
                        z[0] * (stores_slope(kind) ? kx : slope_of_output(kind, kx)),
                        z[1] * (stores_slope(kind) ? ky : slope_of_output(kind, ky)));
                }
                if (HIDDEN_ACTIVATION != RELU) packed[i] = packed[i] & masks[i % 2];  // else no output was positive
                largest.see(packed[i]);
            }
        }
        if (!TELLS_BY_SIGN) __syncwarp();
        put_errors(writer, packed, to.error, row0, n0 / COLUMNS + block, sums, block);
    }
    tell_largest(MAX_BULK_LAYERS + layer_of(tile.phase()) - 1, largest.bits());
}

// Softmax cross-entropy of the two rows: logits in `c` become errors; a tile has all classes.
__device__ __forceinline__ float softmax_errors(
    float (&c)[WIDEST / 2], const StepView& step, const Layer& layer, const Fragment& at, int half, i64 raw_row) {
    const int classes = layer.fan_out;
    const float weight = at.inside[half] ? step.weight(raw_row) : 0.f;
    const int label = LABELS && at.inside[half] ? step.raw.labels[raw_row] : 0;
    const float* targets = LABELS ? nullptr : step.raw.targets + raw_row * classes;
    const auto of_quad = [](float x) { return x + __shfl_xor_sync(~0u, x, 1); };
    const auto quad_sum = [&](float x) { x = of_quad(x); return x + __shfl_xor_sync(~0u, x, 2); };
    float largest = -__int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < BULK_N / 4; ++i) {
        const int column = at.column(i / 2) + i % 2;
        if (column < classes) largest = fmaxf(largest, c[i / 2 * 4 + half * 2 + i % 2]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    float total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll
    for (int i = 0; i < BULK_N / 4; ++i) {
        const int column = at.column(i / 2) + i % 2;
        if (column >= classes) continue;
        const float shifted = c[i / 2 * 4 + half * 2 + i % 2] - largest;
        total += expf(shifted);
        const float target = LABELS ? (column == label ? 1.f : 0.f) : at.inside[half] ? targets[column] : 0.f;
        mass += target;
        inner += target != 0.f ? target * shifted : 0.f;
    }
    total = quad_sum(total);
    inner = quad_sum(inner);
    mass = quad_sum(mass);
    if (LABELS && (label < 0 || label >= classes)) mass = __int_as_float(0x7fc00000);
    const float scale = mass / total;
#pragma unroll
    for (int i = 0; i < BULK_N / 4; ++i) {
        const int column = at.column(i / 2) + i % 2;
        float& z = c[i / 2 * 4 + half * 2 + i % 2];
        if (column >= classes) continue;
        const float target = LABELS ? (column == label ? 1.f : 0.f) : at.inside[half] ? targets[column] : 0.f;
        z = weight * (expf(z - largest) * scale - target);
    }
    return at.inside[half] && (at.lane & 3) == 0 ? weight * (mass * logf(total) - inner) : 0.f;
}

// Whether the targets of an output tile come through the ring, 32 rows a stage, as those of the other block of the cluster
// do then: all rows and columns of both tiles exist, and those of a row are whole 16 bytes.
constexpr int TARGET_ROWS = 32, TARGET_PITCH = BULK_N * 4 + 32;  // bytes: so that a quarter warp meets all banks
static_assert(TARGET_ROWS * TARGET_PITCH <= STAGE_BYTES, "targets");
__device__ __forceinline__ bool brings_targets(const StepInfo& info, int m0, int n0) {
    const int outputs = LAYER(ENGINE.layers - 1).fan_out;
    return LOSS != SOFTMAX_CROSS_ENTROPY && (m0 | TILE_M) + TILE_M <= info.rows && n0 + BULK_N <= outputs && outputs % 4 == 0;
}

// What an output tile needs from outside. WHOLE: see brings_targets.
template <bool WHOLE>
struct Outside {
    i64 rows[2];              // raw, of the thread's two
    const float* targets[2];  // of them, at the thread's first column
    u32 near_targets;         // of the first of them, in the ring
    int columns;              // that there are from that one on
    float2 pairs[8];          // else targets of four groups of columns in the two rows

    __device__ __forceinline__ Outside(const StepView& step, const Layer& layer, int m0, int n0) {
        const Fragment at(m0, step.info.rows);
        columns = layer.fan_out - n0 - at.column(0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[half] = WHOLE ? 0 : at.inside[half] ? raw_row(step.raw, step.info.first + at.row + half * 8) : 0;
            if (WHOLE && step.raw.weights) rows[half] = raw_row(step.raw, step.info.first + at.row + half * 8);
            targets[half] = LABELS || WHOLE ? nullptr : step.raw.targets + rows[half] * layer.fan_out + n0 + at.column(0);
        }
        if (!WHOLE && LOSS != SOFTMAX_CROSS_ENTROPY) load(0);
    }
    // Until the targets of this warp's rows are there; lets go of stages of others' rows before them.
    __device__ __forceinline__ void await_targets(Ring& ring) {
        if (!WHOLE) return;
        const int warp = thread_anew() >> 5, lane = thread_anew() & 31, own = warp * 16 / TARGET_ROWS;
#pragma unroll 1
        for (int i = 0; i < own; ++i) ring.let_go();
        barrier_wait(ring.full(ring.slot), ring.parity);
        near_targets = ring.stage() + (warp * 16 % TARGET_ROWS + (lane >> 2)) * TARGET_PITCH + (lane & 3) * 8;
    }
    // Of all others.
    __device__ __forceinline__ void let_go(Ring& ring) const {
        if (!WHOLE) return;
        __syncwarp();
#pragma unroll 1
        for (int i = (thread_anew() >> 5) * 16 / TARGET_ROWS; i < TILE_M / TARGET_ROWS; ++i) ring.let_go();
    }
    // Target of pair i of a part of 32 columns, where they come through the ring.
    __device__ __forceinline__ float2 near_pair(int part, int i) const {
        return load_shared_pair(near_targets + i % 2 * 8 * TARGET_PITCH + (part * 32 + i / 2 * 8) * 4);
    }
    __device__ __forceinline__ void load(int part) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = part * 32 + i / 2 * 8;
            const float* from = targets[i % 2] + column;
            pairs[i] = make_float2(column < columns ? from[0] : 0.f, column + 1 < columns ? from[1] : 0.f);
        }
    }
};

// Loss and errors of the output layer.
template <bool WHOLE>
__device__ __forceinline__ void output_errors(
    float (&c)[WIDEST / 2], Outside<WHOLE>& outside, Writer& writer, const StepView& step,
    const Tile& tile) {
    const int l = ENGINE.layers - 1, m0 = tile.m0(), n0 = tile.n0();
    const Layer& layer = LAYER(l);
    const Matrices& to = near_matrices[l];
    const Fragment at(m0, step.info.rows);
    const int row0 = m0 + at.warp * 16;
    float losses[2] = {};
    if (LOSS == SOFTMAX_CROSS_ENTROPY)
#pragma unroll
        for (int half = 0; half < 2; ++half) losses[half] = softmax_errors(c, step, layer, at, half, outside.rows[half]);
    Largest largest;
    const float share = 1.f / (float)layer.fan_out;
    const float weights[2] = {
        WHOLE || at.inside[0] ? step.weight(outside.rows[0]) * share : 0.f,
        WHOLE || at.inside[1] ? step.weight(outside.rows[1]) * share : 0.f};
    const u32 masks[2] = {at.mask(0), at.mask(1)};
    const int columns = padded_columns(layer);
    const ColumnSums sums(sums_of_tile(l, tile));
    Pair packed[PAIRS_OF_BLOCK];
    constexpr int PARTS = BULK_N / 32, OF_BLOCK = COLUMNS / 32;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {  // 32 columns each
        const int block = part / OF_BLOCK;
        if (n0 + block * COLUMNS >= columns) break;
        float2 wanted[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) wanted[i] = WHOLE ? outside.near_pair(part, i) : outside.pairs[i];
        if (!WHOLE && LOSS != SOFTMAX_CROSS_ENTROPY && part + 1 < PARTS) outside.load(part + 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // group i / 2, row i % 2
            const int count = WHOLE ? 2 : outside.columns - part * 32 - i / 2 * 8;
            const float* z = c + (part * 8 + i) * 2;
            float v[2] = {z[0], z[1]};
            if (LOSS != SOFTMAX_CROSS_ENTROPY)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float of_activation, of_loss;
                    const float y = activate(OUTPUT_ACTIVATION, z[e], of_activation);
                    const float own = output_loss(y, e ? wanted[i].y : wanted[i].x, ENGINE.huber_delta, of_loss);
                    if (count > e && (WHOLE || at.inside[i % 2])) losses[i % 2] += own;  // others have targets of row 0
                    v[e] = weights[i % 2] * of_loss * of_activation;
                }
            const Pair pair = WHOLE ? pack_pair(v[0], v[1])
                                   : pack_pair(count > 0 ? v[0] : 0.f, count > 1 ? v[1] : 0.f) & masks[i % 2];
            packed[part % OF_BLOCK * 8 + i] = pair;
            largest.see(pair);
        }
        if (part % OF_BLOCK == OF_BLOCK - 1)
            put_errors(writer, packed, to.error, row0, n0 / COLUMNS + block, sums, block);
    }
    tell_largest(MAX_BULK_LAYERS + l, largest.bits());
    const float loss = LOSS == SOFTMAX_CROSS_ENTROPY ? losses[0] + losses[1]
                                                     : weights[0] * losses[0] + weights[1] * losses[1];
    const double sum = warp_sum((double)loss);
    if (at.lane == 0) {
        const int across = (layer.fan_out + BULK_N - 1) / BULK_N;
        step.losses[(tile.m0() / TILE_M * across + tile.n0() / BULK_N) * CONSUMER_WARPS + (thread_anew() >> 5)] = sum;
        atomicMax(near_largest + 2 * MAX_BULK_LAYERS, magnitude_bits((float)sum));
    }
}
