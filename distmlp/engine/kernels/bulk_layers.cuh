// Forward and backward tiles of the bulk kernel: what becomes of the products.
#pragma once
#include "bulk_store.cuh"
#include "losses.cuh"

// What the tiles of a step share.
struct StepView {
    const Raw& raw;
    const StepInfo& info;
    Flags& flags;
    double* losses;  // parts of the loss, one a warp of an output tile

    __device__ __forceinline__ float weight(i64 raw_row) const { return raw.weights ? raw.weights[raw_row] : 1.f; }
};

// Biases as what products are added to, by way of the warp's staging. Tensors are padded to whole 128 bytes, so fours may
// be read as one.
__device__ __forceinline__ void start_with_biases(float (&c)[WIDEST / 2], u32 staging, const Layer& layer, int n0) {
    const float* bias = ENGINE.parameters + layer.bias_offset + n0;
    for (int i = threadIdx.x & 31; i < BULK_N / 4; i += 32)
        store_shared(staging + i * 16, n0 + i * 4 < layer.fan_out ? __ldcg((const float4*)bias + i) : zeros());
    __syncwarp();
#pragma unroll
    for (int j = 0; j < BULK_N / 8; ++j) {
        const float2 pair = load_shared_pair(staging + j * 32 + (threadIdx.x & 3) * 8);
        c[j * 4] = c[j * 4 + 2] = pair.x;
        c[j * 4 + 1] = c[j * 4 + 3] = pair.y;
    }
}

// Signs of the outputs of a tile, as the threads have them: one bit each, set where the output is positive.
__device__ __forceinline__ u32* signs_of_tile(int l, int m0, int n0) {
    const int across = (LAYER(l).fan_out + BULK_N - 1) / BULK_N;
    return near_matrices[l].signs + (m0 / TILE_M * across + n0 / BULK_N) * (i64)(SIGN_WORDS * CONSUMERS) + threadIdx.x;
}

// Asks for the warp's part of them, to be read at `staging` when the products are done.
__device__ __forceinline__ void ask_for_signs(u32 staging, int l, int m0, int n0) {
    const int lane = threadIdx.x & 31;
    const u32* from = signs_of_tile(l, m0, n0) - lane;
    for (int i = lane; i < SIGN_WORDS * 8; i += 32)
        copy_chunk(staging + i * 16, from + (i >> 3) * CONSUMERS + (i & 7) * 4);
}
__device__ __forceinline__ void read_signs(u32 staging, u32 (&signs)[SIGN_WORDS]) {
    await_chunks();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SIGN_WORDS; ++i) signs[i] = load_shared(staging + i * 128 + (threadIdx.x & 31) * 4);
    __syncwarp();
}

// Columns beyond the layer meet weights that are zero, rows beyond the batch become zero.
__device__ __forceinline__ void hidden_outputs(
    const float (&c)[WIDEST / 2], Writer& writer, const StepView& step, int l, int m0, int n0) {
    const Matrices& to = near_matrices[l];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(LAYER(l)), row0 = m0 + at.warp * 16;
    const u32 masks[2] = {at.mask(0), at.mask(1)};
    Largest largest;
    u32* signs = signs_of_tile(l, m0, n0);
    u32 sign = 0;
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        if (n0 + block * COLUMNS >= padded_columns(LAYER(l))) break;
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
        if (TELLS_BY_SIGN) __stcg(signs + word * CONSUMERS, sign);
        writer.put(packed, to.output, row0, n0 / COLUMNS + block);
        if (stores_slope(kind)) writer.put(slopes, to.error, row0, n0 / COLUMNS + block);
    }
    largest.tell(&step.flags.output[l + 1]);
}

// Errors of layer l - 1 from the products E_l W_l'. `signs`: of that layer's outputs. Columns beyond the layer are zero,
// their weights are.
__device__ __forceinline__ void hidden_errors(
    const float (&c)[WIDEST / 2], const u32 (&signs)[SIGN_WORDS], Writer& writer, const StepView& step, int l, int m0,
    int n0) {
    const Matrices& to = near_matrices[l - 1];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(LAYER(l - 1)), row0 = m0 + at.warp * 16;
    const u32 masks[2] = {at.mask(0), at.mask(1)};
    StoredSlopes stored = {stores_slope(kind) ? to.error : to.output, row0, n0 / COLUMNS};
    if (!TELLS_BY_SIGN) stored.load(writer, 0);
    const int columns = padded_columns(LAYER(l - 1));
    float* sums = to.sums + (i64)(row0 / 16) * columns + n0;
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
        put_errors(writer, packed, to.error, row0, n0 / COLUMNS + block, sums + block * COLUMNS);
    }
    largest.tell(&step.flags.error[l - 1]);
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

// What an output tile needs from outside. WHOLE: all its rows and columns exist, and columns come in pairs.
template <bool WHOLE>
struct Outside {
    i64 rows[2];              // raw, of the thread's two
    const float* targets[2];  // of them, at the thread's first column
    int columns;              // that there are from that one on
    float2 pairs[8];          // targets of four groups of columns in the two rows

    __device__ __forceinline__ Outside(const StepView& step, const Layer& layer, int m0, int n0) {
        const Fragment at(m0, step.info.rows);
        columns = layer.fan_out - n0 - at.column(0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[half] = WHOLE || at.inside[half] ? raw_row(step.raw, step.info.first + at.row + half * 8) : 0;
            targets[half] = LABELS ? nullptr : step.raw.targets + rows[half] * layer.fan_out + n0 + at.column(0);
        }
        if (LOSS != SOFTMAX_CROSS_ENTROPY) load(0);
    }
    __device__ __forceinline__ void load(int part) {  // 32 columns
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = part * 32 + i / 2 * 8;
            const float* from = targets[i % 2] + column;
            if (WHOLE) pairs[i] = *(const float2*)from;
            else pairs[i] = make_float2(column < columns ? from[0] : 0.f, column + 1 < columns ? from[1] : 0.f);
        }
    }
};

// Loss and errors of the output layer.
template <bool WHOLE>
__device__ __forceinline__ void output_errors(
    float (&c)[WIDEST / 2], Outside<WHOLE>& outside, Writer& writer, const StepView& step, int m0, int n0) {
    const int l = ENGINE.layers - 1;
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
    float* sums = to.sums + (i64)(row0 / 16) * columns + n0;
    Pair packed[PAIRS_OF_BLOCK];
    constexpr int PARTS = BULK_N / 32, OF_BLOCK = COLUMNS / 32;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {  // 32 columns each
        const int block = part / OF_BLOCK;
        if (n0 + block * COLUMNS >= columns) break;
        float2 wanted[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) wanted[i] = outside.pairs[i];
        if (LOSS != SOFTMAX_CROSS_ENTROPY && part + 1 < PARTS) outside.load(part + 1);
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
            put_errors(writer, packed, to.error, row0, n0 / COLUMNS + block, sums + block * COLUMNS);
    }
    largest.tell(&step.flags.error[l]);
    const float loss = LOSS == SOFTMAX_CROSS_ENTROPY ? losses[0] + losses[1]
                                                     : weights[0] * losses[0] + weights[1] * losses[1];
    const double sum = warp_sum((double)loss);
    if (at.lane == 0) {
        const int across = (layer.fan_out + BULK_N - 1) / BULK_N;
        step.losses[(m0 / TILE_M * across + n0 / BULK_N) * CONSUMER_WARPS + at.warp] = sum;
        atomicMax(&step.flags.loss, magnitude_bits((float)sum));
    }
}
