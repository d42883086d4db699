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

    // Asked for ahead of the products.
    __device__ __forceinline__ void load(const Raw& raw, const Place& place, int feature) {
        if (LABELS) return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const int r = row_of_sum(place, i), f = feature + 8 * (i >> 1 & 1);
            const i64 row = shared<i64>(ROWS_AT)[r];  // -1 beyond the batch
            x[LABELS ? 0 : i] = f < OUTPUTS && row >= 0 ? __ldg(raw.targets + row * OUTPUTS + f) : 0.f;
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
    const Place& place, const StepInfo& info, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS]) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int r = row_of_sum(place, i), f = feature + 8 * (i >> 1 & 1);
        float of_activation, of_loss;
        const float y = activate(OUTPUT_ACTIVATION, sums[i] + (i & 2 ? b1 : b0), of_activation);
        const float loss = output_loss(y, targets.at(i, feature), ENGINE.huber_delta, of_loss);
        const bool counts = f < OUTPUTS && (int)(blockIdx.x * ROWS) + r < info.rows;
        const float weight = shared<float>(WEIGHTS_AT)[r] * (1.f / OUTPUTS);
        total += counts ? weight * loss : 0.f;
        sums[i] = counts ? weight * of_loss * of_activation : 0.f;
    }
    return total;
}

// The same for softmax; a row's classes are spread over lanes, warps and warpgroups, which meet at `scratch`.
__device__ __forceinline__ float softmax_of_sums(
    const Place& place, const StepInfo& info, int feature, float b0, float b1, const Targets& targets, float (&sums)[SUMS],
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
    meet(WORKERS_MEET, WORKERS);
    float shift[ROW_SUMS];
#pragma unroll
    for (int i = 0; i < ROW_SUMS; ++i) {
        const int at = 4 * (i >> 1) + (i & 1);
        float largest = lowest;
#pragma unroll 4
        for (int w = 0; w < 16; ++w) largest = fmaxf(largest, of_warps[row_of_sum(place, at) * 16 + w].x);
        shift[i] = largest;
    }
    meet(WORKERS_MEET, WORKERS);
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
    meet(WORKERS_MEET, WORKERS);
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
        const bool there = (int)(blockIdx.x * ROWS) + r < info.rows;
        const float scale = mass / total, weight = shared<float>(WEIGHTS_AT)[r];
        if (there && place.lane < 4 && warp == 0) total_loss += weight * (mass * logf(total) - inner);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int f = feature + 8 * h, j = at + 2 * h;
            const float goal = LABELS ? (f == label ? 1.f : 0.f) : targets.at(j, feature);
            sums[j] = there && f < OUTPUTS ? weight * (sums[j] * scale - goal) : 0.f;
        }
    }
    meet(WORKERS_MEET, WORKERS);  // before the errors take the place of the sums
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

// All layers forward, the loss, all layers backward. `loss`: of this thread, weighted.
__device__ __forceinline__ void run_chain(
    const Buffers& buffers, const Raw& raw, const StepInfo& info, Ring& ring, Largest& largest, float& loss) {
    const Place place;
    const u32 base = ring.base + BUFFERS_AT;
    if (threadIdx.x == 0) copy_panels_out(buffers, base, part_of(0).inputs, part_of(0).in);
    u32* const kept_here = buffers.kept + (i64)blockIdx.x * LAYERS * ceil_div(most_panels(), GROUPS) * KEPT * WORKERS + threadIdx.x;
#pragma unroll 1
    for (int phase = 0; phase < 2 * LAYERS - 1; ++phase) {
        const bool forward = phase < LAYERS, output = phase == LAYERS - 1;
        const int l = forward ? phase : 2 * LAYERS - 1 - phase;
        const Part& part = part_of(l);
        const u32 from = base + (phase & 1) * BUFFER_BYTES, to = base + (phase + 1 & 1) * BUFFER_BYTES;
        const int outer = forward ? part.out : part.in;
#pragma unroll 1
        for (int first = 0; first < outer; first += GROUPS) {
            const int panel = first + place.group, feature = place.feature(panel);
            const bool works = panel < outer;
            // Layer whose outputs these are, or whose outputs' errors.
            const int own = forward ? l : l - 1;
            u32* keep = kept_here + (own * ceil_div(most_panels(), GROUPS) + first / GROUPS) * KEPT * WORKERS;
            float sums[SUMS];
            u32 pairs[PAIRS], kept[KEPT];
            if (forward) {
                const float* bias = ENGINE.parameters + part.bias;
                const float b0 = feature < part.fan_out ? __ldcg(bias + feature) : 0.f;
                const float b1 = feature + 8 < part.fan_out ? __ldcg(bias + feature + 8) : 0.f;
                Targets targets;
                if (output) targets.load(raw, place, feature);
                multiply<BLOCKS8, true, false>(
                    sums, ring, part.in, !(TURNS_AT_ONCE && output), [&](u32 stage, int) { return stage + place.group * PIECE_BYTES; },
                    [&](u32, int k) { return from + k * PANEL_BYTES; });
                if (output) {
                    if (LOSS == SOFTMAX_CROSS_ENTROPY)
                        loss += softmax_of_sums(
                            place, info, feature, b0, b1, targets, sums, (float*)(dynamic_shared + (to - ring.base)));
                    else
                        loss += errors_of_sums(place, info, feature, b0, b1, targets, sums);
                    finish_errors(buffers, part, place, panel, works, sums, pairs, largest);
                } else {
                    activate_sums(hidden_kind(part), sums, b0, b1, pairs, kept);
#pragma unroll
                    for (int i = 0; i < KEPT; ++i) keep[i * WORKERS] = kept[i];
                    if (works)
#pragma unroll
                        for (int i = 0; i < PAIRS; ++i) largest.activation = larger_pair(largest.activation, pairs[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < KEPT; ++i) kept[i] = keep[i * WORKERS];
                if (TURNS_AT_ONCE && phase == LAYERS) multiply_kept(sums, ring, place.group, from);
                else
                    multiply<BLOCKS8, false, false>(
                        sums, ring, part.out, true, [&](u32 stage, int) { return stage + place.group * PIECE_BYTES; },
                        [&](u32, int k) { return from + k * PANEL_BYTES; });
                apply_slopes(hidden_kind(part_of(own)), sums, kept);
                finish_errors(buffers, part_of(own), place, panel, works, sums, pairs, largest);
            }
            if (works) place.store(to, panel, pairs);
        }
        narrow::publish_operands();
        if (threadIdx.x == 0) await_copies_read();
        meet(WORKERS_MEET, WORKERS);
        if (threadIdx.x == 0) {
            if (phase < LAYERS - 1) copy_panels_out(buffers, to, part_of(l + 1).inputs, part.out);
            else if (output) copy_panels_out(buffers, to, part.errors, part.out);
            else copy_panels_out(buffers, to, part_of(l - 1).errors, part.in);
        }
    }
    if (threadIdx.x == 0) await_copies_out();
}

}  // namespace chain
