// Whole training steps of networks of middle width in one cooperative launch, on Hopper.
//
//   per step   a block takes its 16, 32 or 64 rows through all layers, forward and backward, its activations in shared memory,
//              the weights streaming past (chain_layers.cuh); inputs of layers and errors go to device memory
//              -- grid barrier --
//              weight gradients, a tile and a part of the batch a pair of blocks; sums of the parts, update, new weights
//              (chain_gradients.cuh); beside it the biases, and the rows of the next step to shared memory
//              -- grid barrier --
//
// Where magnitudes leave it open whether gradients are finite, and for clipping and LAMB, gradients go to the flat
// buffer first (update.cuh). No sum depends on the order in which blocks run.
#include "chain_gradients.cuh"

namespace chain {

static_assert(PRODUCT == BF16, "operands are bfloat16");

// A block's part of the loss, weights and magnitudes of a batch, by one warp, for all blocks.
__device__ __forceinline__ void write_record(const Buffers& buffers) {
    float4 x = zeros();
    if (lane_id() < BLOCK_THREADS / 32) x = shared<float4>(WARPS_AT)[lane_id()];
    float weight = 0.f;
    for (int r = lane_id(); r < ROWS; r += 32) weight += shared<float>(WEIGHTS_AT)[r];
    const float loss = warp_sum(x.x);
    weight = warp_sum(weight);
    const u32 activation = __reduce_max_sync(~0u, __float_as_uint(x.y)), error = __reduce_max_sync(~0u, __float_as_uint(x.z));
    if (lane_id() == 0) __stcg(buffers.records + blockIdx.x, make_uint4(__float_as_uint(loss), __float_as_uint(weight), activation, error));
}

__device__ __forceinline__ u32 larger_half(u32 pair) { return max(pair << 16, pair & 0xffff0000u); }

}  // namespace chain

// Steps [begin, end) of the table. `apply_first` does not occur: gradients of other ranks are not for this kernel.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(chain::BLOCK_THREADS, 1) chain_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int, u8* pieces, u32* kept, float* column_sums, uint4* records, float4* partials, u32* arrivals) {
    using namespace chain;
    __shared__ Hyper hyper;
    __shared__ bool sure;
    const Raw raw = {inputs, targets, labels, weights, index};
    const Buffers buffers = {pieces, kept, column_sums, records, partials, arrivals};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
    Ring ring(shared_address(dynamic_shared));
    const u32 rank = rank_in_pair();
    const int warp = __shfl_sync(~0u, warp_id(), 0);
    const bool works = warp < WORKERS / 32, copies = warp == WORKERS / 32, helps = warp >= FIRST_HELPER;

    fill_table();
    if (threadIdx.x == 0) ring.init();
    if (threadIdx.x < BLOCK_THREADS / 32) shared<float4>(WARPS_AT)[threadIdx.x] = zeros();
    for (int i = blockIdx.x * BLOCK_THREADS + threadIdx.x; i < TILES * PAIR * GROUPS; i += gridDim.x * BLOCK_THREADS)
        buffers.arrivals[i] = 0;
    __syncthreads();
    publish_all(buffers);
    if (helps && begin < end) gather(raw, ENGINE.steps[begin]);
    __syncwarp();
    meet_pair();
    barrier.wait();

    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        const StepInfo info = ENGINE.steps[s];
        if ((int)blockIdx.x < blocks_at_work(info.rows)) {
            if (works) {
                Largest largest = {0, 0};
                float loss = 0.f;
                run_chain(buffers, raw, info, ring, largest, loss);
                loss = warp_sum(loss);
                const u32 activation = __reduce_max_sync(~0u, larger_half(largest.activation));
                const u32 error = __reduce_max_sync(~0u, larger_half(largest.error));
                if (lane_id() == 0)
                    shared<float4>(WARPS_AT)[warp] =
                        make_float4(loss, __uint_as_float(activation), __uint_as_float(error), 0.f);
            } else if (copies) {
                if (lane_id() == 0) {
                    fence_copies();
                    stream_weights(buffers, ring, rank);
                }
                ring.stage = __shfl_sync(~0u, ring.stage, 0);
                ring.parity = __shfl_sync(~0u, ring.parity, 0);
            } else {
                prefetch(raw, info, s + 1 < end ? ENGINE.steps + s + 1 : nullptr);
            }
            __syncthreads();
            if (warp == 0) write_record(buffers);
        }
        fence_copies();
        barrier.wait();

        if (works) {
            sum_and_update(buffers, ring, rank, info.rows, s - begin + 1, hyper, sure);
        } else if (copies) {
            if (lane_id() == 0) {
                fence_copies();
                stream_gradients(buffers, ring, rank, info.rows);
            }
            ring.stage = __shfl_sync(~0u, ring.stage, 0);
            ring.parity = __shfl_sync(~0u, ring.parity, 0);
        } else {
            if (s + 1 < end) gather(raw, ENGINE.steps[s + 1]);
            if (warp == FIRST_HELPER) {
                const Totals totals = collect(buffers, info.rows);
                if (lane_id() == 0) {
                    sure = totals.sure && OPTIMIZER != LAMB && !ENGINE.needs_norm;
                    if (sure) set_hyper(hyper, info.rate, 1.f / totals.weight, progress.step + 1);
                    if (blockIdx.x == 0) {
                        control.flags[s + 1 & 1].gradient_not_finite = 0;  // last used in step s - 1
                        if (sure) {
                            ENGINE.results[s] = StepResult{totals.loss, totals.weight, DONE};
                        } else {
                            float* tally = ENGINE.gradient + ENGINE.size;
                            for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
                            tally[TALLY_LOSS] = (float)totals.loss;
                            tally[TALLY_WEIGHT] = totals.weight;
                            tally[TALLY_ROWS] = (float)info.rows;
                        }
                    }
                }
                __syncwarp();
                arrive(TOTALS_KNOWN, WORKERS + 32);
            }
            meet(HELPERS_MEET, 32 * HELPERS);
            update_biases(buffers, info.rows, hyper, sure);
        }
        fence_copies();
        __syncthreads();
        const bool done = sure;
        barrier.wait();
        if (done) {
            ++progress.step;
            continue;
        }
        apply_gradient(s, barrier, progress);
        barrier.wait();
        publish_all(buffers);
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
