// Whole training steps of a large network on Hopper in one cooperative launch. Matrices lie in the form that `wgmma`
// reads, so that stages are filled by bulk copies (bulk_copy.cuh): one warp of a block copies, two warpgroups multiply.
//
//   chain       forward layer by layer, loss, errors back layer by layer: one list of tiles, no grid barrier. A tile
//               waits for the tiles of its rows in the phase before, which other blocks announce.
//   gradients   weight gradients by tiles and, where there are few, by shares of the batch; with the update where
//               that is possible. The rows of the next step are gathered beside them.
//
// A grid barrier behind either. No sum depends on the order in which blocks run.
#include "bulk_gradients.cuh"
#include "bulk_rows.cuh"
#include "magnitudes.cuh"

#define BULK_THREADS (CONSUMERS + 32)
extern __shared__ __align__(1024) u8 dynamic_shared[];

struct Memory {  // beside the engine's
    Places places;
    double* losses;
    float2* partials;
    u32 *state, *ready, *arrived;  // state: whether weight copies are current, gradient phases so far
    int row_blocks;                // that `ready` has for a phase

    // Tiles announced by the phases of a step: (2, phases, row blocks).
    __device__ __forceinline__ u32* announced(int s, int phase, int row_block) const {
        return ready + ((i64)(s & 1) * (2 * ENGINE.layers - 1) + phase) * row_blocks + row_block;
    }
};

struct Phase {
    int number;
    __device__ __forceinline__ bool forward() const { return number < ENGINE.layers; }
    __device__ __forceinline__ int layer() const { return forward() ? number : 2 * ENGINE.layers - 1 - number; }
    __device__ __forceinline__ int across() const {
        const Layer& l = LAYER(layer());
        return ((forward() ? l.fan_out : l.fan_in) + BULK_N - 1) / BULK_N;
    }
};

// tile(phase, row block, tile across) for this block's tiles of the chain, in the order in which all become ready.
template <class F>
__device__ __forceinline__ void for_each_tile(int row_blocks, const F& tile) {
    int before = 0;  // tiles of the phases before, modulo the grid
    for (Phase phase = {0}; phase.number < 2 * ENGINE.layers - 1; ++phase.number) {
        const int across = phase.across(), tiles = row_blocks * across;
        const int first = (int)blockIdx.x - before;
        for (int t = first < 0 ? first + (int)gridDim.x : first; t < tiles; t += gridDim.x)
            tile(phase, t / across, t % across);
        before = (before + tiles) % (int)gridDim.x;
    }
}

// Fills the stages of this block's tiles; one thread.
__device__ __forceinline__ void copy_chain(Ring& ring, const Memory& memory, int s, int row_blocks) {
    const Blocked inputs = inputs_of(memory.places, s & 1);
    for_each_tile(row_blocks, [&](const Phase& phase, int row_block, int n) {
        const int l = phase.layer();
        const Matrices& m = near_matrices[l];
        if (phase.number > 0) {
            const Phase before = {phase.number - 1};
            const u32* ready = memory.announced(s, before.number, row_block);
            const u32 all = before.across() * CONSUMER_WARPS;
            while (load_acquire(ready) < all) {
            }
            fence_async();
        }
        if (phase.forward())
            fill<BULK_N, true, false>(
                ring, rows_of(l ? near_matrices[l - 1].output : inputs, row_block * TILE_M),
                blocks_of(m.weight, 0, n * COLUMN_BLOCKS), (LAYER(l).fan_in + 63) / 64);
        else
            fill<BULK_N, true, true>(
                ring, rows_of(m.error, row_block * TILE_M), rows_of(m.weight, n * BULK_N), (LAYER(l).fan_out + 63) / 64);
    });
}

__device__ __forceinline__ void compute_chain(
    float (&c)[WIDEST / 2], Ring& ring, const Memory& memory, const StepView& step, int s, int row_blocks) {
    Staging staging(ring.base);
    Announcement before = {nullptr, false};
    for_each_tile(row_blocks, [&](const Phase& phase, int row_block, int n) {
        const int l = phase.layer(), m0 = row_block * TILE_M, n0 = n * BULK_N;
        if (phase.forward()) {
            multiply<BULK_N, true, false>(c, ring, (LAYER(l).fan_in + 63) / 64, before);
            if (l + 1 < ENGINE.layers) hidden_outputs(c, staging, step, l, m0, n0);
            else output_errors(c, staging, step, m0, n0);
        } else {
            multiply<BULK_N, true, true>(c, ring, (LAYER(l).fan_out + 63) / 64, before);
            hidden_errors(c, staging, step, l, m0, n0);
        }
        before = {memory.announced(s, phase.number, row_block), true};
    });
    announce_stores(before.where, before.due && (threadIdx.x & 31) == 0);
}

__device__ __forceinline__ void copy_gradients(Ring& ring, const Memory& memory, int s, int rows) {
    for (int number = blockIdx.x; number < gradient_tasks(); number += gridDim.x) {
        const GradientTask task(number, rows);
        const Blocked& below = task.l ? near_matrices[task.l - 1].output : inputs_of(memory.places, s & 1);
        fill<BULK_GRADIENT_N, false, false>(
            ring, blocks_of(below, task.first * 64, task.m0 / 64),
            blocks_of(near_matrices[task.l].error, task.first * 64, task.n0 / 64), task.steps);
    }
}

__device__ __forceinline__ void compute_gradients(
    float (&c)[WIDEST / 2], Ring& ring, const Memory& memory, int rows, bool direct, const Hyper& h, u32 round) {
    Announcement none = {nullptr, false};
    for (int number = blockIdx.x; number < gradient_tasks(); number += gridDim.x) {
        const GradientTask task(number, rows);
        if (task.steps > 0) multiply<BULK_GRADIENT_N, false, false>(c, ring, task.steps, none);
        else
#pragma unroll
            for (int i = 0; i < BULK_GRADIENT_N / 2; ++i) c[i] = 0.f;
        if (BULK_SPLITS == 1) finish_tile(c, task, direct, h);
        else finish_share(c, task, direct, h, memory.partials, memory.arrived, (round + 1) * BULK_SPLITS);
    }
}

__device__ __forceinline__ void sum_weights(const Raw& raw, const StepInfo& info, Flags& flags) {
    double sum = info.rows;
    if (raw.weights) {
        sum = 0.;
        for (int r = threadIdx.x; r < info.rows; r += blockDim.x) sum += raw.weights[raw_row(raw, info.first + r)];
        sum = block_sum(sum);
    }
    if (threadIdx.x == 0) flags.weight = (float)sum;
}

// Block 0: the loss of the step, in the order of its parts, and the tally.
__device__ __forceinline__ void finish_loss(int s, const StepInfo& info, int parts, float weight, const double* losses) {
    double loss = 0.;
    for (int part = threadIdx.x; part < parts; part += blockDim.x) loss += __ldcg(losses + part);
    loss = block_sum(loss);
    float* tally = ENGINE.gradient + ENGINE.size;
    if (threadIdx.x < TALLY)
        tally[threadIdx.x] = threadIdx.x == TALLY_LOSS     ? (float)loss
                             : threadIdx.x == TALLY_WEIGHT ? weight
                             : threadIdx.x == TALLY_ROWS   ? (float)info.rows
                                                           : 0.f;
    if (threadIdx.x == 0) ENGINE.results[s] = StepResult{loss, weight, DONE};
}

// One step; ends with a barrier behind the update, or behind the gradients where other ranks' are still to come.
__device__ __forceinline__ void train_step(
    const Raw& raw, int s, int end, const Memory& memory, Ring& ring, u32 round, GridBarrier& barrier,
    Progress& progress) {
    __shared__ Hyper hyper;
    const StepInfo info = ENGINE.steps[s];
    Flags& flags = ENGINE.control->flags[s & 1];
    Flags& next = ENGINE.control->flags[s + 1 & 1];
    const int row_blocks = (info.rows + TILE_M - 1) / TILE_M, words = (2 * ENGINE.layers - 1) * memory.row_blocks;
    const bool copies = threadIdx.x >= CONSUMERS;

    if (blockIdx.x == 0)  // the last step is over everywhere, the next has not begun
        for (int i = threadIdx.x; i < sizeof(Flags) / 4; i += BULK_THREADS) ((u32*)&next)[i] = 0;
    for (int i = blockIdx.x * BULK_THREADS + threadIdx.x; i < words; i += gridDim.x * BULK_THREADS)
        memory.announced(s + 1, 0, 0)[i] = 0;
    if (blockIdx.x == gridDim.x - 1) sum_weights(raw, info, flags);
    float c[WIDEST / 2];
    if (copies) {
        if (threadIdx.x == CONSUMERS) copy_chain(ring, memory, s, row_blocks);
        __syncwarp();
    } else {
        compute_chain(c, ring, memory, StepView{raw, info, flags, memory.losses}, s, row_blocks);
    }
    fence_async();
    barrier.wait();
    fence_async();

    const bool direct =
        OPTIMIZER != LAMB && !ENGINE.needs_norm && !ENGINE.deferred && surely_finite(flags, info.rows);
    if (direct) {
        ++progress.step;
        if (threadIdx.x == 0) set_hyper(hyper, info.rate, 1.f / flags.weight, progress.step);
        __syncthreads();
    }
    if (copies) {
        if (threadIdx.x == CONSUMERS) copy_gradients(ring, memory, s, info.rows);
        __syncwarp();
    } else {
        compute_gradients(c, ring, memory, info.rows, direct, hyper, round);
    }
    __syncthreads();
    bias_gradients(row_blocks, direct, hyper, (float*)(dynamic_shared + STAGING_AT));
    if (blockIdx.x == 0) {
        const int across = (LAYER(ENGINE.layers - 1).fan_out + BULK_N - 1) / BULK_N;
        finish_loss(s, info, row_blocks * across * CONSUMER_WARPS, flags.weight, memory.losses);
    }
    if (s + 1 < end) {
        const StepInfo following = ENGINE.steps[s + 1];
        gather_blocked(raw, following.first, following.rows, inputs_of(memory.places, s + 1 & 1), &next.output[0]);
    }
    fence_async();
    barrier.wait();
    if (!direct && !ENGINE.deferred) {
        apply_gradient(s, barrier, progress);
        barrier.wait();
        pack_blocked();
        fence_async();
        barrier.wait();
    }
    fence_async();
}

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(BULK_THREADS, 1) bulk_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, u8* rows_memory, u8* weights_memory, float* sums, double* losses, float2* partials,
    u32* words) {
    const Raw raw = {inputs, targets, labels, weights, index};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
    Memory memory;
    memory.places = {rows_memory, nullptr, nullptr, weights_memory, sums, BULK_ROWS};
    memory.places.outputs = rows_memory + 2 * padded_bytes(BULK_ROWS, LAYER(0).fan_in);
    i64 outputs_bytes = 0;
    for (int l = 0; l < ENGINE.layers; ++l) outputs_bytes += padded_bytes(BULK_ROWS, LAYER(l).fan_out);
    memory.places.errors = memory.places.outputs + outputs_bytes;
    memory.losses = losses;
    memory.partials = partials;
    memory.state = words;
    memory.row_blocks = BULK_ROWS / TILE_M;
    memory.ready = words + 4;
    memory.arrived = memory.ready + 2 * (2 * ENGINE.layers - 1) * memory.row_blocks;
    place_matrices(memory.places);
    Ring ring = {shared_address(dynamic_shared), 0, 0};
    open_ring(ring);

    bool packed = memory.state[0] != 0;
    u32 round = memory.state[1];
    if (apply_first && !progress.frozen) {
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
        packed = false;
    }
    if (!packed) pack_blocked();
    if (begin < end)
        gather_blocked(
            raw, ENGINE.steps[begin].first, ENGINE.steps[begin].rows, inputs_of(memory.places, begin & 1),
            &control.flags[begin & 1].output[0]);
    fence_async();
    barrier.wait();
    fence_async();
    for (int s = begin; s < end; ++s) {
        if (!progress.frozen) train_step(raw, s, end, memory, ring, round++, barrier, progress);
        else if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
    }
    // Behind the last barrier nobody reads these any more.
    const int words_of_steps = 2 * (2 * ENGINE.layers - 1) * memory.row_blocks;
    for (int i = blockIdx.x * BULK_THREADS + threadIdx.x; i < words_of_steps; i += gridDim.x * BULK_THREADS)
        memory.ready[i] = 0;
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += BULK_THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x == 0) {
            memory.state[0] = 1;
            memory.state[1] = round;
            control.step = progress.step;
            control.skipped = progress.skipped;
            control.frozen = progress.frozen;
        }
    }
}

extern "C" __constant__ int BULK_SIZES[] = {SHARED_BYTES};
