// Whole training steps of a large network on Hopper in one cooperative launch of clusters of two blocks. Matrices lie
// in the form that `wgmma` reads, so that stages are filled by bulk copies (bulk_copy.cuh). Two warpgroups of a block
// multiply; in the third one thread copies for them, and three warps do what has little to do with products.
//
//   chain       forward layer by layer, loss, errors back layer by layer: one list of tiles, no grid barrier. A tile
//               waits for the tiles of its rows in the phase before, which other blocks announce. Meanwhile
//               helpers gather the rows of the next step.
//   gradients   weight gradients by tiles and, where there are few, by shares of the batch; with the update where
//               that is possible. Biases are the helpers'.
//
// A grid barrier behind either. No sum depends on the order in which blocks run.
#include "bulk_gradients.cuh"
#include "bulk_rows.cuh"
#include "magnitudes.cuh"

extern __shared__ __align__(1024) u8 dynamic_shared[];

struct Memory {  // beside the engine's
    Places places;
    double* losses;
    double* row_weights;  // sums of the sample weights of 32 rows each, for both parities of steps
    float2* partials;
    u32 *state, *ready, *arrived;  // state: whether weight copies are current, gradient phases so far, magnitudes
    int row_blocks;                // that `ready` has for a phase
    u32 stored;                    // address of the count of warps' tiles, in shared memory

    // Tiles announced by the phases of a step: (2, phases, row blocks).
    __device__ __forceinline__ u32* announced(int s, int phase, int row_block) const {
        return ready + ((i64)(s & 1) * (2 * ENGINE.layers - 1) + phase) * row_blocks + row_block;
    }
    // Largest magnitude of the inputs; gathered a step ahead, so three of them.
    __device__ __forceinline__ u32* inputs_of_step(int s) const { return state + 2 + s % 3; }
    __device__ __forceinline__ double* weights_of(int s) const { return row_weights + (s & 1) * (places.rows / 32); }
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
__device__ __forceinline__ void for_each_tile(int row_pairs, int rank, const F& tile) {
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    int before = 0;  // tiles of the phases before, modulo the clusters
    for (Phase phase = {0}; phase.number < 2 * ENGINE.layers - 1; ++phase.number) {
        const int across = phase.across(), tiles = row_pairs * across;
        const int first = cluster - before;
        for (int t = first < 0 ? first + clusters : first; t < tiles; t += clusters)
            tile(phase, t / across * 2 + rank, t % across);
        before = (before + tiles) % clusters;
    }
}

// Fills the stages of this block's tiles; one thread.
__device__ __forceinline__ void copy_chain(Ring& ring, const Memory& memory, int s, int row_pairs) {
    const Blocked inputs = inputs_of(memory.places, s & 1);
    for_each_tile(row_pairs, ring.rank, [&](const Phase& phase, int row_block, int n) {
        const int l = phase.layer();
        const Matrices& m = near_matrices[l];
        if (phase.number > 0) {
            const Phase before = {phase.number - 1};
            const u32* ready = memory.announced(s, before.number, row_block);
            const u32 all = before.across();
            while (load_acquire(ready) < all) {
            }
            fence_async();
        }
        if (phase.forward())
            fill<BULK_N, !TRANSPOSED, TRANSPOSED>(
                ring, batch_rows(l ? near_matrices[l - 1].output : inputs, row_block * TILE_M),
                weight_columns(m, n * BULK_N), blocks_over(LAYER(l).fan_in));
        else
            fill<BULK_N, !TRANSPOSED, true>(
                ring, batch_rows(m.error, row_block * TILE_M), rows_of(m.weight, n * BULK_N),
                blocks_over(LAYER(l).fan_out));
    });
}

template <bool WHOLE>
__device__ __forceinline__ void output_tile(
    float (&c)[WIDEST / 2], Ring& ring, Writer& writer, const StepView& step, int m0, int n0, Announcement& before) {
    const Layer& layer = LAYER(ENGINE.layers - 1);
    Outside<WHOLE> outside(step, layer, m0, n0);
    start_with_biases(c, staging_of_warp(ring.base), layer, n0);
    multiply<BULK_N, !TRANSPOSED, TRANSPOSED>(c, ring, blocks_over(layer.fan_in), before);
    output_errors<WHOLE>(c, outside, writer, step, m0, n0);
}

__device__ __forceinline__ void compute_chain(
    float (&c)[WIDEST / 2], Ring& ring, const Memory& memory, const StepView& step, int row_pairs) {
    Writer writer(ring.base);
    Announcement before = {memory.stored, false};
    for_each_tile(row_pairs, ring.rank, [&](const Phase& phase, int row_block, int n) {
        const int l = phase.layer(), m0 = row_block * TILE_M, n0 = n * BULK_N;
        if (phase.forward() && l + 1 < ENGINE.layers) {
            start_with_biases(c, staging_of_warp(ring.base), LAYER(l), n0);
            multiply<BULK_N, !TRANSPOSED, TRANSPOSED>(c, ring, blocks_over(LAYER(l).fan_in), before);
            hidden_outputs(c, writer, step, l, m0, n0);
        } else if (phase.forward()) {
            const int outputs = LAYER(l).fan_out;
            if (LOSS != SOFTMAX_CROSS_ENTROPY && m0 + TILE_M <= step.info.rows && n0 + BULK_N <= outputs && outputs % 2 == 0)
                output_tile<true>(c, ring, writer, step, m0, n0, before);
            else output_tile<false>(c, ring, writer, step, m0, n0, before);
        } else {
            u32 signs[SIGN_WORDS];
            clear<BULK_N>(c);
            await_tile(ring, before);
            if (TELLS_BY_SIGN) ask_for_signs(staging_of_warp(ring.base), l - 1, m0, n0);
            multiply<BULK_N, !TRANSPOSED, true>(c, ring, blocks_over(LAYER(l).fan_out), before);
            if (TELLS_BY_SIGN) read_signs(staging_of_warp(ring.base), signs);
            hidden_errors(c, signs, writer, step, l, m0, n0);
        }
        before.add();
    });
    before.make();
}

// Brings the targets of an output tile into L2 while its products run; a warp.
__device__ __forceinline__ void prefetch_targets(const Raw& raw, const StepInfo& info, int m0, int n0) {
    const int outputs = LAYER(ENGINE.layers - 1).fan_out, columns = min(BULK_N, outputs - n0);
    for (int r = m0 + (threadIdx.x & 31); r < min(m0 + TILE_M, info.rows); r += 32) {
        const float* from = raw.targets + raw_row(raw, info.first + r) * outputs + n0;
        for (int c = 0; c < columns; c += 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
    }
}

// Says of every tile that it is in global memory; a warp. The warps that multiply count their stores in shared memory
// and need not wait until all of the GPU sees them.
__device__ __forceinline__ void announce_chain(
    const Raw& raw, const StepInfo& info, const Memory& memory, int s, int row_pairs, int rank, u32& stored) {
    for_each_tile(row_pairs, rank, [&](const Phase& phase, int row_block, int n) {
        if (!LABELS && phase.number == ENGINE.layers - 1) prefetch_targets(raw, info, row_block * TILE_M, n * BULK_N);
        stored += CONSUMER_WARPS;
        if ((threadIdx.x & 31) == 0) {
            while ((int)(load_acquire_shared(memory.stored) - stored) < 0) {
            }
            fence_async();
            add_release(memory.announced(s, phase.number, row_block), 1);
        }
        __syncwarp();
    });
}

__device__ __forceinline__ void copy_gradients(Ring& ring, const Memory& memory, int s, int rows) {
    for (int number = blockIdx.x / 2; number < gradient_tasks(); number += gridDim.x / 2) {
        const GradientTask task(number, ring.rank, rows);
        const Blocked below = task.l ? near_matrices[task.l - 1].output : inputs_of(memory.places, s & 1);
        fill<BULK_GRADIENT_N, TRANSPOSED, TRANSPOSED>(
            ring, batch_columns(below, task.first, task.m0),
            batch_columns(near_matrices[task.l].error, task.first, task.n0), task.steps);
    }
}

__device__ __forceinline__ void compute_gradients(
    float (&c)[WIDEST / 2], Ring& ring, const Memory& memory, int rows, bool direct, const Hyper& h, u32 round) {
    Announcement none = {0, false};
    const Sums sums = {memory.partials, memory.arrived, (round + 1) * BULK_SPLITS};
    const int later = LATER * (gridDim.x / 2);
    for (int number = blockIdx.x / 2; number - later < gradient_tasks(); number += gridDim.x / 2) {
        if (!LATER || number < gradient_tasks()) {
            const GradientTask task(number, ring.rank, rows);
            clear<BULK_GRADIENT_N>(c);
            if (task.steps > 0) multiply<BULK_GRADIENT_N, TRANSPOSED, TRANSPOSED>(c, ring, task.steps, none);
            hand_out_share(c, task, direct, sums);
        }
        if (number >= later) finish_share(GradientTask(number - later, ring.rank, rows), direct, h, sums);
    }
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
#pragma unroll 8
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

// Of the step, and the same for both kinds of threads, so not local to what is compiled once for either.
__shared__ Hyper hyper;
__shared__ float weight_sum;
__shared__ u32 stored_tiles;

// One step; ends with a barrier behind the update. MULTIPLIES: as the warpgroups that do, else as the helpers; both take the
// same way from barrier to barrier.
template <bool MULTIPLIES>
__device__ __forceinline__ void train_step(
    const Raw& raw, int s, int end, const Memory& memory, Ring& ring, u32 round, u32& stored, GridBarrier& barrier,
    Progress& progress) {
    const StepInfo info = ENGINE.steps[s];
    Flags& flags = ENGINE.control->flags[s & 1];
    const int row_pairs = (info.rows + 2 * TILE_M - 1) / (2 * TILE_M), row_blocks = 2 * row_pairs;
    const int words = (2 * ENGINE.layers - 1) * memory.row_blocks;
    const int warp = (threadIdx.x - CONSUMERS) >> 5;
    const int gatherer = blockIdx.x + gridDim.x * (warp - 2), gatherers = gridDim.x * 2;

    // What the step before has left behind, for the one after this.
    if (blockIdx.x == 0 && MULTIPLIES) {
        Flags& next = ENGINE.control->flags[s + 1 & 1];
        for (int i = threadIdx.x; i < sizeof(Flags) / 4; i += CONSUMERS) ((u32*)&next)[i] = 0;
        if (threadIdx.x == 0) *memory.inputs_of_step(s + 2) = 0;
    }
    float c[WIDEST / 2];
    if (MULTIPLIES) {
        for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < words; i += gridDim.x * CONSUMERS)
            memory.announced(s + 1, 0, 0)[i] = 0;
        compute_chain(c, ring, memory, StepView{raw, info, flags, memory.losses}, row_pairs);
    } else if (warp == 0) {
        if (threadIdx.x == CONSUMERS) copy_chain(ring, memory, s, row_pairs);
        __syncwarp();
    } else if (warp == 1) {
        announce_chain(raw, info, memory, s, row_pairs, ring.rank, stored);
    } else if (s + 1 < end) {
        gather_step(raw, memory, s + 1, gatherer, gatherers);
    }
    fence_async();
    barrier.wait();
    fence_async();

    if (!MULTIPLIES && warp == 1) {
        const double sum = raw.weights ? sum_parts(memory.weights_of(s), (info.rows + 31) / 32) : info.rows;
        if ((threadIdx.x & 31) == 0) weight_sum = (float)sum;
    }
    __syncthreads();
    const float weight = weight_sum;
    const bool joined = ranks_join();
    bool direct = (joined || (OPTIMIZER != LAMB && !ENGINE.needs_norm && !ENGINE.deferred)) &&
                  surely_finite(flags, *memory.inputs_of_step(s), weight, info.rows);
    float total = weight;
    Exchange ranks(0);
    if (joined) {
        const Agreement all = agree(ranks, MULTIPLIES, direct || info.rows == 0, weight, info.rows);
        direct = all.direct;
        total = all.weight;
    }
    if (direct) {
        ++progress.step;
        if (threadIdx.x == 0) set_hyper(hyper, info.rate, 1.f / total, progress.step);
        __syncthreads();
    }
    if (MULTIPLIES) {
        compute_gradients(c, ring, memory, info.rows, direct, hyper, round);
    } else if (warp == 0) {
        if (threadIdx.x == CONSUMERS) copy_gradients(ring, memory, s, info.rows);
        __syncwarp();
    } else {
        bias_gradients(warp - 1, row_blocks * CONSUMER_WARPS, direct, hyper, (float*)(dynamic_shared + STAGING_AT));
        if (blockIdx.x == 0 && warp == 1) {
            const int across = (LAYER(ENGINE.layers - 1).fan_out + BULK_N - 1) / BULK_N;
            finish_loss(s, info, row_blocks * across * CONSUMER_WARPS, weight, memory.losses);
            if (joined && direct && (threadIdx.x & 31) == TALLY_LOSS)
                join_result(ranks, s, ENGINE.gradient[ENGINE.size + TALLY_LOSS], total);
        }
    }
    fence_async();
    barrier.wait();
    if (joined && !all_were_there(s, direct)) {
        progress.frozen = true;
        return;
    }
    if (!direct && !ENGINE.deferred) {
        apply_gradient(s, barrier, progress);
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
__device__ __forceinline__ void train(
    const Raw& raw, int begin, int end, const Memory& memory, Ring& ring, GridBarrier& barrier) {
    Control& control = *ENGINE.control;
    Progress progress = {control.step, control.skipped, control.frozen != 0};
    u32 round = memory.state[1], stored = 0;
    for (int s = begin; s < end; ++s) {
        if (!progress.frozen) train_step<MULTIPLIES>(raw, s, end, memory, ring, round++, stored, barrier, progress);
        else if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        memory.state[0] = 1;
        memory.state[1] = round;
        keep(progress);
    }
}

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(BULK_THREADS, 1) bulk_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, u8* rows_memory, u8* weights_memory, float* sums, u32* signs, double* losses, double* row_weights,
    float2* partials, u32* words) {
    const Raw raw = {inputs, targets, labels, weights, index};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Memory memory;
    memory.places = {rows_memory, nullptr, nullptr, weights_memory, sums, signs, BULK_ROWS};
    memory.places.outputs = rows_memory + 2 * batch_bytes(BULK_ROWS, LAYER(0).fan_in);
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
    if (threadIdx.x == 0) stored_tiles = 0;
    place_matrices(memory.places);
    Ring ring = {shared_address(dynamic_shared), rank_in_cluster(), 0, 0};
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
        gather_step(raw, memory, begin, blockIdx.x + gridDim.x * (threadIdx.x >> 5), gridDim.x * warps);
    fence_async();
    barrier.wait();
    fence_async();
    if (threadIdx.x < CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        train<true>(raw, begin, end, memory, ring, barrier);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        train<false>(raw, begin, end, memory, ring, barrier);
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
