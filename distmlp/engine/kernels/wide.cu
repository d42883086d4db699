// Whole training steps in one cooperative launch, for any network: phases of tiles over the whole grid, a grid
// barrier where a phase needs all of the one before.
//
//   forward, layer by layer        A_l = f(A_(l-1) W_l + b_l); the last one computes the loss and its error instead
//   backward, layer by layer       E_(l-1) = (E_l W_l') f'(A_(l-1))
//   gradients of all layers        W_l' = A_(l-1)' E_l, sums of bias errors; with the update where that is possible
//   (update)                       clipping, LAMB, several ranks, doubtful magnitudes: update.cuh
//
// The rows of the next step are gathered beside the gradients. No sum depends on the order in which blocks run.
#include "tile.cuh"
#include "update.cuh"

#ifndef TILE_M  // forward and backward
#define TILE_M 64
#define TILE_N 64
#define TILE_K 32
#define TILE_WARPS 2, 4, 1
#define TILE_STAGES 3
#endif
#ifndef GRADIENT_M  // weight gradients
#define GRADIENT_M 64
#define GRADIENT_N 64
#define GRADIENT_K 32
#define GRADIENT_WARPS 2, 4, 1
#define GRADIENT_STAGES 3
#endif
#ifndef MIN_BLOCKS  // per multiprocessor
#define MIN_BLOCKS 1
#endif

typedef Shape<TILE_M, TILE_N, TILE_K, TILE_WARPS, TILE_STAGES> Tile;
typedef Shape<GRADIENT_M, GRADIENT_N, GRADIENT_K, GRADIENT_WARPS, GRADIENT_STAGES> GradientTile;
typedef Product<Tile, true, true> Forward;
typedef Product<Tile, true, false> Backward;
typedef Product<GradientTile, false, true> Gradient;
typedef OutputTile<Tile> Output;
typedef OutputTile<GradientTile> GradientOutput;

#define LOSS_ROWS 32     // rows of a softmax task
#define BIAS_COLUMNS 32  // columns of a bias task

extern __shared__ __align__(128) u8 dynamic_shared[];

__device__ __forceinline__ Element* stages() { return (Element*)dynamic_shared; }
__device__ __forceinline__ float* output_tile() { return (float*)dynamic_shared; }  // takes the place of the stages
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Softmax needs whole rows: they lie in one tile where the classes are few, else a phase of its own reads the logits.
__device__ __forceinline__ bool softmax_apart() {
    return LOSS == SOFTMAX_CROSS_ENTROPY && ENGINE.layer[ENGINE.layers - 1].fan_out > TILE_N;
}
__device__ __forceinline__ int output_parts(int rows) {  // of the last layer's column sums
    return ceil_div(rows, softmax_apart() ? LOSS_ROWS : TILE_M);
}

__device__ __forceinline__ const Element* layer_input(int l, const Batch& batch) {
    return l ? ENGINE.layer[l - 1].output : batch.inputs;
}

// f(tile number, first row, first column) for this block's tiles of A_(l-1) W_l, which lie in the output tile then.
template <class F>
__device__ __forceinline__ void forward_tiles(int l, const Batch& batch, int rows, const F& f) {
    const Layer& layer = ENGINE.layer[l];
    const View a = {layer_input(l, batch), layer.ld_in, rows, layer.ld_in};
    const View b = {layer.weight, layer.ld_out, layer.fan_in, layer.ld_out};
    const int across = ceil_div(layer.fan_out, TILE_N), tiles = ceil_div(rows, TILE_M) * across;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const int m0 = t / across * TILE_M, n0 = t % across * TILE_N;
        Forward product;
        product.run(a, b, m0, n0, 0, layer.fan_in, stages());
        product.stage(output_tile());
        f(t, m0, n0);
        __syncthreads();  // before the next tile's stages
    }
}

__device__ __noinline__ void forward_hidden(int l, const Batch& batch, const float* flat, int rows, Flags* flags) {
    const Layer& layer = ENGINE.layer[l];
    u32 largest = 0;
    forward_tiles(l, batch, rows, [&](int, int m0, int n0) {
        const Columns columns(layer, n0 + Output::column(), flat);
        Output::for_each_row(output_tile(), [&](int r, const float4& v) {
            hidden_output(layer, columns, rows, m0 + r, v, largest);
        });
    });
    if (flags) warp_largest(&flags->output[l + 1], largest);
}

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
    const Layer& layer, const Batch& batch, const float* logits, int r, u32& largest, const Keep& keep) {
    const float weight = row_weight(batch, r);
    Element* error = layer.error + (i64)r * layer.ld_out;
    const float loss = softmax_row(
        logits, layer.fan_out, LABELS ? batch.labels[r] : 0,
        LABELS ? nullptr : batch.targets + (i64)r * layer.fan_out, [&](int c, float slope) {
            largest = max(largest, magnitude_bits(weight * slope));
            error[c] = to_element(weight * slope);
            keep(c, weight * slope);
        });
    for (int c = layer.fan_out + (threadIdx.x & 31); c < layer.ld_out; c += 32) error[c] = to_element(0.f);
    return (threadIdx.x & 31) == 0 ? weight * loss : 0.f;
}

// The rows of the output tile, which holds all columns; becomes their errors.
__device__ __forceinline__ float softmax_tile(const Layer& layer, const Batch& batch, int rows, int m0, u32& largest) {
    float loss = 0.f;
    const float* bias = ENGINE.parameters + layer.bias_offset;
    for (int r = threadIdx.x >> 5; r < TILE_M; r += THREADS / 32) {
        float* row = output_tile() + r * Output::STRIDE;
        for (int c = threadIdx.x & 31; c < layer.fan_out; c += 32) row[c] = m0 + r < rows ? row[c] + bias[c] : 0.f;
        __syncwarp();
        if (m0 + r < rows)
            loss += softmax_error(layer, batch, row, m0 + r, largest, [&](int c, float error) { row[c] = error; });
    }
    return loss;
}

__device__ __noinline__ void forward_output(const Batch& batch, int rows, Flags& flags) {
    const int l = ENGINE.layers - 1;
    const Layer& layer = ENGINE.layer[l];
    u32 largest = 0;
    forward_tiles(l, batch, rows, [&](int t, int m0, int n0) {
        const Columns columns(layer, n0 + Output::column(), ENGINE.parameters);
        if (softmax_apart()) {
            Output::for_each_row(output_tile(), [&](int r, const float4& v) {
                network_output(layer, columns, ENGINE.logits, rows, m0 + r, v);
            });
            return;
        }
        float loss = 0.f;
        float4 sum = zeros();
        if (LOSS == SOFTMAX_CROSS_ENTROPY) {
            loss = softmax_tile(layer, batch, rows, m0, largest);
            __syncthreads();
            Output::for_each_row(output_tile(), [&](int, const float4& v) { add_to(sum, v); });
        } else {
            Output::for_each_row<2>(
                output_tile(), [&](int r) { return load_wanted(layer, columns, batch, rows, m0 + r); },
                [&](int r, const float4& v, const Wanted& wanted) {
                    add_to(sum, output_error(layer, columns, wanted, rows, m0 + r, v, loss, largest));
                });
        }
        put_loss(t, loss, flags);
        Output::column_sums(
            output_tile(), sum, layer.column_sums + (i64)(m0 / TILE_M) * layer.ld_out + n0, layer.ld_out - n0);
    });
    if (!softmax_apart()) warp_largest(&flags.error[l], largest);
}

// Softmax cross-entropy from the logits, a warp a row.
__device__ __noinline__ void softmax_rows(const Batch& batch, int rows, Flags& flags) {
    const int l = ENGINE.layers - 1;
    const Layer& layer = ENGINE.layer[l];
    u32 largest = 0;
    for (int t = blockIdx.x; t * LOSS_ROWS < rows; t += gridDim.x) {
        const int end = min(rows, (t + 1) * LOSS_ROWS);
        float loss = 0.f;
        for (int r = t * LOSS_ROWS + (threadIdx.x >> 5); r < end; r += THREADS / 32) {
            const float* logits = ENGINE.logits + (i64)r * layer.fan_out;
            loss += softmax_error(layer, batch, logits, r, largest, [](int, float) {});
        }
        put_loss(t, loss, flags);  // the rows' errors are written when it returns
        for (int c = threadIdx.x; c < layer.fan_out; c += THREADS) {
            float sum = 0.f;
            for (int r = t * LOSS_ROWS; r < end; ++r) sum += to_float(layer.error[(i64)r * layer.ld_out + c]);
            layer.column_sums[(i64)t * layer.ld_out + c] = sum;
        }
        __syncthreads();
    }
    warp_largest(&flags.error[l], largest);
}

__device__ __noinline__ void backward(int l, int rows, Flags& flags) {  // error of layer l - 1
    const Layer &layer = ENGINE.layer[l], &below = ENGINE.layer[l - 1];
    const View a = {layer.error, layer.ld_out, rows, layer.ld_out};
    const View b = {layer.weight, layer.ld_out, layer.fan_in, layer.ld_out};
    const int across = ceil_div(layer.fan_in, TILE_N), tiles = ceil_div(rows, TILE_M) * across;
    u32 largest = 0;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const int m0 = t / across * TILE_M, n0 = t % across * TILE_N;
        Backward product;
        product.run(a, b, m0, n0, 0, layer.fan_out, stages());
        product.stage(output_tile());
        const Columns columns(below, n0 + Output::column(), nullptr);
        float4 sum = zeros();
        Output::for_each_row<4>(
            output_tile(), [&](int r) { return load_slope(below, columns, rows, m0 + r); },
            [&](int r, const float4& v, const float4& slope) {
                add_to(sum, hidden_error(below, columns, rows, m0 + r, v, slope, largest));
            });
        Output::column_sums(
            output_tile(), sum, below.column_sums + (i64)(m0 / TILE_M) * below.ld_out + n0, below.ld_out - n0);
    }
    warp_largest(&flags.error[l - 1], largest);
}

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

// Adds the splits of a weight-gradient tile in their order; true in the block that came last, which then holds the sum.
__device__ __forceinline__ bool add_splits(Gradient& product, const Layer& layer, int tile, int split) {
    __shared__ u32 arrived;
    const auto place = [&](int s) {
        return (float2*)ENGINE.partial_tiles +
               ((i64)layer.first_task + (i64)tile * layer.splits + s) * (GRADIENT_M * GRADIENT_N / 2) +
               threadIdx.x % (THREADS / GradientTile::WK);
    };
    constexpr int STRIDE = THREADS / GradientTile::WK;
    if (product.holds_results())
#pragma unroll
        for (int p = 0; p < Gradient::PAIRS; ++p)
            place(split)[p * STRIDE] = make_float2(product.c[2 * p], product.c[2 * p + 1]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = ENGINE.tile_arrivals + layer.first_tile + tile;
        arrived = atomicAdd(counter, 1);
        if (arrived == layer.splits - 1) *counter = 0;
    }
    __syncthreads();
    const bool last = arrived == layer.splits - 1;
    if (last) {
        __threadfence();
#pragma unroll
        for (int i = 0; i < 2 * Gradient::PAIRS; ++i) product.c[i] = 0.f;
        if (product.holds_results())
            for (int s = 0; s < layer.splits; ++s)
#pragma unroll
                for (int p = 0; p < Gradient::PAIRS; ++p) {
                    const float2 part = __ldcg(place(s) + p * STRIDE);
                    product.c[2 * p] += part.x;
                    product.c[2 * p + 1] += part.y;
                }
    }
    __syncthreads();
    return last;
}

__device__ __forceinline__ void weight_task(int l, int task, const Batch& batch, int rows, bool direct, const Hyper& h) {
    const Layer& layer = ENGINE.layer[l];
    const View a = {layer_input(l, batch), layer.ld_in, rows, layer.ld_in};
    const View b = {layer.error, layer.ld_out, rows, layer.ld_out};
    const int tile = task / layer.splits, split = task % layer.splits;
    const int m0 = tile / layer.tiles_n * GRADIENT_M, n0 = tile % layer.tiles_n * GRADIENT_N;
    const int depth = ceil_div(ceil_div(rows, GRADIENT_K), layer.splits) * GRADIENT_K;
    Gradient product;
    product.run(a, b, m0, n0, split * depth, min(rows, (split + 1) * depth), stages());
    if (layer.splits > 1 && !add_splits(product, layer, tile, split)) return;
    product.stage(output_tile());
    const int c = n0 + GradientOutput::column();
    if (direct)
        GradientOutput::for_each_row<2>(
            output_tile(), [&](int r) { return load_weights(layer, m0 + r, c); },
            [&](int r, const float4& v, Parameters& parameters) { weight_update(layer, h, m0 + r, c, v, parameters); });
    else
        GradientOutput::for_each_row(
            output_tile(), [&](int r, const float4& v) { weight_gradient(layer, m0 + r, c, v); });
    __syncthreads();
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

// Block 0: the loss of the step, in the order of its parts, and the tally.
__device__ __forceinline__ void finish_loss(int s, int rows, float weight) {
    const int across = softmax_apart() ? 1 : ceil_div(ENGINE.layer[ENGINE.layers - 1].fan_out, TILE_N);
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

__device__ __noinline__ void gradients(const Batch& batch, int rows, bool direct, const Hyper& h) {
    int l = 0;
    for (int task = blockIdx.x; task < ENGINE.gradient_tasks; task += gridDim.x) {
        while (l + 1 < ENGINE.layers && task >= ENGINE.layer[l + 1].first_task) ++l;
        weight_task(l, task - ENGINE.layer[l].first_task, batch, rows, direct, h);
    }
    // Bias tasks go on where the weights' end: the blocks next in turn take them.
    int before = ENGINE.gradient_tasks;
    for (l = 0; l < ENGINE.layers; ++l) {
        const int tasks = ceil_div(ENGINE.layer[l].fan_out, BIAS_COLUMNS);
        const int skip = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x;
        for (int task = skip; task < tasks; task += gridDim.x) bias_task(l, task, rows, direct, h);
        before += tasks;
    }
}

__device__ __forceinline__ void sum_weights(const Batch& batch, int rows, Flags& flags) {
    double sum = rows;
    if (batch.weights) {
        sum = 0.;
        for (int r = threadIdx.x; r < rows; r += THREADS) sum += batch.weights[r];
        sum = block_sum(sum);
    }
    if (threadIdx.x == 0) flags.weight = (float)sum;
}

// One step; ends with a barrier behind the update, or behind the gradients where other ranks' are still to come.
__device__ __forceinline__ void train_step(
    const Raw& raw, int s, int end, GridBarrier& barrier, Progress& progress) {
    __shared__ Hyper hyper;
    const StepInfo info = ENGINE.steps[s];
    const Batch& batch = ENGINE.batches[s & 1];
    Flags& flags = ENGINE.control->flags[s & 1];
    Flags& next = ENGINE.control->flags[s + 1 & 1];
    const int rows = info.rows, last = ENGINE.layers - 1;

    if (blockIdx.x == 0)  // the last step is over everywhere, the next has not begun
        for (int i = threadIdx.x; i < sizeof(Flags) / 4; i += THREADS) ((u32*)&next)[i] = 0;
    if (blockIdx.x == gridDim.x - 1) sum_weights(batch, rows, flags);

    for (int l = 0; l < last; ++l) {
        forward_hidden(l, batch, ENGINE.parameters, rows, &flags);
        barrier.wait();
    }
    forward_output(batch, rows, flags);
    barrier.wait();
    if (softmax_apart()) {
        softmax_rows(batch, rows, flags);
        barrier.wait();
    }
    for (int l = last; l > 0; --l) {
        backward(l, rows, flags);
        barrier.wait();
    }

    const bool direct =
        OPTIMIZER != LAMB && !ENGINE.needs_norm && !ENGINE.deferred && surely_finite(flags, rows);
    if (direct) {
        ++progress.step;
        if (threadIdx.x == 0) set_hyper(hyper, info.rate, 1.f / flags.weight, progress.step);
        __syncthreads();
    }
    gradients(batch, rows, direct, hyper);
    if (blockIdx.x == 0) finish_loss(s, rows, flags.weight);
    if (s + 1 < end) {
        const StepInfo following = ENGINE.steps[s + 1];
        gather_rows<RAW_TYPE>(raw, following.first, following.rows, ENGINE.batches[s + 1 & 1], &next.output[0]);
    }
    barrier.wait();
    if (!direct && !ENGINE.deferred) {
        apply_gradient(s, barrier, progress);
        barrier.wait();
    }
}

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) train_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first) {
    const Raw raw = {inputs, targets, labels, weights, index};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};

    if (apply_first && !progress.frozen) apply_gradient(begin - 1, barrier, progress);
    if (begin < end)
        gather_rows<RAW_TYPE>(
            raw, ENGINE.steps[begin].first, ENGINE.steps[begin].rows, ENGINE.batches[begin & 1],
            &control.flags[begin & 1].output[0]);
    barrier.wait();
    for (int s = begin; s < end; ++s) {
        if (!progress.frozen) train_step(raw, s, end, barrier, progress);
        else if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
    }
    if (blockIdx.x == 0) {  // behind the last barrier: nobody reads these any more
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x == 0) {
            control.step = progress.step;
            control.skipped = progress.skipped;
            control.frozen = progress.frozen;
        }
    }
}

// Outputs (rows, outputs) float for `rows` raw rows with the biases of `flat`; weights are the packed copies.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) forward_rows(
    const void* inputs, const float* flat, float* out, int rows) {
    const Raw raw = {inputs, nullptr, nullptr, nullptr, nullptr};
    const Batch& batch = ENGINE.batches[0];
    GridBarrier barrier(&ENGINE.control->forward_barrier);
    gather_rows<RAW_F32>(raw, 0, rows, batch, nullptr);
    barrier.wait();
    const int last = ENGINE.layers - 1;
    for (int l = 0; l < last; ++l) {
        forward_hidden(l, batch, flat, rows, nullptr);
        barrier.wait();
    }
    const Layer& layer = ENGINE.layer[last];
    forward_tiles(last, batch, rows, [&](int, int m0, int n0) {
        const Columns columns(layer, n0 + Output::column(), flat);
        Output::for_each_row(
            output_tile(), [&](int r, const float4& v) { network_output(layer, columns, out, rows, m0 + r, v); });
    });
}

// Copies of the weights for the products from the flat buffer. Any grid.
extern "C" __global__ void pack_weights(const float* flat) {
    for (int l = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = ENGINE.layer[l];
        for_each_weight(layer, [&](int r, int c) {
            layer.weight[(i64)r * layer.ld_out + c] = to_element(flat[layer.weight_offset + (i64)r * layer.fan_out + c]);
        });
    }
}

// For the host to check its own arithmetic against.
__host__ __device__ constexpr int largest_of(int a, int b) { return a > b ? a : b; }
extern "C" __constant__ int SIZES[] = {
    sizeof(Engine), sizeof(Layer), sizeof(Control),
    largest_of(Forward::SHARED_BYTES, largest_of(Backward::SHARED_BYTES, Gradient::SHARED_BYTES))};
