// Whole training steps in one cooperative launch, for any network: phases of tiles over the whole grid, a grid
// barrier where a phase needs all of the one before.
//
//   forward, layer by layer        A_l = f(A_(l-1) W_l + b_l); the last one computes the loss and its error instead
//   backward, layer by layer       E_(l-1) = (E_l W_l') f'(A_(l-1))
//   gradients of all layers        W_l' = A_(l-1)' E_l, sums of bias errors; with the update where that is possible
//   (update)                       clipping, LAMB, several ranks, doubtful magnitudes: update.cuh
//
// The rows of the next step are gathered beside the gradients. No sum depends on the order in which blocks run.
#define LAYER(l) near_layers[l]
#include "params.cuh"
__shared__ Layer near_layers[MAX_LAYERS];  // what every phase begins with: constants fall out of their cache between
#include "lanes.cuh"
#include "wide_gradients.cuh"

#ifndef MIN_BLOCKS  // per multiprocessor
#define MIN_BLOCKS 1
#endif

__device__ __forceinline__ void load_layers() {
    for (int i = threadIdx.x; i < ENGINE.layers * (int)(sizeof(Layer) / 8); i += THREADS)
        ((u64*)near_layers)[i] = ((const u64*)ENGINE.layer)[i];
    __syncthreads();
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

__device__ __forceinline__ bool may_update_directly() {
    return OPTIMIZER != LAMB && !ENGINE.needs_norm && !ENGINE.deferred;
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
    const bool lost = may_join() && rank_is_lost();  // nobody waits for ranks now: all blocks see the same

    if (blockIdx.x == 0)  // the last step is over everywhere, the next has not begun
        for (int i = threadIdx.x; i < sizeof(Flags) / 4; i += THREADS) ((u32*)&next)[i] = 0;
    if (blockIdx.x == gridDim.x - 1) sum_weights(batch, rows, flags);

    for (int l = 0; l < last; ++l) {
        forward_hidden(l, batch, ENGINE.parameters, rows, &flags);
        barrier.arrive();  // and while others are waited for:
        if (l == 0 && threadIdx.x == 32) set_hyper(hyper, info.rate, 0.f, progress.step + 1);  // slow, in float64
#if HEAD_OUTPUTS
        if (l == last - 1) load_head(rows);
#endif
        barrier.await();
    }
#if HEAD_OUTPUTS
    head(raw, info, batch, flags);
    barrier.wait();
    for (int l = last - 1; l > 0; --l) {
#else
    forward_output(raw, info, batch, flags);
    barrier.wait();
    if (softmax_apart()) {
        softmax_rows(raw, info, batch, flags);
        barrier.wait();
    }
    for (int l = last; l > 0; --l) {
#endif
        backward(l, rows, flags);
        barrier.wait();
    }

    const bool joined = may_join();
    if (joined && lost) {  // the host will say why
        progress.frozen = true;
        if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        return;
    }
    bool direct = (joined || may_update_directly()) && surely_finite(flags, flags.output[0], flags.weight, rows);
    if (joined) {  // whether to do so is awaited behind the products
        begin_agreement(direct || rows == 0, flags.weight, rows);
        if (blockIdx.x == 0) finish_loss(s, rows, flags.weight);
        if (blockIdx.x == 0 && threadIdx.x == TALLY_LOSS)
            send_loss(ENGINE.gradient[ENGINE.size + TALLY_LOSS]);
        if (last == 0 && threadIdx.x == 0) set_hyper(hyper, info.rate, 0.f, progress.step + 1);
        __syncthreads();
    } else if (direct) {
        ++progress.step;
        if (last == 0 && threadIdx.x == 0) set_hyper(hyper, info.rate, 0.f, progress.step);
        if (threadIdx.x == 0) hyper.scale = 1.f / flags.weight;
        __syncthreads();
    }
    direct = gradients(batch, rows, direct, hyper);
    if (joined) {
        if (direct) ++progress.step;
        if (direct && blockIdx.x == 0 && threadIdx.x == 0) put_joined_result(s);
    } else if (blockIdx.x == 0) {
        finish_loss(s, rows, flags.weight);
    }
    if (s + 1 < end) {
        const StepInfo following = ENGINE.steps[s + 1];
        gather_rows<RAW_TYPE>(raw, following.first, following.rows, ENGINE.batches[s + 1 & 1], &next.output[0]);
    }
    barrier.wait();
#if LANES
    keep_lane(s % ENGINE.lane_stride);  // who writes the gradient next waits for barriers before
#endif
    if (joined) count_exchange(direct);
    if (!direct && !ENGINE.deferred && !(joined && rank_is_lost())) {
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
    load_layers();
    Progress progress = {control.step, control.skipped, control.frozen != 0};
#if SEVERAL_RANKS
    if (ENGINE.needs_norm == PEERS_SUM) begin_joining();
#endif

#if LANES
    finish_lanes(apply_first);
    barrier.wait();
#endif
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

#if SEVERAL_RANKS
// The exchange by itself, to try it and to time it.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) sum_gradients() {
    GridBarrier barrier(&ENGINE.control->forward_barrier);
    Scan unused;
    exchange_gradient(unused);
    barrier.wait();
    finish_exchange();
}
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) spread_gradients() { spread_gradient(); }
#endif

// Outputs (rows, outputs) float for `rows` raw rows with the biases of `flat`; weights are the packed copies.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) forward_rows(
    const void* inputs, const float* flat, float* out, int rows) {
    const Raw raw = {inputs, nullptr, nullptr, nullptr, nullptr};
    const Batch& batch = ENGINE.batches[0];
    GridBarrier barrier(&ENGINE.control->forward_barrier);
    load_layers();
    gather_rows<RAW_F32, false>(raw, 0, rows, batch, nullptr);
    barrier.wait();
    const int last = ENGINE.layers - 1;
    for (int l = 0; l < last; ++l) {
        forward_hidden(l, batch, flat, rows, nullptr);
        barrier.wait();
    }
    const Layer& layer = LAYER(last);
    typedef ForwardOutput::Output Output;
    forward_tiles<ForwardOutput>(last, batch, flat, rows, [&](int, int m0, int n0, const Columns& columns) {
        Output::for_each_row(output_tile<ForwardOutput>(), [&](int r, const float4& v) {
            network_output(layer, columns, out, rows, m0 + r, v);
        });
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
    largest_of(
        largest_of(Forward::SHARED_BYTES, Backward::SHARED_BYTES),
        largest_of(ForwardOutput::SHARED_BYTES, Gradient::SHARED_BYTES))};
