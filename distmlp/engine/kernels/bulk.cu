// Whole training steps of a large network on Hopper in one cooperative launch of clusters of two blocks. Matrices lie
// in the form that `wgmma` reads, so that stages are filled by bulk copies (bulk_copy.cuh). Two warpgroups of a block
// multiply; in the third one thread copies for them, one sends what they have, and two warps gather rows.
//
//   chain       forward layer by layer, loss, errors back layer by layer: one list of tiles, no grid barrier. A tile
//               waits for the tiles of its rows in the phase before, which other blocks announce (bulk_chain.cuh). Meanwhile
//               helpers gather the rows of the next step.
//   gradients   weight gradients by tiles and, where there are few, by shares of the batch; with the update where
//               that is possible. The first products are made while other blocks are in the chain.
//
// A grid barrier behind either, awaited by a helper behind the chain. No sum depends on the order in which blocks run.
#include "bulk_chain.cuh"
#include "bulk_gradients.cuh"
#include "bulk_rows.cuh"
#include "magnitudes.cuh"

// Of a thread's registers; the compiler gives 168 to each of three warpgroups, and all together must not have more.
#ifndef BULK_CONSUMER_REGISTERS
#define BULK_CONSUMER_REGISTERS 216
#endif
constexpr int CONSUMER_REGISTERS = BULK_CONSUMER_REGISTERS, HELPER_REGISTERS = 3 * 168 - 2 * CONSUMER_REGISTERS;

// Fills the stages of this block's weight gradients; one thread of the warp that calls it, when all of them know that the errors
// of the task's rows are there (and, since these were computed from them, the outputs).
__device__ __forceinline__ void copy_gradients(Ring& ring, const Memory& memory, int s, int rows) {
    const int lane = threadIdx.x & 31;
    for (int i = 0; gradient_task(i) < gradient_tasks(); ++i) {
        const GradientTask task(gradient_task(i), ring.rank, rows);
        const Phase phase = {task.l + 1 == ENGINE.layers ? task.l : 2 * ENGINE.layers - 2 - task.l};
        const int first = task.first * COLUMNS / TILE_M, end = min((task.first + task.steps) * COLUMNS + TILE_M - 1, rows + TILE_M - 1) / TILE_M;
        const u32 all = phase.across() * ANNOUNCEMENTS;
        for (int row_block = first + lane; row_block < end; row_block += 32)
            while (load_acquire(memory.announced(s, phase.number, row_block)) < all) {
            }
        __syncwarp();
        if (lane > 0) continue;
        fence_async();
        const Blocked below = task.l ? near_matrices[task.l - 1].output : inputs_of(memory.places, s & 1);
        fill<BULK_GRADIENT_N, TRANSPOSED, TRANSPOSED>(
            ring, batch_columns(below, task.first, task.m0),
            batch_columns(near_matrices[task.l].error, task.first, task.n0), task.steps);
    }
    __syncwarp();
}

// What a block knows behind the chain of a step. Not local to what is compiled once for either kind of threads.
struct Verdict {
    u64 goal;      // of the grid barrier behind the chain
    float weight;  // sum of the sample weights
    float total;   // and over the ranks
    bool direct;   // the update is made at once
    Hyper hyper;   // if so
};
__shared__ Verdict verdict;
constexpr int AT_VERDICT = CONSUMERS + 32;

// Behind the chain: this block has done its part. The warps that multiply come by here, and the one that sends, which alone waits. The
// one that copies goes on to the gradients, and those that gather have time until the end of the step.
__device__ __forceinline__ void leave_chain(bool waits) {
    if (waits) asm volatile("bar.sync 4, %0;" ::"n"(AT_VERDICT) : "memory");
    else asm volatile("bar.arrive 4, %0;" ::"n"(AT_VERDICT) : "memory");
}
__device__ __forceinline__ void await_verdict() { asm volatile("bar.sync 5, %0;" ::"n"(AT_VERDICT) : "memory"); }

// The first products are made while other blocks are still in the chain.
__device__ __forceinline__ void compute_gradients(
    float (&c)[WIDEST / 2], const Memory& memory, int rows) {
    bool awaited = false;
    Announcement none = {0, false};
    const Sums sums = {memory.partials, memory.arrived, (known.round + 1) * BULK_SPLITS};
    int i = 0;
    for (; gradient_task(i) < gradient_tasks(); ++i) {
        const GradientTask task(gradient_task(i), rank_in_cluster(), rows);
        clear<BULK_GRADIENT_N>(c);
        if (task.steps > 0) {
            Ring ring = recall_ring();
            multiply<BULK_GRADIENT_N, TRANSPOSED, TRANSPOSED>(c, ring, task.steps, none);
            keep_ring(ring);
        }
        if (!awaited) await_verdict();
        awaited = true;
        hand_out_share(c, task, verdict.direct, sums);
        if (!LATER) finish_share(task, verdict.direct, verdict.hyper, sums);
        else if (i > 0)
            finish_share(GradientTask(gradient_task(i - 1), rank_in_cluster(), rows), verdict.direct, verdict.hyper, sums);
    }
    if (!awaited) await_verdict();
    const int row_blocks = (rows + 2 * TILE_M - 1) / (2 * TILE_M) * 2;
    bias_gradients(
        row_blocks * CONSUMER_WARPS, verdict.direct, verdict.hyper, (float*)(dynamic_shared + STAGING_AT));
    if (LATER && i > 0)
        finish_share(GradientTask(gradient_task(i - 1), rank_in_cluster(), rows), verdict.direct, verdict.hyper, sums);
}

// Rows and sums of weights of step `s`, by `warps` warps of the grid.
__device__ __forceinline__ void gather_step(const Raw& raw, const Memory& memory, int s, int warp, int warps) {
    const StepInfo info = ENGINE.steps[s];
    gather_blocked(
        raw, info.first, info.rows, inputs_of(memory.places, s & 1), memory.inputs_of_step(s), warp, warps);
    if (!raw.weights) return;
    const int lane = threadIdx.x & 31;
    for (int part = warp; part < (info.rows + 31) / 32; part += warps) {
        const int r = part * 32 + lane;
        const double sum = warp_sum(r < info.rows ? (double)raw.weights[raw_row(raw, info.first + r)] : 0.);
        if (lane == 0) memory.weights_of(s)[part] = sum;
    }
}

// Sum of `count` numbers in an order that never changes, by a warp.
__device__ __forceinline__ double sum_parts(const double* parts, int count) {
    double sum = 0.;
#pragma unroll 16
    for (int i = threadIdx.x & 31; i < count; i += 32) sum += __ldcg(parts + i);
    return warp_sum(sum);
}

// The loss of the step and the tally, by a warp.
__device__ __forceinline__ void finish_loss(int s, const StepInfo& info, int parts, float weight, const double* losses) {
    const int lane = threadIdx.x & 31;
    const double loss = sum_parts(losses, parts);
    float* tally = ENGINE.gradient + ENGINE.size;
    if (lane < TALLY)
        tally[lane] = lane == TALLY_LOSS     ? (float)loss
                      : lane == TALLY_WEIGHT ? weight
                      : lane == TALLY_ROWS   ? (float)info.rows
                                             : 0.f;
    if (lane == 0) ENGINE.results[s] = StepResult{loss, weight, DONE};
}

__shared__ u32 stored_tiles;

// Waits until all blocks are through the chain of step `s`, and decides on its update; a warp.
__device__ __forceinline__ void decide(
    const Raw& raw, int s, const StepInfo& info, const Memory& memory, const Flags& flags, u64* arrivals,
    u64 next_update) {
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
        add_release(arrivals, 1);
        while (load_acquire(arrivals) < verdict.goal) {
        }
        fence_async();
    }
    __syncwarp();
    const float weight =
        raw.weights ? (float)sum_parts(memory.weights_of(s), (info.rows + 31) / 32) : (float)info.rows;
    const bool joined = ranks_join();
    bool direct = (joined || (OPTIMIZER != LAMB && !ENGINE.needs_norm && !ENGINE.deferred)) &&
                  __all_sync(~0u, surely_finite_share(flags, *memory.inputs_of_step(s), weight, info.rows, lane, 32));
    float total = weight;
    if (joined) {
        const Agreement all = agree_by_warp(direct || info.rows == 0, weight, info.rows);
        direct = all.direct;
        total = all.weight;
    }
    if (lane == 0) {
        verdict.weight = weight;
        verdict.total = total;
        verdict.direct = direct;
        if (direct) set_hyper(verdict.hyper, info.rate, 1.f / total, next_update);
    }
}

// One step; ends with a barrier behind the update. MULTIPLIES: as the warpgroups that do, else as the helpers.
template <bool MULTIPLIES>
__device__ __forceinline__ void train_step(Ring& ring, u32& stored) {
    GridBarrier& barrier = known.barrier;
    const Memory& memory = known.memory;
    const Raw& raw = known.raw;
    const StepInfo& info = known.step;
    const int s = known.s;
    const int row_pairs = (info.rows + 2 * TILE_M - 1) / (2 * TILE_M), row_blocks = 2 * row_pairs;
    const int words = (2 * ENGINE.layers - 1) * memory.row_blocks;
    const int warp = (threadIdx.x - CONSUMERS) >> 5, lane = threadIdx.x & 31;
    const int gatherer = blockIdx.x + gridDim.x * (warp - 2), gatherers = gridDim.x * 2;

    // What the step before has left behind, for the one after this.
    if (!MULTIPLIES && warp == 1) {
        if (blockIdx.x == 0) {
            Flags& next = ENGINE.control->flags[s + 1 & 1];
            for (int i = lane; i < sizeof(Flags) / 4; i += 32) ((u32*)&next)[i] = 0;
            if (lane == 0) *memory.inputs_of_step(s + 2) = 0;
        }
        if (lane == 0 && s + 1 < known.end) known.next = ENGINE.steps[s + 1];
        for (int i = blockIdx.x * 32 + lane; i < words; i += gridDim.x * 32) memory.announced(s + 1, 0, 0)[i] = 0;
    }
    float c[WIDEST / 2];
    if (MULTIPLIES) {
        compute_chain(c, memory, StepView{raw, info, memory.losses}, row_pairs);
        if (threadIdx.x == 0) verdict.goal = barrier.next();
        leave_chain(false);
        compute_gradients(c, memory, info.rows);
    } else if (warp == 0) {
        copy_chain(raw, info, ring, memory, s, row_pairs);
        copy_gradients(ring, memory, s, info.rows);
    } else if (warp > 1) {
        if (s + 1 < known.end) gather_step(raw, memory, s + 1, gatherer, gatherers);
    } else {
        if (!SENDS) announce_chain(memory, s, row_pairs, ring.rank, stored);
        else if (lane == 0) send_chain(memory, ring, s, row_pairs);
        __syncwarp();
        fence_async();
        leave_chain(true);
        decide(raw, s, info, memory, ENGINE.control->flags[s & 1], barrier.arrivals, known.progress.step + 1);
        await_verdict();
        if (blockIdx.x == gridDim.x - 1) {  // where there may be no gradients
            const int across = (LAYER(ENGINE.layers - 1).fan_out + BULK_N - 1) / BULK_N;
            finish_loss(s, info, row_blocks * across * CONSUMER_WARPS, verdict.weight, memory.losses);
            if (ranks_join() && verdict.direct && (threadIdx.x & 31) == TALLY_LOSS) {
                Exchange ranks(agreed_exchange());
                join_result(ranks, s, ENGINE.gradient[ENGINE.size + TALLY_LOSS], verdict.total);
            }
        }
    }
    fence_async();
    barrier.arrive();
    if (threadIdx.x == 0) {
        known.step = known.next;
        ++known.s;
    }
    barrier.await();
    const bool direct = verdict.direct;
    if (ranks_join() && !all_were_there(known.s - 1, direct)) {
        __syncthreads();
        if (threadIdx.x == 0) known.progress.frozen = true;
        __syncthreads();
        return;
    }
    if (threadIdx.x == 0) {
        ++known.round;
        if (direct) ++known.progress.step;
    }
    if (!direct && !ENGINE.deferred) {
        Progress progress = known.progress;
        apply_gradient(known.s - 1, barrier, progress);
        __syncthreads();
        if (threadIdx.x == 0) known.progress = progress;
        barrier.wait();
        pack_blocked();
        fence_async();
        barrier.wait();
    }
    fence_async();
}

__device__ __forceinline__ void keep(const Progress& progress) {
    Control& control = *ENGINE.control;
    control.step = progress.step;
    control.skipped = progress.skipped;
    control.frozen = progress.frozen;
}

template <bool MULTIPLIES>
__device__ __forceinline__ void train(Ring ring) {
    u32 stored = 0;
    while (known.s < known.end && !known.progress.frozen) train_step<MULTIPLIES>(ring, stored);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        for (int s = known.s; s < known.end; ++s) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        known.memory.state[0] = 1;
        known.memory.state[1] = known.round;
        keep(known.progress);
    }
}

__device__ __forceinline__ void place_memory(
    Memory& memory, u8* rows, u8* weights, float* sums, u32* signs, double* losses, double* row_weights, float2* partials,
    u32* words) {
    memory.places = {rows, nullptr, nullptr, weights, sums, signs, BULK_ROWS};
    memory.places.outputs = rows + 2 * batch_bytes(BULK_ROWS, LAYER(0).fan_in);
    i64 outputs_bytes = 0;
    for (int l = 0; l < ENGINE.layers; ++l) outputs_bytes += batch_bytes(BULK_ROWS, LAYER(l).fan_out);
    memory.places.errors = memory.places.outputs + outputs_bytes;
    memory.losses = losses;
    memory.row_weights = row_weights;
    memory.partials = partials;
    memory.state = words;
    memory.row_blocks = BULK_ROWS / TILE_M;
    memory.ready = words + 8;
    memory.arrived = memory.ready + 2 * (2 * ENGINE.layers - 1) * memory.row_blocks;
    memory.stored = shared_address(&stored_tiles);
}

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(BULK_THREADS, 1) bulk_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, u8* rows_memory, u8* weights_memory, float* sums, u32* signs, double* losses, double* row_weights,
    float2* partials, u32* words) {
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    const Memory& memory = known.memory;
    if (threadIdx.x == 0) {
        known.raw = {inputs, targets, labels, weights, index};
        if (begin < end) known.step = ENGINE.steps[begin];
        known.s = begin;
        known.end = end;
        place_memory(known.memory, rows_memory, weights_memory, sums, signs, losses, row_weights, partials, words);
    }
    __syncthreads();
    if (threadIdx.x == 0) stored_tiles = 0;
    clear_largest();
    place_matrices(memory.places);
    Ring ring = {shared_address(dynamic_shared), rank_in_cluster(), 0, 0, 0};
    open_ring(ring);

    if (SEVERAL_RANKS && apply_first && !control.frozen) {
        Progress progress = {control.step, control.skipped, false};
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
        if (blockIdx.x == 0 && threadIdx.x == 0) keep(progress);
        barrier.wait();
    }
    if (memory.state[0] == 0 || apply_first) pack_blocked();
    const int warps = BULK_THREADS / 32;
    if (begin < end && !control.frozen)
        gather_step(known.raw, memory, begin, blockIdx.x + gridDim.x * (threadIdx.x >> 5), gridDim.x * warps);
    fence_async();
    barrier.wait();
    fence_async();
    if (threadIdx.x == 0) {
        known.barrier = barrier;
        known.progress = {control.step, control.skipped, control.frozen != 0};
        known.round = memory.state[1];
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        train<true>(ring);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
        train<false>(ring);
    }
    // Behind the last barrier nobody reads these any more.
    const int words_of_steps = 2 * (2 * ENGINE.layers - 1) * memory.row_blocks;
    for (int i = blockIdx.x * BULK_THREADS + threadIdx.x; i < words_of_steps; i += gridDim.x * BULK_THREADS)
        memory.ready[i] = 0;
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += BULK_THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x < 3) *memory.inputs_of_step(threadIdx.x) = 0;
    }
    cluster_sync();  // nothing arrives at a block that is gone
}
