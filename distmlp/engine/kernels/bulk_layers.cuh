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

__device__ __forceinline__ float2 load_pair(const float* from, int count) {
    return make_float2(count > 0 ? from[0] : 0.f, count > 1 ? from[1] : 0.f);
}

__device__ __forceinline__ void hidden_outputs(
    const float (&c)[WIDEST / 2], Staging& staging, const StepView& step, int l, int m0, int n0) {
    const Layer& layer = LAYER(l);
    const Matrices& to = near_matrices[l];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(layer), row0 = m0 + at.warp * 16;
    const float* bias = ENGINE.parameters + layer.bias_offset;
    u32 largest = 0;
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        const int column0 = n0 + block * 64;
        if (column0 >= to.output.blocks * 64) break;
        float2 shift[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int column = column0 + at.column(j);
            shift[j] = load_pair(bias + column, layer.fan_out - column);
        }
        u32 packed[16], slopes[16];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int count = at.inside[half] ? layer.fan_out - column0 - at.column(j) : 0;
                const float* z = c + (block * 8 + j) * 4 + half * 2;
                float slope_x, slope_y;
                float x = activate(kind, z[0] + shift[j].x, slope_x), y = activate(kind, z[1] + shift[j].y, slope_y);
                x = count > 0 ? x : 0.f;
                y = count > 1 ? y : 0.f;
                largest = max(largest, max(magnitude_bits(x), magnitude_bits(y)));
                packed[j * 2 + half] = pack_pair(x, y);
                slopes[j * 2 + half] = pack_pair(slope_x, slope_y);
            }
        staging.put(packed, to.output.at(row0, column0 / 64));
        if (stores_slope(kind)) staging.put(slopes, to.error.at(row0, column0 / 64));
    }
    warp_largest(&step.flags.output[l + 1], largest);
}

// Errors of layer l - 1 from the products E_l W_l'.
__device__ __forceinline__ void hidden_errors(
    const float (&c)[WIDEST / 2], Staging& staging, const StepView& step, int l, int m0, int n0) {
    const Layer& below = LAYER(l - 1);
    const Matrices& to = near_matrices[l - 1];
    const Fragment at(m0, step.info.rows);
    const int kind = hidden_activation(below), row0 = m0 + at.warp * 16;
    const Blocked& known = stores_slope(kind) ? to.error : to.output;
    const auto load = [&](int block, uint4 (&chunks)[4]) {
        const uint4* from = (const uint4*)known.at(row0, min(n0 / 64 + block, known.blocks - 1)) + at.lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) chunks[i] = __ldcg(from + i * 32);
    };
    uint4 chunks[4];
    load(0, chunks);
    float2 sums[COLUMN_BLOCKS];
    u32 largest = 0;
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        const int column0 = n0 + block * 64;
        sums[block] = make_float2(0.f, 0.f);
        if (column0 >= to.error.blocks * 64) continue;
        staging.open();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(staging.place() + (i * 32 + at.lane) * 16),
                         "r"(chunks[i].x), "r"(chunks[i].y), "r"(chunks[i].z), "r"(chunks[i].w)
                         : "memory");
        __syncwarp();
        if (block + 1 < COLUMN_BLOCKS) load(block + 1, chunks);
        u32 packed[16];
        float own[16];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            u32 slopes[4];
            load_matrices(staging.address(pair), slopes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // group 2 pair + i / 2, row i % 2
                const int j = pair * 2 + i / 2, half = i % 2;
                const int count = at.inside[half] ? below.fan_out - column0 - at.column(j) : 0;
                const float* z = c + (block * 8 + j) * 4 + half * 2;
                const float kx = __uint_as_float(slopes[i] << 16), ky = __uint_as_float(slopes[i] & 0xffff0000u);
                float x = z[0] * (stores_slope(kind) ? kx : slope_of_output(kind, kx));
                float y = z[1] * (stores_slope(kind) ? ky : slope_of_output(kind, ky));
                x = count > 0 ? x : 0.f;
                y = count > 1 ? y : 0.f;
                largest = max(largest, max(magnitude_bits(x), magnitude_bits(y)));
                packed[j * 2 + half] = pack_pair(x, y);
                own[j * 2] = half ? own[j * 2] + x : x;
                own[j * 2 + 1] = half ? own[j * 2 + 1] + y : y;
            }
        }
        __syncwarp();
        staging.write(packed);
        staging.send(to.error.at(row0, column0 / 64));
        sums[block] = sum_rows(own);
    }
    put_column_sums(
        staging, sums, to.sums + (i64)(m0 / TILE_M) * to.error.blocks * 64 + n0, to.error.blocks * 64 - n0);
    warp_largest(&step.flags.error[l - 1], largest);
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

// Loss and errors of the output layer.
__device__ __forceinline__ void output_errors(
    float (&c)[WIDEST / 2], Staging& staging, const StepView& step, int m0, int n0) {
    const int l = ENGINE.layers - 1;
    const Layer& layer = LAYER(l);
    const Matrices& to = near_matrices[l];
    const Fragment at(m0, step.info.rows);
    const int row0 = m0 + at.warp * 16;
    const float* bias = ENGINE.parameters + layer.bias_offset;
    i64 rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        rows[half] = at.inside[half] ? raw_row(step.raw, step.info.first + at.row + half * 8) : 0;
    float loss = 0.f;
    if (LOSS == SOFTMAX_CROSS_ENTROPY) {
#pragma unroll
        for (int j = 0; j < BULK_N / 8; ++j) {
            const int column = n0 + at.column(j);
            const float2 shift = load_pair(bias + column, layer.fan_out - column);
            c[j * 4] += shift.x, c[j * 4 + 1] += shift.y, c[j * 4 + 2] += shift.x, c[j * 4 + 3] += shift.y;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) loss += softmax_errors(c, step, layer, at, half, rows[half]);
    }
    float2 sums[COLUMN_BLOCKS];
    u32 largest = 0;
    const float share = 1.f / (float)layer.fan_out;
    const float weights[2] = {
        at.inside[0] ? step.weight(rows[0]) * share : 0.f, at.inside[1] ? step.weight(rows[1]) * share : 0.f};
#pragma unroll
    for (int block = 0; block < COLUMN_BLOCKS; ++block) {
        const int column0 = n0 + block * 64;
        sums[block] = make_float2(0.f, 0.f);
        if (column0 >= to.error.blocks * 64) continue;
        float2 shift[8], wanted[16];
        if (LOSS != SOFTMAX_CROSS_ENTROPY)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int column = column0 + at.column(j), count = layer.fan_out - column;
                shift[j] = load_pair(bias + column, count);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* from = step.raw.targets + rows[half] * layer.fan_out + column;
                    if (layer.fan_out % 2 == 0) wanted[j * 2 + half] = count > 0 ? *(const float2*)from : make_float2(0.f, 0.f);
                    else wanted[j * 2 + half] = load_pair(from, count);
                }
            }
        u32 packed[16];
        float own[16];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int count = at.inside[half] ? layer.fan_out - column0 - at.column(j) : 0;
                float* z = c + (block * 8 + j) * 4 + half * 2;
                float v[2] = {z[0], z[1]};
                if (LOSS != SOFTMAX_CROSS_ENTROPY)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float of_activation, of_loss;
                        const float y = activate(OUTPUT_ACTIVATION, z[e] + (e ? shift[j].y : shift[j].x), of_activation);
                        const float target = e ? wanted[j * 2 + half].y : wanted[j * 2 + half].x;
                        const float part = output_loss(y, target, ENGINE.huber_delta, of_loss);
                        if (count > e) loss += weights[half] * part;
                        v[e] = weights[half] * of_loss * of_activation;
                    }
                const float x = count > 0 ? v[0] : 0.f, y = count > 1 ? v[1] : 0.f;
                largest = max(largest, max(magnitude_bits(x), magnitude_bits(y)));
                packed[j * 2 + half] = pack_pair(x, y);
                own[j * 2] = half ? own[j * 2] + x : x;
                own[j * 2 + 1] = half ? own[j * 2 + 1] + y : y;
            }
        staging.put(packed, to.error.at(row0, column0 / 64));
        sums[block] = sum_rows(own);
    }
    put_column_sums(
        staging, sums, to.sums + (i64)(m0 / TILE_M) * to.error.blocks * 64 + n0, to.error.blocks * 64 - n0);
    warp_largest(&step.flags.error[l], largest);
    const double sum = warp_sum((double)loss);
    if (at.lane == 0) {
        const int across = (layer.fan_out + BULK_N - 1) / BULK_N;
        step.losses[(m0 / TILE_M * across + n0 / BULK_N) * CONSUMER_WARPS + at.warp] = sum;
        atomicMax(&step.flags.loss, magnitude_bits((float)sum));
    }
}
