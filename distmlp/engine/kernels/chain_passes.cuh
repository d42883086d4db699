// Forward and backward through all layers by a block's workers, and the warp that copies what they leave to device memory.
#pragma once
#include "chain_loss.cuh"

namespace chain {

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

constexpr int TURNS = ceil_div(most_panels(), GROUPS);  // of the warpgroups over a layer's panels
// Layers one after the other in code: every offset a constant, and the signs of ReLU stay in registers.
constexpr bool UNROLLED = TURNS == 1 && LAYERS <= 6;

// A layer as `Part`, known when it is compiled.
template <int L>
struct FixedPart {
    static constexpr int fan_in = width(L), fan_out = width(L + 1), in = panels(L), out = panels(L + 1), feature = first_feature(L);
    const int bias, activation;

    __device__ __forceinline__ FixedPart() : bias((int)ENGINE.layer[L].bias_offset), activation(ENGINE.layer[L].activation) {}
};

// The workers' part of a chain: all layers forward, the loss, all layers backward.
struct Chain {
    const Place place;
    const RowTable& table;
    Ring ring;
    Turn turn;
    Largest largest;
    float loss;
    u32* const kept_here;
    u32 signs[UNROLLED && BITS ? LAYERS : 1];

    __device__ __forceinline__ Chain(const Ring& ring, int parity)
        : table(row_table(parity)), ring(ring), turn(ring.base), largest{0, 0}, loss(0.f),
          kept_here(context.buffers.kept + (i64)blockIdx.x * LAYERS * TURNS * KEPT * WORKERS + threadIdx.x) {}

    __device__ __forceinline__ void keep(int l, int turn_of_panels, const u32 (&kept)[KEPT]) {
        if (UNROLLED && BITS) {
            signs[l] = kept[0];
            return;
        }
        u32* to = kept_here + (l * TURNS + turn_of_panels) * KEPT * WORKERS;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) to[i * WORKERS] = kept[i];
    }
    __device__ __forceinline__ void recall(int l, int turn_of_panels, u32 (&kept)[KEPT]) const {
        if (UNROLLED && BITS) {
            kept[0] = signs[l];
            return;
        }
        const u32* from = kept_here + (l * TURNS + turn_of_panels) * KEPT * WORKERS;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) kept[i] = from[i * WORKERS];
    }

    template <class P>
    __device__ __forceinline__ void forward(int l, const P& part) {
        const bool output = l == LAYERS - 1;
        const u32 own = place.group * PIECE_BYTES;
#pragma unroll 1
        for (int first = 0; first < part.out; first += GROUPS) {
            const int panel = first + place.group, feature = place.feature(panel);
            if (l == 0) ring.await_full();  // biases are there when weights are
            const float* bias = ENGINE.parameters + part.bias;
            const float b0 = feature < part.fan_out ? __ldcg(bias + feature) : 0.f;
            const float b1 = feature + 8 < part.fan_out ? __ldcg(bias + feature + 8) : 0.f;
            float sums[SUMS];
            u32 pairs[PAIRS];
            multiply<BLOCKS8, true, false>(
                sums, ring, part.in, !(TURNS_AT_ONCE && output), [&](u32 stage, int) { return stage + own; },
                [&](u32, int k) { return turn.from + k * PANEL_BYTES; });
            if (output) {
                Targets targets;
                targets.load(place, table, feature);
                targets.finish(feature);
                if (LOSS == SOFTMAX_CROSS_ENTROPY)
                    loss += softmax_of_sums(
                        place, table, feature, b0, b1, targets, sums, (float*)(dynamic_shared + (turn.to - ring.base)));
                else
                    loss += errors_of_sums(place, table, feature, b0, b1, targets, sums);
                finish_errors(part, place, panel, panel < part.out, sums, pairs, largest);
            } else {
                u32 kept[KEPT];
                activate_sums(hidden_kind(part), sums, b0, b1, pairs, kept);
                keep(l, first / GROUPS, kept);
                if (panel < part.out)
#pragma unroll
                    for (int i = 0; i < PAIRS; ++i) largest.activation = larger_pair(largest.activation, pairs[i]);
            }
            if (panel < part.out) place.store(turn.to, panel, pairs);
        }
        narrow::publish_operands();
        if (!output) turn.next();
    }

    // From the errors of layer l's outputs to those of its inputs.
    template <class P, class Q>
    __device__ __forceinline__ void backward(int l, const P& part, const Q& below) {
        turn.next();
        const u32 own = place.group * PIECE_BYTES;
#pragma unroll 1
        for (int first = 0; first < part.in; first += GROUPS) {
            const int panel = first + place.group;
            u32 kept[KEPT], pairs[PAIRS];
            recall(l - 1, first / GROUPS, kept);
            float sums[SUMS];
            if (TURNS_AT_ONCE && l == LAYERS - 1)
                multiply_kept(sums, ring, place.group, turn.from);
            else
                multiply<BLOCKS8, false, false>(
                    sums, ring, part.out, true, [&](u32 stage, int) { return stage + own; },
                    [&](u32, int k) { return turn.from + k * PANEL_BYTES; });
            apply_slopes(hidden_kind(below), sums, kept);
            finish_errors(below, place, panel, panel < part.in, sums, pairs, largest);
            if (panel < part.in) place.store(turn.to, panel, pairs);
        }
        narrow::publish_operands();
    }

    template <int L>
    __device__ __forceinline__ void forward_from() {
        forward(L, FixedPart<L>());
        if constexpr (L + 1 < LAYERS) forward_from<L + 1>();
    }
    template <int L>
    __device__ __forceinline__ void backward_from() {
        if constexpr (L > 0) {
            backward(L, FixedPart<L>(), FixedPart<L - 1>());
            backward_from<L - 1>();
        }
    }
    __device__ __forceinline__ void run() {
        if constexpr (UNROLLED) {
            forward_from<0>();
            backward_from<LAYERS - 1>();
        } else {
#pragma unroll 1
            for (int l = 0; l < LAYERS; ++l) forward(l, part_of(l));
#pragma unroll 1
            for (int l = LAYERS - 1; l > 0; --l) backward(l, part_of(l), part_of(l - 1));
        }
        loss = warp_sum(loss);
        const auto larger_half = [](u32 pair) { return max(pair << 16, pair & 0xffff0000u); };
        const u32 activation = __reduce_max_sync(~0u, larger_half(largest.activation));
        const u32 error = __reduce_max_sync(~0u, larger_half(largest.error));
        if (place.lane == 0)
            shared<float4>(WARPS_AT)[threadIdx.x >> 5] =
                make_float4(loss, __uint_as_float(activation), __uint_as_float(error), 0.f);
        turn.next();
    }
};

__device__ __forceinline__ Ring run_chain(Ring ring, int parity) {
    Chain chain(ring, parity);
    chain.run();
    return chain.ring;
}

// Blocks with rows of the same part of a batch, by the steps of 64 rows of a part.
__device__ __forceinline__ int split_of_block(int steps) { return ((blockIdx.x * ROWS / 64 + 1) * SPLITS - 1) / steps; }

// A block's part of the loss, weights and magnitudes of a batch, by one warp, for all blocks.
__device__ __forceinline__ void write_record(int parity) {
    const int lane = lane_id(), inputs = input_record(parity);
    float4 x = zeros();
    if (lane < WORKERS / 32 || lane == inputs || lane == inputs + 1) x = shared<float4>(WARPS_AT)[lane];
    float weight = 0.f;
    for (int r = lane; r < ROWS; r += 32) weight += row_table(parity).weight[r];
    const float loss = warp_sum(x.x);
    weight = warp_sum(weight);
    const u32 activation = __reduce_max_sync(~0u, __float_as_uint(x.y)), error = __reduce_max_sync(~0u, __float_as_uint(x.z));
    if (lane == 0)
        __stcg(
            context.buffers.records + blockIdx.x,
            make_uint4(__float_as_uint(loss), __float_as_uint(weight), activation, error));
}

// The part of the warp that copies what the workers leave in the buffers to device memory, and tells the other blocks.
__device__ __noinline__ void store_chain(u32 shared, int rows, u32 done, int parity) {
    Turn turn(shared);
    const bool copies = lane_id() == 0;
    const int steps = steps_of_64(rows);
    const bool counts = (int)(blockIdx.x * ROWS / 64) < steps;  // a pair's second block may have no rows at all
    u32* const chained = context.buffers.chained + (counts ? split_of_block(steps) : 0);
#pragma unroll 1
    for (int phase = 0; phase < 2 * LAYERS - 1; ++phase) {
        if (copies) await_copies_read();  // the workers may write over it
        __syncwarp();
        turn.next();
        if (!copies) continue;
        const int l = 2 * LAYERS - 2 - phase;  // backward: its errors are there
        if (phase < LAYERS - 1) await_update(phase + 1, done);
        if (phase < LAYERS - 1) copy_panels_out(turn.from, part_of(phase + 1).inputs, part_of(phase).out);
        else copy_panels_out(turn.from, part_of(l).errors, part_of(l).out);
        if (phase < LAYERS || !counts) continue;
        await_copies_out<1>();
        count_up(chained + (l + 1) * SPLITS);
    }
    __syncwarp();
    write_record(parity);
    if (!copies) return;
    await_copies_out<0>();
    if (counts) count_up(chained);
    count_up(context.buffers.chained + LAYERS * SPLITS);
}

}  // namespace chain
