// Whole training steps of networks of middle width in one cooperative launch, on Hopper.
//
//   per step   a block takes its 16, 32 or 64 rows through all layers, forward and backward, its activations in shared memory,
//              the weights streaming past (chain_layers.cuh); inputs of layers and errors go to device memory; beside
//              it the rows of the next step are gathered (chain_rows.cuh)
//              -- a layer's gradients wait for the blocks with rows of their part of the batch --
//              weight gradients, a tile and a part of the batch a pair of blocks; sums of the parts, update, new weights
//              (chain_gradients.cuh); beside it the biases
//              -- a layer's weights wait for all that update them --
//
// Where magnitudes leave it open whether gradients are finite, and for clipping and LAMB, gradients go to the flat
// buffer first (update.cuh); so do those that other ranks are to add to between two launches. The ranks of one host add
// theirs up inside the kernel (chain_ranks.cuh). No sum depends on the order in which blocks run.
#include "chain_gradients.cuh"

static_assert(PRODUCT == BF16, "operands are bfloat16");

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(chain::BLOCK_THREADS, 1) chain_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, u8* pieces, u32* kept, float* column_sums, uint4* records, float4* partials, u32* arrivals) {
    using namespace chain;
    if (threadIdx.x == 0) {
        context.raw = {inputs, targets, labels, weights, index};
        context.buffers = {pieces, kept, column_sums, records, partials, arrivals, arrivals + ARRIVALS,
                           arrivals + ARRIVALS + LAYERS * SPLITS + 1};
        context.blocks = context.blocks_of_split = context.fetches = 0;
#if CHAIN_PEERS
        ranks_seen.begin();
#endif
    }
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
    Ring ring(shared_address(dynamic_shared));
    const int warp = __shfl_sync(~0u, warp_id(), 0);
    const bool works = warp < WORKERS / 32, copies = warp == WORKERS / 32;

    fill_table();
    if (threadIdx.x == 0) ring.init();
    if (threadIdx.x < BLOCK_THREADS / 32) shared<float4>(WARPS_AT)[threadIdx.x] = zeros();
    for (int i = blockIdx.x * BLOCK_THREADS + threadIdx.x; i < COUNTERS; i += gridDim.x * BLOCK_THREADS)
        arrivals[i] = 0;
    __syncthreads();
#if SEVERAL_RANKS && !CHAIN_PEERS
    if (apply_first && !progress.frozen) {
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
    }
#endif
    publish_all();
    if (warp > FIRST_HELPER && begin < end) gather(begin, 0, 0);
    __syncthreads();
    if (warp == FIRST_HELPER && lane_id() == 0 && begin < end && fetch_inputs(ring, begin, 0)) await_inputs(ring);
    __syncwarp();
    meet_pair();
    barrier.wait();

    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        const int rows = ENGINE.steps[s].rows;
        const u32 done = s - begin;
        const int parity = done & 1;
        const bool has_rows = (int)blockIdx.x < blocks_at_work(rows);
        if (works) {
            if (has_rows) ring = run_chain(ring, parity);
            ring = sum_and_update(ring, rows, done, parity);
        } else if (copies) {
            if (lane_id() == 0) {
                if (has_rows) ring = stream_weights(ring, done);
                ring = stream_gradients(ring, rows, done, parity);
            }
            __syncwarp();
        } else {
            if (warp == FIRST_HELPER) {
                if (has_rows) store_chain(ring.base, rows, done, parity);
            } else {
                if (has_rows) prefetch_targets(parity);
                if (s + 1 < end) gather(s + 1, done, parity ^ 1);
            }
            meet(HELPERS_MEET, 32 * HELPERS);
            bool fetches = false;
            if (warp == FIRST_HELPER) {
                if (lane_id() == 0) {
                    if (s + 1 < end) fetches = fetch_inputs(ring, s + 1, parity ^ 1);
                    await_all(rows);
                }
                __syncwarp();
#if CHAIN_PEERS
            }
            join_ranks(s, progress.step, rows, done, parity);
#else
                prepare_update(s, progress.step, parity);
                __syncwarp();
                arrive(TOTALS_KNOWN, WORKERS + 32);
            }
            meet(HELPERS_MEET, 32 * HELPERS);
            update_biases(rows, parity);
#endif
            meet(HELPERS_MEET, 32 * HELPERS);
            if (warp == FIRST_HELPER && lane_id() == 0) count_up(context.buffers.updated + LAYERS);
            if (fetches) await_inputs(ring);
            __syncwarp();
        }
        __syncthreads();
#if CHAIN_PEERS
        if (blockIdx.x == 0 && threadIdx.x == 0) ranks_seen.end(done + 1);
#endif
        if (context.sure[parity]) {
            ++progress.step;
            continue;
        }
#if CHAIN_PEERS
        if (!meet_unsure(s, barrier, progress)) continue;
#elif SEVERAL_RANKS
        if (ENGINE.deferred) continue;
        barrier.wait();
#else
        barrier.wait();
#endif
        apply_gradient(s, barrier, progress);
        barrier.wait();
        publish_all();
        barrier.wait();
    }
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += BLOCK_THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x == 0) {
            control.step = progress.step;
            control.skipped = progress.skipped;
            control.frozen = progress.frozen;
        }
    }
    meet_pair();
}
