// Loss and its derivative at the output layer's sums.
#pragma once
#include "chain_layers.cuh"

namespace chain {

constexpr int OUTPUTS = width(LAYERS);
static_assert(LOSS != SOFTMAX_CROSS_ENTROPY || OUTPUTS <= 64 * GROUPS, "a row's logits are in registers at once");

// Index of the block's row of sum i (of either feature).
__device__ __forceinline__ int row_of_sum(const Place& place, int i) { return 8 * (i >> 2) + 2 * place.q + (i & 1); }

struct Targets {
    float x[LABELS ? 1 : SUMS];

    __device__ __forceinline__ void load(const Place& place, int feature) {
        if (LABELS) return;
        const float* targets = context.raw.targets;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const int r = row_of_sum(place, i), f = feature + 8 * (i >> 1 & 1);
            const i64 row = shared<i64>(ROWS_AT)[r];  // -1 beyond the batch
            x[LABELS ? 0 : i] = f < OUTPUTS && row >= 0 ? __ldg(targets + row * OUTPUTS + f) : 0.f;
        }
    }
    // Standardized, of sum i.
    __device__ __forceinline__ float at(int i, int feature) const {
        const int f = feature + 8 * (i >> 1 & 1);
        if (LABELS || f >= OUTPUTS) return 0.f;
        return standardize(x[LABELS ? 0 : i], ENGINE.target_mean_high, ENGINE.target_mean_low, ENGINE.target_factor, f);
    }
};

// Sums without bias to errors, in place; returns the thread's part of the weighted loss.
__device__ __forceinline__ float errors_of_sums(
    const Place& place, int rows, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS]) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int r = row_of_sum(place, i), f = feature + 8 * (i >> 1 & 1);
        float of_activation, of_loss;
        const float y = activate(OUTPUT_ACTIVATION, sums[i] + (i & 2 ? b1 : b0), of_activation);
        const float loss = output_loss(y, targets.at(i, feature), ENGINE.huber_delta, of_loss);
        const bool counts = f < OUTPUTS && (int)(blockIdx.x * ROWS) + r < rows;
        const float weight = shared<float>(WEIGHTS_AT)[r] * (1.f / OUTPUTS);
        total += counts ? weight * loss : 0.f;
        sums[i] = counts ? weight * of_loss * of_activation : 0.f;
    }
    return total;
}

// The same for softmax; a row's classes are spread over lanes, warps and warpgroups, which meet at `scratch`.
__device__ __forceinline__ float softmax_of_sums(
    const Place& place, int rows, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS],
    float* scratch) {
    constexpr int ROW_SUMS = SUMS / 2;  // rows of a thread
    const int warp = 4 * place.group + place.warp;
    float4* of_warps = (float4*)scratch;  // (ROWS, 16): largest, then sums
    const auto over_features = [](float x, bool largest) {
#pragma unroll
        for (int mask = 4; mask < 32; mask <<= 1) {
            const float y = __shfl_xor_sync(~0u, x, mask);
            x = largest ? fmaxf(x, y) : x + y;
        }
        return x;
    };
    const float lowest = -__int_as_float(0x7f800000);
    float total_loss = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {  // sums 4 (i / 2) + i % 2 and 2 further
        const int at = 4 * (i >> 1) + (i & 1);
        sums[at] += b0, sums[at + 2] += b1;
        float largest = feature < OUTPUTS ? sums[at] : lowest;
        if (feature + 8 < OUTPUTS) largest = fmaxf(largest, sums[at + 2]);
        largest = over_features(largest, true);
        if (place.lane < 4) of_warps[row_of_sum(place, at) * 16 + warp].x = largest;
    }
    meet(ROWS_MEET, WORKERS);
    float shift[ROW_SUMS];
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1);
        float largest = lowest;
#pragma unroll 4
        for (int w = 0; w < 16; ++w) largest = fmaxf(largest, of_warps[row_of_sum(place, at) * 16 + w].x);
        shift[i] = largest;
    }
    meet(ROWS_MEET, WORKERS);
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1), label = shared<int>(LABELS_AT)[row_of_sum(place, at)];
        float total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = feature + 8 * h, j = at + 2 * h;
            if (f >= OUTPUTS) continue;
            const float shifted = sums[j] - shift[i], goal = LABELS ? (f == label ? 1.f : 0.f) : targets.at(j, feature);
            sums[j] = expf(shifted);
            total += sums[j];
            mass += goal;
            inner += goal != 0.f ? goal * shifted : 0.f;
        }
        total = over_features(total, false);
        mass = over_features(mass, false);
        inner = over_features(inner, false);
        if (place.lane < 4) of_warps[row_of_sum(place, at) * 16 + warp] = make_float4(total, mass, inner, 0.f);
    }
    meet(ROWS_MEET, WORKERS);
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1), r = row_of_sum(place, at), label = shared<int>(LABELS_AT)[r];
        float total = 0.f, mass = 0.f, inner = 0.f;
#pragma unroll 4
        for (int w = 0; w < 16; ++w) {
            const float4 part = of_warps[r * 16 + w];
            total += part.x, mass += part.y, inner += part.z;
        }
        if (LABELS) mass = label < 0 || label >= OUTPUTS ? __int_as_float(0x7fc00000) : 1.f;
        const bool there = (int)(blockIdx.x * ROWS) + r < rows;
        const float scale = mass / total, weight = shared<float>(WEIGHTS_AT)[r];
        if (there && place.lane < 4 && warp == 0) total_loss += weight * (mass * logf(total) - inner);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = feature + 8 * h, j = at + 2 * h;
            const float goal = LABELS ? (f == label ? 1.f : 0.f) : targets.at(j, feature);
            sums[j] = there && f < OUTPUTS ? weight * (sums[j] * scale - goal) : 0.f;
        }
    }
    meet(ROWS_MEET, WORKERS);  // before the errors take the place of the sums
    return total_loss;
}

// Backward with the weights of the last stages of the ring, which their forward products left there: a stage for every panel
// of inputs.
__device__ __forceinline__ void multiply_kept(float (&sums)[SUMS], Ring& ring, int panel, u32 from) {
    constexpr int IN = panels(LAYERS - 1);
    u32 stage = ring.stage + STAGES - IN + (panel < IN ? panel : 0);
    if (stage >= STAGES) stage -= STAGES;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
#pragma unroll
    for (int k = 0; k < panels(LAYERS); ++k)
        multiply_piece<BLOCKS8, false, false>(sums, ring.base + stage * STAGE_BYTES + k * PIECE_BYTES, from + k * PANEL_BYTES);
    await_products<0>();
    settle(sums);
    for (int i = 0; i < IN; ++i) ring.release((ring.stage + STAGES - IN + i) % STAGES);
}

// Where the chain is: panels of a buffer are multiplied, those of the other one come from it.
struct Turn {
    u32 from, to;
    __device__ __forceinline__ explicit Turn(u32 shared) : from(shared + BUFFERS_AT), to(from + BUFFER_BYTES) {}
    // By the workers and the warp that copies results to device memory.
    __device__ __forceinline__ void next() {
        meet(LAYER_DONE, WORKERS + 32);
        const u32 last = from;
        from = to;
        to = last;
    }
};

// The workers' part of a chain: all layers forward, the loss, all layers backward.
__device__ __forceinline__ Ring run_chain(Ring ring, int rows) {
    const Place place;
    Turn turn(ring.base);
    Largest largest = {0, 0};
    float loss = 0.f;
    constexpr int TURNS = ceil_div(most_panels(), GROUPS);
    u32* const kept_here = context.buffers.kept + (i64)blockIdx.x * LAYERS * TURNS * KEPT * WORKERS + threadIdx.x;
    const auto weights = [&](u32 stage, int) { return stage + place.group * PIECE_BYTES; };
    const auto panel_of_rows = [&](u32, int k) { return turn.from + k * PANEL_BYTES; };

#pragma unroll 1
    for (int l = 0; l < LAYERS; ++l) {
        const Part& part = part_of(l);
        const bool output = l == LAYERS - 1;
#pragma unroll 1
        for (int first = 0; first < part.out; first += GROUPS) {
            const int panel = first + place.group, feature = place.feature(panel);
            const float* bias = ENGINE.parameters + part.bias;
            const float b0 = feature < part.fan_out ? __ldcg(bias + feature) : 0.f;
            const float b1 = feature + 8 < part.fan_out ? __ldcg(bias + feature + 8) : 0.f;
            float sums[SUMS];
            u32 pairs[PAIRS];
            multiply<BLOCKS8, true, false>(sums, ring, part.in, !(TURNS_AT_ONCE && output), weights, panel_of_rows);
            if (output) {
                Targets targets;
                targets.load(place, feature);
                if (LOSS == SOFTMAX_CROSS_ENTROPY)
                    loss += softmax_of_sums(
                        place, rows, feature, b0, b1, targets, sums, (float*)(dynamic_shared + (turn.to - ring.base)));
                else
                    loss += errors_of_sums(place, rows, feature, b0, b1, targets, sums);
                finish_errors(part, place, panel, panel < part.out, sums, pairs, largest);
            } else {
                u32 kept[KEPT];
                activate_sums(hidden_kind(part), sums, b0, b1, pairs, kept);
                u32* keep = kept_here + (l * TURNS + first / GROUPS) * KEPT * WORKERS;
#pragma unroll
                for (int i = 0; i < KEPT; ++i) keep[i * WORKERS] = kept[i];
                if (panel < part.out)
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) largest.activation = larger_pair(largest.activation, pairs[i]);
            }
            if (panel < part.out) place.store(turn.to, panel, pairs);
        }
        narrow::publish_operands();
        if (!output) turn.next();
    }
#pragma unroll 1
    for (int l = LAYERS - 1; l > 0; --l) {  // from the errors of layer l's outputs to those of its inputs
        turn.next();
        const Part &part = part_of(l), &below = part_of(l - 1);
#pragma unroll 1
        for (int first = 0; first < part.in; first += GROUPS) {
            const int panel = first + place.group;
            const u32* keep = kept_here + ((l - 1) * TURNS + first / GROUPS) * KEPT * WORKERS;
            u32 kept[KEPT], pairs[PAIRS];
#pragma unroll
            for (int i = 0; i < KEPT; ++i) kept[i] = keep[i * WORKERS];
            float sums[SUMS];
            if (TURNS_AT_ONCE && l == LAYERS - 1) multiply_kept(sums, ring, place.group, turn.from);
            else multiply<BLOCKS8, false, false>(sums, ring, part.out, true, weights, panel_of_rows);
            apply_slopes(hidden_kind(below), sums, kept);
            finish_errors(below, place, panel, panel < part.in, sums, pairs, largest);
            if (panel < part.in) place.store(turn.to, panel, pairs);
        }
        narrow::publish_operands();
    }
    loss = warp_sum(loss);
    const auto larger_half = [](u32 pair) { return max(pair << 16, pair & 0xffff0000u); };
    const u32 activation = __reduce_max_sync(~0u, larger_half(largest.activation));
    const u32 error = __reduce_max_sync(~0u, larger_half(largest.error));
    if (place.lane == 0)
        shared<float4>(WARPS_AT)[threadIdx.x >> 5] = make_float4(loss, __uint_as_float(activation), __uint_as_float(error), 0.f);
    turn.next();
    return ring;
}

// A block's part of the loss, weights and magnitudes of a batch, by one warp, for all blocks.
__device__ __forceinline__ void write_record() {
    float4 x = zeros();
    if (lane_id() < BLOCK_THREADS / 32) x = shared<float4>(WARPS_AT)[lane_id()];
    float weight = 0.f;
    for (int r = lane_id(); r < ROWS; r += 32) weight += shared<float>(WEIGHTS_AT)[r];
    const float loss = warp_sum(x.x);
    weight = warp_sum(weight);
    const u32 activation = __reduce_max_sync(~0u, __float_as_uint(x.y)), error = __reduce_max_sync(~0u, __float_as_uint(x.z));
    if (lane_id() == 0)
        __stcg(
            context.buffers.records + blockIdx.x,
            make_uint4(__float_as_uint(loss), __float_as_uint(weight), activation, error));
}

// The part of the warp that copies what the workers leave in the buffers to device memory.
__device__ __noinline__ void store_chain(u32 shared) {
    Turn turn(shared);
    const bool copies = lane_id() == 0;
    if (copies) copy_panels_out(turn.from, part_of(0).inputs, part_of(0).in);
#pragma unroll 1
    for (int phase = 0; phase < 2 * LAYERS - 1; ++phase) {
        if (copies) await_copies_read();  // the workers may write over it
        __syncwarp();
        turn.next();
        if (!copies) continue;
        const Part& part = part_of(phase < LAYERS ? phase : 2 * LAYERS - 1 - phase);
        if (phase < LAYERS - 1) copy_panels_out(turn.from, part_of(phase + 1).inputs, part.out);
        else if (phase == LAYERS - 1) copy_panels_out(turn.from, part.errors, part.out);
        else copy_panels_out(turn.from, part_of(2 * LAYERS - 2 - phase).errors, part.in);
    }
    __syncwarp();
    write_record();
    if (copies) await_copies_out();
}

}  // namespace chain
