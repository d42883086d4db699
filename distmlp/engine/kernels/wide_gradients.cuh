// Weight and bias gradients of all layers in one phase, with the update where that is possible.
#pragma once
#include "wide_output.cuh"

// True in every block or in none: no gradient of this step can be infinite or NaN, as told from the magnitudes.
__device__ __forceinline__ bool surely_finite(const Flags& flags, int rows) {
    bool sure = true;
    for (int l = threadIdx.x; l < ENGINE.layers; l += THREADS) {
        const float product = __uint_as_float(flags.output[l]) * __uint_as_float(flags.error[l]) * (float)rows;
        const float sum = __uint_as_float(flags.error[l]) * (float)rows;
        sure = sure && product < 1e38f && sum < 1e38f;
    }
    sure = sure && __uint_as_float(flags.loss) * 1e6f < 1e38f && is_finite(flags.weight) && flags.weight != 0.f;
    return __syncthreads_and(sure);
}

// The work of this phase is all stages of all tiles in one line, cut into equal pieces, one a block ("stream-K",
// Osama et al. 2023); or whole tiles, where these are many. A tile that several blocks share is added up in the order
// of the blocks by the one that comes last.
struct Share {
    int steps;  // stages of a tile
    i64 total;  // what the line is cut by: stages, or whole tiles
    int unit;   // stages of one such piece

    __device__ __forceinline__ explicit Share(int rows) : steps(max(1, ceil_div(rows, Gradient::DEPTH))) {
        unit = ENGINE.whole_tiles ? steps : 1;
        total = (i64)ENGINE.gradient_tiles * (steps / unit);
    }
    __device__ __forceinline__ i64 begin(int block) const { return block * total / gridDim.x * unit; }
    __device__ __forceinline__ int owner(i64 step) const {
        return (int)(((step / unit + 1) * gridDim.x - 1) / total);
    }
};

// A block has at most two tiles that it shares: its first and its last.
__device__ __forceinline__ float2* partial_tile(const Share& share, i64 tile_begin, int block) {
    const i64 slot = 2 * (i64)block + (share.begin(block) < tile_begin);
    return (float2*)ENGINE.partial_tiles + slot * (GRADIENT_M * GRADIENT_N / 2) +
           threadIdx.x % (THREADS / Gradient::SLICES);
}

// Hands a share of `tile` over; true in the block that came last, which then holds the sum.
__device__ __forceinline__ bool add_shares(Gradient& product, const Share& share, int tile) {
    __shared__ int arrived;
    constexpr int STRIDE = THREADS / Gradient::SLICES;
    const i64 tile_begin = (i64)tile * share.steps;
    const int first = share.owner(tile_begin), last = share.owner(tile_begin + share.steps - 1);
    float2* own = partial_tile(share, tile_begin, blockIdx.x);
    if (product.holds_results())
#pragma unroll
        for (int p = 0; p < Gradient::PAIRS; ++p)
            own[p * STRIDE] = make_float2(product.c[2 * p], product.c[2 * p + 1]);
    int sharers = 0;
    for (int b = first; b <= last; ++b) sharers += share.begin(b) < share.begin(b + 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = ENGINE.tile_arrivals + tile;
        arrived = atomicAdd(counter, 1) + 1;
        if (arrived == sharers) *counter = 0;
    }
    __syncthreads();
    if (arrived != sharers) return false;
    __threadfence();
    product.begin();
    if (product.holds_results())
#pragma unroll 1
        for (int b = first; b <= last; ++b) {
            if (share.begin(b) == share.begin(b + 1)) continue;
            const float2* from = partial_tile(share, tile_begin, b);
#pragma unroll
            for (int p = 0; p < Gradient::PAIRS; ++p) {
                const float2 part = __ldcg(from + p * STRIDE);
                product.c[2 * p] += part.x;
                product.c[2 * p + 1] += part.y;
            }
        }
    return true;
}

// What becomes of the gradient of a whole tile.
__device__ __forceinline__ void finish_weights(const Layer& layer, int m0, int n0, bool direct, const Hyper& h) {
    typedef Gradient::Output Output;
    const float* tile = output_tile<Gradient>();
    const int c = n0 + Output::column();
    if (direct)
        Output::for_each_row<2>(
            tile, [&](int r) { return load_weights(layer, m0 + r, c); },
            [&](int r, const float4& v, Parameters& parameters) { weight_update(layer, h, m0 + r, c, v, parameters); });
    else
        Output::for_each_row(tile, [&](int r, const float4& v) { weight_gradient(layer, m0 + r, c, v); });
}

// The layer of a weight-gradient tile; tiles are numbered through all layers.
__device__ __forceinline__ int layer_of_tile(int tile) {
    int l = 0;
    while (l + 1 < ENGINE.layers && tile >= ENGINE.layer[l + 1].first_tile) ++l;
    return l;
}

__device__ PHASE void weight_gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
    const Share share(rows);
    const i64 begin = share.begin(blockIdx.x), end = share.begin(blockIdx.x + 1);
    const int first = (int)(begin / share.steps);
    const auto work = [&](int i, TileWork& w) {
        const int tile = first + i;
        const i64 tile_begin = (i64)tile * share.steps;
        const int from = (int)(max(begin, tile_begin) - tile_begin), to = (int)min(end - tile_begin, (i64)share.steps);
        if (from >= to) return false;
        const int l = layer_of_tile(tile);
        const Layer& layer = ENGINE.layer[l];
        const int own = tile - layer.first_tile;
        w.a = View{layer_input(l, batch), layer.ld_in, min(rows, to * Gradient::DEPTH), layer.ld_in};
        w.b = View{layer.error, layer.ld_out, w.a.rows, layer.ld_out};
        w.m0 = own / layer.tiles_n * GRADIENT_M;
        w.n0 = own % layer.tiles_n * GRADIENT_N;
        w.k = from * Gradient::DEPTH;
        w.steps = to - from;
        return true;
    };
    for_each_tile<Gradient>(dynamic_shared, work, [&](int i, const TileWork& w, Gradient& product) {
        const Layer& layer = ENGINE.layer[layer_of_tile(first + i)];
        product.add_slices(output_tile<Gradient>());
        if (w.steps < share.steps && !add_shares(product, share, first + i)) return;
        product.for_each_summed_part(output_tile<Gradient>(), [&](int part) {
            finish_weights(layer, w.m0, w.n0 + part * Gradient::Output::N, direct, h);
        });
    });
}

// Gradients of up to BIAS_COLUMNS biases: every warp adds up its share of the row tiles, then the warps' sums in order.
__device__ __forceinline__ void bias_task(int l, int task, int rows, bool direct, const Hyper& h) {
    __shared__ float sums[THREADS / 32][BIAS_COLUMNS];
    const Layer& layer = ENGINE.layer[l];
    const int parts = l == ENGINE.layers - 1 ? output_parts(rows) : ceil_div(rows, TILE_M);
    const int warp = threadIdx.x >> 5, c = task * BIAS_COLUMNS + (threadIdx.x & 31);
    float sum = 0.f;
    if (c < layer.fan_out)
        for (int part = warp; part < parts; part += THREADS / 32) sum += layer.column_sums[(i64)part * layer.ld_out + c];
    sums[warp][threadIdx.x & 31] = sum;
    __syncthreads();
    if (warp == 0 && c < layer.fan_out) {
        sum = 0.f;
        for (int w = 0; w < THREADS / 32; ++w) sum += sums[w][threadIdx.x];
        if (direct) update_parameter(h, layer.bias_offset + c, sum);
        else ENGINE.gradient[layer.bias_offset + c] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ void gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
    weight_gradients(batch, rows, direct, h);
    for (int l = 0, before = 0; l < ENGINE.layers; ++l) {  // the last blocks take them first
        const int tasks = ceil_div(ENGINE.layer[l].fan_out, BIAS_COLUMNS);
        for (int task = (blockIdx.x + before) % gridDim.x; task < tasks; task += gridDim.x)
            bias_task(l, tasks - 1 - task, rows, direct, h);
        before += tasks;
    }
}
