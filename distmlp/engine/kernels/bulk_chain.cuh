// The chain of the bulk kernel: who multiplies which tiles when, from the inputs to the errors of the first layer.
#pragma once
#include "bulk_layers.cuh"

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

// What all threads know stands in shared memory: registers are scarce, and what does not fit into them has to come from L2,
// since stages leave next to nothing of the cache.
struct Known {
    Memory memory;
    Raw raw;
    StepInfo step, next;  // the current one, and the one after it
    GridBarrier barrier;
    Progress progress;
    u32 round;   // phases of gradients so far
    int s, end;  // the current step, and the one behind the last
};
__shared__ Known known;

struct Phase {
    int number;
    __device__ __forceinline__ bool forward() const { return number < ENGINE.layers; }
    __device__ __forceinline__ int layer() const { return layer_of(number); }
    __device__ __forceinline__ int across() const {
        const Layer& l = LAYER(layer());
        return ((forward() ? l.fan_out : l.fan_in) + BULK_N - 1) / BULK_N;
    }
};

constexpr int ANNOUNCEMENTS = SENDS ? 2 : 1;  // of a tile

// tile(phase, row block, tile across) for this block's tiles of the chain, in the order in which all become ready.
template <class F>
__device__ __forceinline__ void for_each_tile(int row_pairs, int rank, const F& tile) {
    const int cluster = block_anew() / 2, clusters = gridDim.x / 2;
    int before = 0;  // tiles of the phases before, modulo the clusters
    for (Phase phase = {0}; phase.number < 2 * ENGINE.layers - 1; ++phase.number) {
        const int across = phase.across(), tiles = row_pairs * across;
        const int first = cluster - before;
        for (int t = first < 0 ? first + clusters : first; t < tiles; t += clusters)
            tile(phase, t / across * 2 + rank, t % across);
        before = (before + tiles) % clusters;
    }
}

// How many that are.
__device__ __forceinline__ int own_tiles(int row_pairs) {
    const int cluster = block_anew() / 2, clusters = gridDim.x / 2;
    int across = 0;
    for (Phase phase = {0}; phase.number < 2 * ENGINE.layers - 1; ++phase.number) across += phase.across();
    return (row_pairs * across + clusters - 1 - cluster) / clusters;
}

// Brings the targets of an output tile into L2 while its products run; a warp.
__device__ __forceinline__ void prefetch_targets(const Raw& raw, const StepInfo& info, int m0, int n0) {
    const int outputs = LAYER(ENGINE.layers - 1).fan_out, columns = min(BULK_N, outputs - n0);
    for (int r = m0 + (threadIdx.x & 31); r < min(m0 + TILE_M, info.rows); r += 32) {
        const float* from = raw.targets + raw_row(raw, info.first + r) * outputs + n0;
        for (int c = 0; c < columns; c += 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
    }
}

// Fills the stages of this block's tiles: one thread, and for targets its warp.
__device__ __forceinline__ void copy_chain(
    const Raw& raw, const StepInfo& info, Ring& ring, const Memory& memory, int s, int row_pairs) {
    const int lane = threadIdx.x & 31;
    const Blocked inputs = inputs_of(memory.places, s & 1);
    int left = own_tiles(row_pairs);
    for_each_tile(row_pairs, ring.rank, [&](const Phase& phase, int row_block, int n) {
        const int l = phase.layer();
        const Matrices& m = near_matrices[l];
        const bool outputs = phase.number == ENGINE.layers - 1;
        const bool targets = outputs && brings_targets(info, row_block * TILE_M, n * BULK_N);
        if (!LABELS && outputs && !targets) prefetch_targets(raw, info, row_block * TILE_M, n * BULK_N);
        i64 rows[TILE_M / TARGET_ROWS];
        if (targets)
#pragma unroll
            for (int i = 0; i < TILE_M / TARGET_ROWS; ++i)
                rows[i] = raw_row(raw, info.first + row_block * TILE_M + i * TARGET_ROWS + lane);
        if (lane == 0) {
            Tile(ring, left).note(phase.number, row_block, n);
            if (phase.number > 0) {
                const Phase before = {phase.number - 1};
                const u32* ready = memory.announced(s, before.number, row_block);
                const u32 all = before.across() * ANNOUNCEMENTS;
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
        }
        if (targets) {
            ring.slot = __shfl_sync(~0u, ring.slot, 0);
            ring.parity = __shfl_sync(~0u, ring.parity, 0);
            const int outputs = LAYER(l).fan_out;
#pragma unroll
            for (int i = 0; i < TILE_M / TARGET_ROWS; ++i) {
                if (lane == 0) {
                    barrier_wait(ring.empty(ring.slot), ring.parity ^ 1);
                    barrier_expect(ring.full(ring.slot), TARGET_ROWS * BULK_N * 4);
                }
                __syncwarp();
                bulk_load(
                    ring.stage() + lane * TARGET_PITCH, raw.targets + rows[i] * outputs + n * BULK_N, BULK_N * 4,
                    ring.full(ring.slot));
                ring.advance();
            }
        }
        --left;
        __syncwarp();
    });
}

__device__ __forceinline__ void forward_products(
    float (&c)[WIDEST / 2], Ring& ring, const Tile& tile, Announcement& before) {
    const Layer& layer = LAYER(tile.phase());
    ask_for_biases(Writer(ring).spare(), layer, tile.n0());
    clear<BULK_N>(c);
    multiply<BULK_N, !TRANSPOSED, TRANSPOSED>(c, ring, blocks_over(layer.fan_in), before);
    add_biases(c, Writer(ring).spare());
}

template <bool WHOLE>
__device__ __forceinline__ void output_tile(
    float (&c)[WIDEST / 2], Ring& ring, const StepView& step, const Tile& tile, Announcement& before) {
    Outside<WHOLE> outside(step, LAYER(ENGINE.layers - 1), tile.m0(), tile.n0());
    forward_products(c, ring, tile, before);
    Writer writer(ring);
    outside.await_targets(ring);
    output_errors<WHOLE>(c, outside, writer, step, tile);
    outside.let_go(ring);
}

__device__ __forceinline__ void compute_chain(
    float (&c)[WIDEST / 2], const Memory& memory, const StepView& step, int row_pairs) {
    Ring ring = recall_ring();
    Announcement before = {memory.stored, false};
#pragma unroll 1
    for (int left = own_tiles(row_pairs); left > 0; --left) {
        const Tile tile(ring, left);
        await_tile(ring, before);
        const int phase = tile.phase();
        if (phase + 1 < ENGINE.layers) {
            forward_products(c, ring, tile, before);
            Writer writer(ring);
            hidden_outputs(c, writer, step, tile);
        } else if (phase < ENGINE.layers) {
            if (brings_targets(step.info, tile.m0(), tile.n0())) output_tile<true>(c, ring, step, tile, before);
            else output_tile<false>(c, ring, step, tile, before);
        } else {
            u32 signs[SIGN_WORDS];
            const int l = layer_of(phase);
            if (TELLS_BY_SIGN) ask_for_signs(Writer(ring).spare(), l - 1, tile);
            clear<BULK_N>(c);
            multiply<BULK_N, !TRANSPOSED, true>(c, ring, blocks_over(LAYER(l).fan_out), before);
            Writer writer(ring);
            if (TELLS_BY_SIGN) read_signs(writer.spare(), signs);
            hidden_errors(c, signs, writer, step, tile);
        }
        if (!SENDS) before.add();
    }
    before.make();
    keep_ring(ring);
    tell_all_largest(ENGINE.control->flags[known.s & 1]);
}

// Sends the results of both warpgroups on their way, of whichever has some, and says of every tile's halves that they are in global
// memory; one thread. So one warpgroup may be at its results while the other still multiplies.
__device__ __forceinline__ void send_chain(const Memory& memory, Ring& ring, int s, int row_pairs) {
    int left[2], block[2] = {0, 0};  // tiles, and what has been sent of this one
    u32 sent[2];
    left[0] = left[1] = own_tiles(row_pairs);
    sent[0] = sent[1] = ring.sent;
    int last = -1;  // place that was sent last, until it has been read
    u32 due = 0;    // halves of tiles that are sent and not announced
    const auto let_go = [&] {
        barrier_arrive(ring.gone(last >> 1, last & 1), true);
        last = -1;
    };
    const auto announce = [&] {
        await_stores();
        fence_async();
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            if (!(due >> group & 1)) continue;
            const Tile tile(ring, left[group] + 1);
            add_release(memory.announced(s, tile.phase(), tile.m0() / TILE_M), 1);
        }
        due = 0;
    };
    while (left[0] > 0 || left[1] > 0 || last >= 0 || due) {
        bool idle = true;
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const int place = sent[group] & 1;
            if (left[group] == 0 || !barrier_passed(ring.written(group, place), sent[group] >> 1 & 1)) continue;
            idle = false;
            const Tile tile(ring, left[group]);
            const Phase phase = {tile.phase()};
            const bool outputs = phase.number + 1 < ENGINE.layers;
            const int l = phase.forward() ? phase.layer() : phase.layer() - 1;
            const Matrices& to = near_matrices[l];
            const int slopes = outputs && stores_slope(hidden_activation(LAYER(l)));  // 1 if so: behind every block of outputs
            const int column = tile.n0() / COLUMNS, own = block[group] >> slopes;
            const Blocked& matrix = outputs && !(block[group] & slopes) ? to.output : to.error;
            bulk_store(
                matrix.at(tile.m0(), column + own) + group * PLACE_BYTES,
                ring.base + STAGING_AT + (group * 2 + place) * PLACE_BYTES, PLACE_BYTES);
            if (last >= 0) {
                await_reads<1>();
                let_go();
            }
            last = group * 2 + place;
            ++sent[group];
            if (++block[group] == min(COLUMN_BLOCKS, to.output.blocks - column) << slopes) {
                if (due >> group & 1) announce();
                block[group] = 0;
                due |= 1u << group;
                --left[group];
            }
        }
        if (!idle) continue;
        if (last >= 0) {
            await_reads<0>();
            let_go();
        } else if (due) {
            announce();
        }
    }
    ring.sent = sent[0];
}

// Says of tiles that they are in global memory, where the warps that multiply have stored the results themselves; a warp. They count
// their stores in shared memory and need not wait until all of the GPU sees them.
__device__ __forceinline__ void announce_chain(
    const Memory& memory, int s, int row_pairs, int rank, u32& stored) {
    for_each_tile(row_pairs, rank, [&](const Phase& phase, int row_block, int) {
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
