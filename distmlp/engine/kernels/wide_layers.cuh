// The phases of a step over the grid: hidden layers forward and backward. Every block takes the tiles t = its number,
// its number + grid, ...
#pragma once
#include "tile_wgmma.cuh"
#include "update.cuh"

#ifndef TILE_M  // hidden layers, forward and backward
#define TILE_M 64
#define TILE_N 64
#define TILE_K 32
#define TILE_WARPS 2, 4, 1
#define TILE_STAGES 3
#define TILE_WARPGROUPS 0
#endif
#ifndef OUTPUT_M  // the output layer, forward
#define OUTPUT_M 64
#define OUTPUT_N 64
#define OUTPUT_K 32
#define OUTPUT_WARPS 2, 4, 1
#define OUTPUT_STAGES 3
#define OUTPUT_WARPGROUPS 0
#endif
#ifndef GRADIENT_M  // weight gradients
#define GRADIENT_M 64
#define GRADIENT_N 64
#define GRADIENT_K 32
#define GRADIENT_WARPS 2, 4, 1
#define GRADIENT_STAGES 3
#define GRADIENT_WARPGROUPS 0
#endif
#ifndef HEAD_OUTPUTS  // the outputs where wide_head.cuh computes their layer, 0 where tiles do
#define HEAD_OUTPUTS 0
#define HEAD_ROWS 1  // of a warp at a time
#endif
#define HEAD_TILE (HEAD_ROWS * THREADS / 32)  // rows of a block at a time
#if TILE_WARPGROUPS || OUTPUT_WARPGROUPS || GRADIENT_WARPGROUPS
#define PHASE __forceinline__  // ptxas runs warpgroup products one by one where a call may come between (C7510)
#else
#define PHASE __noinline__
#endif

typedef Shape<TILE_M, TILE_N, TILE_K, TILE_WARPS, TILE_STAGES> TileShape;
typedef Shape<OUTPUT_M, OUTPUT_N, OUTPUT_K, OUTPUT_WARPS, OUTPUT_STAGES> OutputShape;
typedef Shape<GRADIENT_M, GRADIENT_N, GRADIENT_K, GRADIENT_WARPS, GRADIENT_STAGES> GradientShape;
typedef MainLoop<TILE_WARPGROUPS, TileShape, true, true> Forward;
typedef MainLoop<TILE_WARPGROUPS, TileShape, true, false> Backward;
typedef MainLoop<OUTPUT_WARPGROUPS, OutputShape, true, true> ForwardOutput;
typedef MainLoop<GRADIENT_WARPGROUPS, GradientShape, false, true> Gradient;

#define LOSS_ROWS 32     // rows of a softmax task
#define BIAS_COLUMNS 32  // columns of a bias task

template <class P>
__device__ __forceinline__ float* output_tile() {
    return (float*)(dynamic_shared + P::TILE_AT);
}
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Softmax needs whole rows: they lie in one tile where the classes are few, else a phase of its own reads the logits.
__device__ __forceinline__ bool softmax_apart() {
    return LOSS == SOFTMAX_CROSS_ENTROPY &&
           (ForwardOutput::PARTS > 1 || LAYER(ENGINE.layers - 1).fan_out > OUTPUT_N);
}
__device__ __forceinline__ int output_parts(int rows) {  // of the last layer's column sums
    if (HEAD_OUTPUTS) return min(gridDim.x, ceil_div(rows, HEAD_TILE));
    return ceil_div(rows, softmax_apart() ? LOSS_ROWS : OUTPUT_M);
}
__device__ __forceinline__ int column_parts(int l, int rows) {  // of a layer's column sums
    return l >= ENGINE.layers - (HEAD_OUTPUTS ? 2 : 1) ? output_parts(rows) : ceil_div(rows, TILE_M);
}

__device__ __forceinline__ const Element* layer_input(int l, const Batch& batch) {
    return l ? LAYER(l - 1).output : batch.inputs;
}

// Tiles of A_(l-1) W_l; finish(tile number, first row, first column, biases) finds the results in the output tile.
template <class P, class Finish>
__device__ __forceinline__ void forward_tiles(
    int l, const Batch& batch, const float* flat, int rows, const Finish& finish) {
    const Layer& layer = LAYER(l);
    const int across = ceil_div(layer.fan_out, P::N), tiles = ceil_div(rows, P::M) * across;
    const auto work = [&](int i, TileWork& w) {
        const int t = blockIdx.x + i * gridDim.x;
        if (t >= tiles) return false;
        w.a = View{layer_input(l, batch), layer.ld_in, rows, layer.ld_in};
        w.b = View{layer.weight, layer.ld_out, layer.fan_in, layer.ld_out};
        w.m0 = t / across * P::M;
        w.n0 = t % across * P::N;
        w.k = 0;
        w.steps = ceil_div(layer.fan_in, P::DEPTH);
        return true;
    };
    const auto load_bias = [&](int n0) { return Columns::load_bias(layer, n0 + P::Output::column(), flat); };
    float4 bias;  // of the first part's columns
    const auto begin = [&](int, const TileWork& w) { bias = load_bias(w.n0); };
    for_each_tile<P>(dynamic_shared, work, begin, [&](int i, const TileWork& w, P& product) {
        product.for_each_part(output_tile<P>(), [&](int part) {
            const int n0 = w.n0 + part * P::Output::N;
            const Columns columns(layer, n0 + P::Output::column(), part ? load_bias(n0) : bias);
            finish((blockIdx.x + i * (int)gridDim.x) * P::PARTS + part, w.m0, n0, columns);
        });
    });
}

__device__ PHASE void forward_hidden(int l, const Batch& batch, const float* flat, int rows, Flags* flags) {
    const Layer& layer = LAYER(l);
    u32 largest = 0;
    forward_tiles<Forward>(l, batch, flat, rows, [&](int, int m0, int n0, const Columns& columns) {
        Forward::Output::for_each_row(output_tile<Forward>(), [&](int r, const float4& v) {
            hidden_output(layer, columns, rows, m0 + r, v, largest);
        });
    });
    if (flags) block_largest(&flags->output[l + 1], largest);
}

__device__ PHASE void backward(int l, int rows, Flags& flags) {  // error of layer l - 1
    typedef Backward::Output Output;
    const Layer &layer = LAYER(l), &below = LAYER(l - 1);
    const int across = ceil_div(layer.fan_in, TILE_N), tiles = ceil_div(rows, TILE_M) * across;
    const auto work = [&](int i, TileWork& w) {
        const int t = blockIdx.x + i * gridDim.x;
        if (t >= tiles) return false;
        w.a = View{layer.error, layer.ld_out, rows, layer.ld_out};
        w.b = View{layer.weight, layer.ld_out, layer.fan_in, layer.ld_out};
        w.m0 = t / across * TILE_M;
        w.n0 = t % across * TILE_N;
        w.k = 0;
        w.steps = ceil_div(layer.fan_out, Backward::DEPTH);
        return true;
    };
    float* tile = output_tile<Backward>();
    u32 largest = 0;
    const auto begin = [](int, const TileWork&) {};
    for_each_tile<Backward>(dynamic_shared, work, begin, [&](int, const TileWork& w, Backward& product) {
        product.for_each_part(tile, [&](int part) {
            const int n0 = w.n0 + part * Output::N;
            const Columns columns(below, n0 + Output::column(), nullptr);
            float4 sum = zeros();
            Output::for_each_row<Backward::PARTS == 1 ? 8 : 4>(
                tile, [&](int r) { return load_slope(below, columns.first, rows, w.m0 + r); },
                [&](int r, const float4& v, const FourElements& slope) {
                    add_to(sum, hidden_error(below, columns, rows, w.m0 + r, v, widen(slope), largest));
                });
            Output::column_sums(
                tile, sum, below.column_sums + (i64)(w.m0 / TILE_M) * below.ld_out + n0, below.ld_out - n0);
        });
    });
    block_largest(&flags.error[l - 1], largest);
}
