// Whole training steps of a small batch in one cooperative launch, for networks whose parameters and optimizer state fit
// the shared memory of all multiprocessors together: they stay there from step to step.
//
//   forward      a block computes some columns of every hidden layer for a group of rows, and waits for nothing but the
//                data themselves
//   output       every block does the output layer, the loss and the last hidden layer's error for its group
//   backward     errors of the block's own columns, layer by layer
//   update       behind the one grid barrier of a step: gradients over all rows of the block's own patches of weights,
//                their update, and new weights to where everybody reads them; those of upper layers in the next step
//
// Whether gradients are finite is told from magnitudes (see `large_weight`); where these leave it open, no update comes before
// all gradients have been looked at. No sum depends on the order in which blocks run.
#include "resident_step.cuh"

// Steps [begin, end) of the table.
extern "C" __global__ void __launch_bounds__(resident::BLOCK_THREADS, 1) resident_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int, u8* exchange) {
    using namespace resident;
    __shared__ Hyper hyper[2];
    __shared__ StepInfo infos[8];
    const Raw raw = {inputs, targets, labels, weights, index};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
#if RESIDENT_RANKS > 1
    if (threadIdx.x == 0) ranks_seen.begin();
#endif
    if (threadIdx.x < 2) set_hyper(hyper[threadIdx.x], 0.f, 1.f, progress.step + 1);
    if (blockIdx.x == 0 && threadIdx.x < 4) ((u32*)(exchange + FLAGS_AT))[threadIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x < COUNTERS) *counter(exchange, threadIdx.x) = 0;
    barrier.wait();

    Steps steps(raw, exchange, barrier, progress, hyper, infos, end);
    steps.clear();
    steps.large = move_weights<true>(exchange);
    move_few<true>(steps.place);
    steps.begin(begin);
    barrier.wait();
    for (int s = begin; s < end; ++s) {
        if (!progress.frozen) {
            steps.step(s);
            continue;
        }
        steps.report(s);
        if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        steps.reported = s + 1;
    }
    steps.report(end);
    steps.catch_up();
    __syncthreads();
    move_weights<false>(exchange);
    move_few<false>(steps.place);
#if RESIDENT_RANKS > 1
    if (blockIdx.x == 0 && threadIdx.x == 0) ranks_seen.end(steps.k);
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0) {  // all blocks have read them at the start
        control.step = progress.step;
        control.skipped = progress.skipped;
        control.frozen = progress.frozen;
    }
}
