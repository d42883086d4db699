// Whole training steps of a network of narrow layers in TF32 or float32, in one cooperative launch. A block has its
// rows in shared memory, as many at a time as fit, and takes them up and down through all layers by itself.
//
//   per step      strips of rows forward and backward (strips_layers.cuh), each layer's weight gradient in registers
//                 when its turn comes, then out as the block's partial sums; a barrier; every block adds up some parameters'
//                 over all blocks in their order and updates them; a barrier
//
// No sum depends on the order in which blocks run.
#include "strips_exchange.cuh"

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(strips::BLOCK_THREADS, 1) strips_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, float* image, float* kept) {
    using namespace strips;
    const Raw raw = {inputs, targets, labels, weights, index};
    const Buffers buffers = {partials, image};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
#if !STRIP_DIRECT
    if (apply_first && !progress.frozen) {
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
    }
#endif
    __shared__ Hyper hyper;
    publish_all(image);
    barrier.wait();
    const Strip strip = {
        (u32)__cvta_generic_to_shared(dynamic_shared), kept + (i64)blockIdx.x * KEPT_COPIES * KEPT_FLOATS, image,
        partials + (i64)blockIdx.x * PARTIAL_STRIDE, __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), (int)threadIdx.x & 31};
    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        const StepInfo info = ENGINE.steps[s];
        const int count = min((int)gridDim.x, (info.rows + 15) / 16), strips = Share::strips(info.rows);
#if !STRIP_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        if (threadIdx.x == BLOCK_THREADS - 1) set_hyper(hyper, info.rate, 1.f, progress.step + 1);
        Totals totals = {};
        Limit limit = {false};
        for (int i = 0; i < strips; ++i) {
            const Share share(i, info.rows);
            if (i == 0) {
                constexpr int BIASES = PARAMETERS - bias_at(0);
                for (int k = threadIdx.x * 4; k < BIASES; k += BLOCK_THREADS * 4)
                    copy16(strip.shared + BIASES_AT + 4 * k, image + FIXED(bias_at(0)) + k);
            }
            if (i == 0 && ALL_WEIGHTS) {
                for (int k = threadIdx.x * 4; k < FIXED(weight_at(LAYERS)); k += BLOCK_THREADS * 4)
                    copy16(strip.shared + WEIGHTS_AT + 4 * k, image + k);
            } else if (!ALL_WEIGHTS) {
                strip.ask_weights(0);
            }
            copy_commit();
            if (i > 0 || s == begin) take_rows(raw, info, i, strip.kept);
            if (i + 1 < strips) prefetch_rows(raw, info, i + 1);
            else if (s + 1 < end) prefetch_rows(raw, ENGINE.steps[s + 1], 0);
            forward<0>(strip, raw, share.rows, totals);
            __syncthreads();
            begin_stages<LAYERS - 1>(strip, 0, share.rows);
            backward<LAYERS - 1>(strip, share.rows, i > 0, limit);
        }
        deliver(totals, limit, buffers.tallies() + blockIdx.x);
        barrier.arrive();
        if (s + 1 < end) take_rows(raw, ENGINE.steps[s + 1], 0, strip.kept);  // waits for no other block
        barrier.await();
#if STRIP_DIRECT
        update_directly(s, count, buffers, hyper, progress);
#else
        reduce_to_gradient(s, info, count, buffers);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_gradient(s, barrier, progress);
            barrier.wait();
            publish_all(image);
        }
#endif
        barrier.wait();
    }
    // A block's own parameters are final, and all blocks have read the counters long ago.
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
