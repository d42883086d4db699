// The output layer: loss and its error.
#pragma once
#include "wide_layers.cuh"

// Notes a block's share of the loss; all threads call it.
__device__ __forceinline__ void put_loss(int part, float loss, Flags& flags) {
    const double sum = block_sum(loss);
    if (threadIdx.x == 0) {
        ENGINE.loss_partials[part] = sum;
        atomicMax(&flags.loss, magnitude_bits((float)sum));
    }
}

// One row by one warp: error to its place (and through `keep(column, error)`), its weighted loss to lane 0.
template <class Keep>
__device__ __forceinline__ float softmax_error(
    const Layer& layer, const Raw& raw, const StepInfo& info, const Batch& batch, const float* logits, int r,
    u32& largest, const Keep& keep) {
    const float weight = row_weight(batch, r);
    Element* error = layer.error + (i64)r * layer.ld_out;
    const float loss = softmax_row(
        logits, layer.fan_out, LABELS ? batch.labels[r] : 0,
        LABELS ? nullptr : raw.targets + raw_row(raw, info.first, r) * layer.fan_out, [&](int c, float slope) {
            largest = max(largest, magnitude_bits(weight * slope));
            error[c] = to_element(weight * slope);
            keep(c, weight * slope);
        });
    for (int c = layer.fan_out + (threadIdx.x & 31); c < layer.ld_out; c += 32) error[c] = to_element(0.f);
    return (threadIdx.x & 31) == 0 ? weight * loss : 0.f;
}

// The rows of the output tile, which holds all columns; becomes their errors.
__device__ __forceinline__ float softmax_tile(
    const Layer& layer, const Raw& raw, const StepInfo& info, const Batch& batch, int m0, u32& largest) {
    float loss = 0.f;
    const float* bias = ENGINE.parameters + layer.bias_offset;
    for (int r = threadIdx.x >> 5; r < OUTPUT_M; r += THREADS / 32) {
        float* row = output_tile<ForwardOutput>() + r * ForwardOutput::Output::STRIDE;
        const bool inside = m0 + r < info.rows;
        for (int c = threadIdx.x & 31; c < layer.fan_out; c += 32) row[c] = inside ? row[c] + bias[c] : 0.f;
        __syncwarp();
        if (inside)
            loss += softmax_error(
                layer, raw, info, batch, row, m0 + r, largest, [&](int c, float error) { row[c] = error; });
    }
    return loss;
}

__device__ PHASE void forward_output(const Raw& raw, const StepInfo& info, const Batch& batch, Flags& flags) {
    typedef ForwardOutput::Output Output;
    const int l = ENGINE.layers - 1;
    const Layer& layer = LAYER(l);
    __shared__ i64 raw_rows[OUTPUT_M];  // of the tile's rows: looked up at once, not one after another
    float* tile = output_tile<ForwardOutput>();
    u32 largest = 0;
    forward_tiles<ForwardOutput>(l, batch, ENGINE.parameters, info.rows, [&](int t, int m0, int n0, const Columns& columns) {
        if (softmax_apart()) {
            Output::for_each_row(tile, [&](int r, const float4& v) {
                network_output(layer, columns, ENGINE.logits, info.rows, m0 + r, v);
            });
            return;
        }
        float loss = 0.f;
        float4 sum = zeros();
        if (LOSS == SOFTMAX_CROSS_ENTROPY) {
            loss = softmax_tile(layer, raw, info, batch, m0, largest);
            __syncthreads();
            Output::for_each_row(tile, [&](int, const float4& v) { add_to(sum, v); });
        } else {
            for (int r = threadIdx.x; r < OUTPUT_M && m0 + r < info.rows; r += THREADS)
                raw_rows[r] = raw_row(raw, info.first, m0 + r);
            __syncthreads();
            Output::for_each_row<ForwardOutput::PARTS == 1 ? 8 : 4>(
                tile, [&](int r) { return load_wanted(layer, columns, raw, raw_rows[r], batch, info.rows, m0 + r); },
                [&](int r, const float4& v, const Wanted& wanted) {
                    add_to(sum, output_error(layer, columns, wanted, info.rows, m0 + r, v, loss, largest));
                });
        }
        put_loss(t, loss, flags);
        Output::column_sums(
            tile, sum, layer.column_sums + (i64)(m0 / OUTPUT_M) * layer.ld_out + n0, layer.ld_out - n0);
    });
    if (!softmax_apart()) block_largest(&flags.error[l], largest);
}

// Softmax cross-entropy from the logits, a warp a row.
__device__ PHASE void softmax_rows(const Raw& raw, const StepInfo& info, const Batch& batch, Flags& flags) {
    const int l = ENGINE.layers - 1;
    const Layer& layer = LAYER(l);
    u32 largest = 0;
    for (int t = blockIdx.x; t * LOSS_ROWS < info.rows; t += gridDim.x) {
        const int end = min(info.rows, (t + 1) * LOSS_ROWS);
        float loss = 0.f;
        for (int r = t * LOSS_ROWS + (threadIdx.x >> 5); r < end; r += THREADS / 32) {
            const float* logits = ENGINE.logits + (i64)r * layer.fan_out;
            loss += softmax_error(layer, raw, info, batch, logits, r, largest, [](int, float) {});
        }
        put_loss(t, loss, flags);  // the rows' errors are written when it returns
        for (int c = threadIdx.x; c < layer.fan_out; c += THREADS) {
            float sum = 0.f;
            for (int r = t * LOSS_ROWS; r < end; ++r) sum += to_float(layer.error[(i64)r * layer.ld_out + c]);
            layer.column_sums[(i64)t * layer.ld_out + c] = sum;
        }
        __syncthreads();
    }
    block_largest(&flags.error[l], largest);
}

// Block 0: the loss of the step, in the order of its parts, and the tally.
__device__ __forceinline__ void finish_loss(int s, int rows, float weight) {
    const int across = HEAD_OUTPUTS || softmax_apart() ? 1 : ceil_div(LAYER(ENGINE.layers - 1).fan_out, OUTPUT_N) * ForwardOutput::PARTS;
    const int parts = output_parts(rows) * across;
    double loss = 0.;
    for (int part = threadIdx.x; part < parts; part += THREADS) loss += ENGINE.loss_partials[part];
    loss = block_sum(loss);
    float* tally = ENGINE.gradient + ENGINE.size;
    if (threadIdx.x < TALLY)
        tally[threadIdx.x] = threadIdx.x == TALLY_LOSS     ? (float)loss
                             : threadIdx.x == TALLY_WEIGHT ? weight
                             : threadIdx.x == TALLY_ROWS   ? (float)rows
                                                           : 0.f;
    if (threadIdx.x == 0) ENGINE.results[s] = StepResult{loss, weight, DONE};
}
