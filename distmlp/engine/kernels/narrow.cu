// Whole training steps of a narrow network in one cooperative launch: weights, activations and errors of a tile of
// rows live in shared memory, a block takes its tiles through all layers without waiting for any other block.
//
//   per tile      forward, loss, backward in registers (narrow_chain.cuh); weight gradients on top of those of the
//                 block's other tiles, in registers (narrow_sums.cuh)
//   per step      partial sums out; barrier; every block adds up a slice over all blocks in their order and updates
//                 it (narrow_exchange.cuh); barrier; the new weights in
//
// No sum depends on the order in which blocks run. Clipping and LAMB, which need a norm first, and gradients that
// other ranks are still to add to go through the flat gradient buffer and update.cuh instead.
#include "narrow_exchange.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(SHARED_BYTES == NARROW_SHARED_BYTES, "plan_narrow.py and narrow_shape.cuh agree");

// The column of ones beside every activation whose layer's bias gradient is summed with its weight's.
template <int L>
__device__ __forceinline__ void write_ones() {
    if constexpr (L < LAYERS) {
        if constexpr (out_major(L)) {
            for (int i = threadIdx.x; i < TILE; i += BLOCK_THREADS) {  // row i
                const int block = (i >> 3) * CONSTANT(activation_columns(L)) + CONSTANT(columns(L));
                *(uint4*)(dynamic_shared + CONSTANT(activation_at(L)) + block * BLOCK_BYTES + (i & 7) * 16) =
                    make_uint4(0x3f80u, 0u, 0u, 0u);
            }
        }
        write_ones<L + 1>();
    }
}

// This block's tiles of a step; partial sums out.
__device__ __forceinline__ void sum_tiles(const Raw& raw, const StepInfo& info, float* partial) {
    const u32 shared = shared_address(dynamic_shared);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    const Chain chain = {shared, (const float*)(dynamic_shared + SCALES_AT), 2 * warp};
    const int tiles = (info.rows + TILE - 1) / TILE;
    Totals totals = {};
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (CHAINS == GROUPS || group < CHAINS) {
            const int at = tile * TILE + 16 * warp;
            const RowPair rows = pick_rows(raw, info.first, info.rows, at + (lane >> 2));
            u32 a[2 * columns(0)];
            chain.load_inputs(raw, info, rows, at, a);
            if ((lane & 3) == 0) totals.weight += rows.weight[0] + rows.weight[1];
            chain.forward<0>(a, raw, rows, totals);
            publish_operands();
        }
        __syncthreads();
        add_tile<0>(group, sums, shared);
        __syncthreads();
    }
    Limit limit = {false};
    write_items<0>(group, sums, partial, limit);
    write_totals(totals, (float*)(dynamic_shared + EXCHANGE_AT), partial, limit);
}

// f(flat element, its place, its gradient summed over `count` producers) for this block's slice; threads 0 to 127.
// `before` is called ahead of the loads, with the element.
template <class Before, class F>
__device__ __forceinline__ void for_each_sum(const float* partials, int count, const Before& before, const F& f) {
    float* scratch = (float*)(dynamic_shared + EXCHANGE_AT);
    for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x) {
        const int e = chunk * CHUNK + threadIdx.x;
        Place place = {-1, -1, 0, 0};
        if (threadIdx.x < CHUNK && e < FLAT_SIZE) place = locate(e);
        if (place.layer >= 0) before(e, chunk != blockIdx.x);
        sum_chunk(partials, count, chunk, scratch + (threadIdx.x >> 5) * WARP_SUMS);
        __syncthreads();
        if (place.layer >= 0) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += scratch[w * WARP_SUMS + threadIdx.x];
            f(e, place, sum);
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void refresh_weights(const Buffers& buffers) {
    load_image(buffers, dynamic_shared);
    publish_operands();
    __syncthreads();
}

// Sums, update and new weights in one go between two barriers.
__device__ __forceinline__ void update_directly(
    int s, bool last, int count, const Buffers& buffers, GridBarrier& barrier, Progress& progress) {
    __shared__ Hyper hyper;
    const int e = blockIdx.x * CHUNK + threadIdx.x;
    Parameter own = {};
    if (threadIdx.x < CHUNK && e < FLAT_SIZE) own.load(e);
    wait_meanwhile(barrier, [&] { set_hyper(hyper, ENGINE.steps[s].rate, 1.f, progress.step + 1); });
    const StepTotals totals = sum_tallies(buffers.partials, count);
    Hyper h = hyper;
    h.scale = 1.f / totals.weight;
    const bool update = !totals.bad && totals.weight != 0.f;
    if (update) {
        for_each_sum(
            buffers.partials, count,
            [&](int element, bool again) {
                if (again) own.load(element);
            },
            [&](int element, const Place& place, float sum) {
                own.value = update_rule(h, own.value, sum, own.first, own.second);
                own.mean = average(h.ema_decay, own.mean, own.value);
                own.store(element);
                publish(buffers, place, own.value);
            });
        ++progress.step;
    } else if (totals.bad) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ENGINE.results[s] = StepResult{
            totals.loss, totals.weight, !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
    barrier.wait();
    if (update && !last) refresh_weights(buffers);
}

// The sums to the flat gradient, the tally behind it.
__device__ __forceinline__ void reduce_to_gradient(
    int s, const StepInfo& info, int count, const Buffers& buffers, GridBarrier& barrier) {
    barrier.wait();
    const StepTotals totals = sum_tallies(buffers.partials, count);
    for_each_sum(
        buffers.partials, count, [](int, bool) {},
        [&](int element, const Place&, float sum) { ENGINE.gradient[element] = sum; });
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        float* tally = ENGINE.gradient + ENGINE.size;
        for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
        tally[TALLY_LOSS] = totals.bad ? __int_as_float(0x7fc00000) : (float)totals.loss;
        tally[TALLY_WEIGHT] = totals.weight;
        tally[TALLY_ROWS] = (float)info.rows;
        ENGINE.results[s] = StepResult{totals.loss, totals.weight, DONE};
    }
}

}  // namespace narrow

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(narrow::BLOCK_THREADS, 1) narrow_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, u8* image) {
    using namespace narrow;
    const Raw raw = {inputs, targets, labels, weights, index};
    const Buffers buffers = {partials, image};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};

#if !NARROW_DIRECT
    if (apply_first && !progress.frozen) {
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
    }
#endif
    write_ones<0>();
    load_scales((float*)(dynamic_shared + SCALES_AT));
    publish_all(buffers);
    barrier.wait();
    refresh_weights(buffers);
    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
#if !NARROW_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        const StepInfo info = ENGINE.steps[s];
        const int count = producers(info.rows);
        if (blockIdx.x < count) sum_tiles(raw, info, partials + (i64)blockIdx.x * PARTIAL_STRIDE);
#if NARROW_DIRECT
        update_directly(s, s + 1 == end, count, buffers, barrier, progress);
#else
        reduce_to_gradient(s, info, count, buffers, barrier);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_gradient(s, barrier, progress);
            barrier.wait();
            publish_all(buffers);
            barrier.wait();
            refresh_weights(buffers);
        }
#endif
    }
    // Behind the last barrier: parameters are final, and nobody reads the counters any more.
    if (!ENGINE.deferred) copy_weights();
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += BLOCK_THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x == 0) {
            control.step = progress.step;
            control.skipped = progress.skipped;
            control.frozen = progress.frozen;
        }
    }
}
