// What becomes of the results of a matrix product at (row, column .. column + 3) of a layer's matrix; columns are
// multiples of four. What was stored comes back, zero beyond the edges. Independent of the main loop.
#pragma once
#include "gather.cuh"
#include "losses.cuh"

#ifndef EMA  // whether averages of the parameters are kept
#define EMA (ENGINE.ema != nullptr)
#endif
#define EACH_OF_FOUR(f) f(v.x, 0), f(v.y, 1), f(v.z, 2), f(v.w, 3)

__device__ __forceinline__ float4 zeros() { return make_float4(0.f, 0.f, 0.f, 0.f); }
__device__ __forceinline__ float4 float4_at(const float* flat, i64 at) { return *(const float4*)(flat + at); }
__device__ __forceinline__ float part(const float4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
__device__ __forceinline__ void add_to(float4& sum, const float4& v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

// Four columns of a layer that a thread keeps to.
struct Columns {
    int first;
    int count;     // that the layer has of them, may be zero or negative
    bool stored;   // the padded matrices have them
    float4 bias;
    float share;   // of one output in the loss of a row

    __device__ __forceinline__ Columns(const Layer& layer, int column, const float4& bias)
        : first(column), count(layer.fan_out - column), stored(column < layer.ld_out), bias(bias),
          share(1.f / (float)layer.fan_out) {}
    __device__ __forceinline__ Columns(const Layer& layer, int column, const float* flat)
        : Columns(layer, column, flat ? load_bias(layer, column, flat) : zeros()) {}

    static __device__ __forceinline__ float4 load_bias(const Layer& layer, int column, const float* flat) {
        return column < layer.ld_out ? float4_at(flat, layer.bias_offset + column) : zeros();  // a tensor's end is padded
    }
};

// Output of a hidden layer (and, where it must be kept, the slope) from z = `v` without bias.
__device__ __forceinline__ void hidden_output(
    const Layer& layer, const Columns& columns, int rows, int r, float4 v, u32& largest) {
    if (r >= rows || !columns.stored) return;
    const int kind = hidden_activation(layer);
    const i64 at = (i64)r * layer.ld_out + columns.first;
    float4 slope = zeros();
    const auto output = [&](float& x, int k) {
        float of_x = 0.f;
        x = k < columns.count ? activate(kind, x + part(columns.bias, k), of_x) : 0.f;
        (k == 0 ? slope.x : k == 1 ? slope.y : k == 2 ? slope.z : slope.w) = of_x;
    };
    EACH_OF_FOUR(output);
    if (stores_slope(kind)) store_quad(layer.error + at, slope);
    store_quad(layer.output + at, v);
    largest = max(largest, magnitude_bits(v));
}

// Network output from z = `v` without bias, unpadded float (rows, outputs).
__device__ __forceinline__ void network_output(
    const Layer& layer, const Columns& columns, float* out, int rows, int r, float4 v) {
    if (r >= rows) return;
    float* at = out + (i64)r * layer.fan_out + columns.first;
    const auto output = [&](float x, int k) {
        float unused;
        if (k < columns.count) at[k] = activate(OUTPUT_ACTIVATION, x + part(columns.bias, k), unused);
    };
    EACH_OF_FOUR(output);
}

__device__ __forceinline__ float row_weight(const Batch& batch, int r) { return batch.weights ? batch.weights[r] : 1.f; }

// What the loss of a row needs for four columns.
struct Wanted {
    float4 target;
    float weight;
};
__device__ __forceinline__ Wanted load_wanted(
    const Layer& layer, const Columns& columns, const Raw& raw, i64 raw_row, const Batch& batch, int rows, int r) {
    Wanted wanted = {zeros(), 0.f};
    if (r >= rows || columns.count <= 0) return wanted;
    const float* target = raw.targets + raw_row * layer.fan_out + columns.first;
    wanted.weight = row_weight(batch, r);
    float4& v = wanted.target;
    if (layer.fan_out % 4 == 0) {
        v = *(const float4*)target;
    } else {
        const auto load = [&](float& x, int k) { x = k < columns.count ? target[k] : 0.f; };
        EACH_OF_FOUR(load);
    }
    return wanted;
}

// Error of the output layer from z = `v` without bias, for losses that are sums over outputs. Adds the weighted loss
// to `loss`.
__device__ __forceinline__ float4 output_error(
    const Layer& layer, const Columns& columns, const Wanted& wanted, int rows, int r, float4 v, float& loss,
    u32& largest) {
    if (r >= rows || !columns.stored) return zeros();
    const float weight = wanted.weight * columns.share;
    const auto error = [&](float& x, int k) {
        float of_activation = 0.f, of_loss = 0.f;
        if (k < columns.count) {
            const float y = activate(OUTPUT_ACTIVATION, x + part(columns.bias, k), of_activation);
            loss += weight * output_loss(y, part(wanted.target, k), ENGINE.huber_delta, of_loss);
        }
        x = weight * of_loss * of_activation;
    };
    EACH_OF_FOUR(error);
    store_quad(layer.error + (i64)r * layer.ld_out + columns.first, v);
    largest = max(largest, magnitude_bits(v));
    return v;
}

// What the slope of a hidden layer is told from.
__device__ __forceinline__ FourElements load_slope(const Layer& layer, int column, int rows, int r) {
    if (r >= rows || column >= layer.ld_out) return FourElements();
    const Element* from = stores_slope(hidden_activation(layer)) ? layer.error : layer.output;
    return *(const FourElements*)(from + (i64)r * layer.ld_out + column);
}

// Error of a hidden layer from the derivative by its output.
__device__ __forceinline__ float4 hidden_error(
    const Layer& layer, const Columns& columns, int rows, int r, float4 v, const float4& slope, u32& largest) {
    if (r >= rows || !columns.stored) return zeros();
    const int kind = hidden_activation(layer);
    const auto error = [&](float& x, int k) {
        const float known = part(slope, k);
        x = k < columns.count ? x * (stores_slope(kind) ? known : slope_of_output(kind, known)) : 0.f;
    };
    EACH_OF_FOUR(error);
    store_quad(layer.error + (i64)r * layer.ld_out + columns.first, v);
    largest = max(largest, magnitude_bits(v));
    return v;
}

// Parameter `at` of the flat buffers moves along its gradient sum; returns the new value.
__device__ __forceinline__ float update_parameter(const Hyper& h, i64 at, float sum) {
    float first = has_first_slot() ? ENGINE.first_slot[at] : 0.f;
    float second = has_second_slot() ? ENGINE.second_slot[at] : 0.f;
    const float p = update_rule(h, ENGINE.parameters[at], sum, first, second);
    if (has_first_slot()) ENGINE.first_slot[at] = first;
    if (has_second_slot()) ENGINE.second_slot[at] = second;
    ENGINE.parameters[at] = p;
    if (EMA) ENGINE.ema[at] = average(h.ema_decay, ENGINE.ema[at], p);
    return p;
}

// Four neighbours at a multiple of four: loads and stores apart, so that several can be under way.
struct Parameters {
    float4 value, first, second, mean;

    // `count` of them exist; `whole`: all four, at a multiple of four.
    static __device__ __forceinline__ float4 load(const float* from, bool whole, int count) {
        if (whole) return *(const float4*)from;
        float4 v = zeros();
        const auto load_one = [&](float& x, int k) {
            if (k < count) x = from[k];
        };
        EACH_OF_FOUR(load_one);
        return v;
    }
    static __device__ __forceinline__ void store(float* to, bool whole, int count, const float4& v) {
        if (whole) {
            *(float4*)to = v;
            return;
        }
        const auto store_one = [&](float x, int k) {
            if (k < count) to[k] = x;
        };
        EACH_OF_FOUR(store_one);
    }

    __device__ __forceinline__ void load(i64 at, bool whole = true, int count = 4) {
        value = load(ENGINE.parameters + at, whole, count);
        first = has_first_slot() ? load(ENGINE.first_slot + at, whole, count) : zeros();
        second = has_second_slot() ? load(ENGINE.second_slot + at, whole, count) : zeros();
        mean = EMA ? load(ENGINE.ema + at, whole, count) : zeros();
    }
    __device__ __forceinline__ void update(const Hyper& h, const float4& sum) {
        value.x = update_rule(h, value.x, sum.x, first.x, second.x);
        value.y = update_rule(h, value.y, sum.y, first.y, second.y);
        value.z = update_rule(h, value.z, sum.z, first.z, second.z);
        value.w = update_rule(h, value.w, sum.w, first.w, second.w);
    }
    __device__ __forceinline__ void store(const Hyper& h, i64 at, bool whole = true, int count = 4) {
        if (has_first_slot()) store(ENGINE.first_slot + at, whole, count, first);
        if (has_second_slot()) store(ENGINE.second_slot + at, whole, count, second);
        store(ENGINE.parameters + at, whole, count, value);
        if (!EMA) return;
        mean.x = average(h.ema_decay, mean.x, value.x);
        mean.y = average(h.ema_decay, mean.y, value.y);
        mean.z = average(h.ema_decay, mean.z, value.z);
        mean.w = average(h.ema_decay, mean.w, value.w);
        store(ENGINE.ema + at, whole, count, mean);
    }
};

// Where four weights (r, c) to (r, c + 3) lie, and whether they exist and may be moved as one.
__device__ __forceinline__ i64 weight_place(const Layer& layer, int r, int c) {
    return layer.weight_offset + (i64)r * layer.fan_out + c;
}
__device__ __forceinline__ bool has_weights(const Layer& layer, int r, int c) {
    return r < layer.fan_in && c < layer.fan_out;
}

__device__ __forceinline__ Parameters load_weights(const Layer& layer, int r, int c) {
    Parameters parameters = {};
    if (has_weights(layer, r, c))
        parameters.load(weight_place(layer, r, c), layer.fan_out % 4 == 0, layer.fan_out - c);
    return parameters;
}

// Four weights from their gradient sums: masters, slots, average and copy at once.
__device__ __forceinline__ void update_weights(
    const Layer& layer, const Hyper& h, int r, int c, const float4& v, Parameters& parameters) {
    if (!has_weights(layer, r, c)) return;
    const bool whole = layer.fan_out % 4 == 0;
    const int count = layer.fan_out - c;
    parameters.update(h, v);
    parameters.store(h, weight_place(layer, r, c), whole, count);
    if (!whole) {  // the copy's padding stays zero
        float4& v = parameters.value;
        const auto clear = [&](float& x, int k) { x = k < count ? x : 0.f; };
        EACH_OF_FOUR(clear);
    }
    store_quad(layer.weight + (i64)r * layer.ld_out + c, parameters.value);
}

__device__ __forceinline__ void weight_gradient(const Layer& layer, int r, int c, const float4& v) {
    if (!has_weights(layer, r, c)) return;
    float* at = ENGINE.gradient + weight_place(layer, r, c);
    if (layer.fan_out % 4 == 0) {
        *(float4*)at = v;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (c + k < layer.fan_out) at[k] = part(v, k);
}
