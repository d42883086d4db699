// Forward, loss and backward of 64 rows by one warpgroup: every warp keeps its 16 rows in registers from layer to
// layer, and leaves activations and errors (dZ) in shared memory for the weight gradients.
#pragma once
#include "losses.cuh"
#include "narrow_products.cuh"
#include "narrow_rows.cuh"

extern __shared__ __align__(128) unsigned char dynamic_shared[];

namespace narrow {

constexpr int OUTPUTS = width(LAYERS);
constexpr int OUTPUT_COLUMNS = columns(LAYERS);
// Where the last layer's gradient is summed as A^T dZ, its bias gradient is summed here, in registers.
constexpr bool CHAIN_SUMS_BIAS = !out_major(LAYERS - 1);
constexpr int BIAS_SUMS = CHAIN_SUMS_BIAS ? 2 * OUTPUT_COLUMNS : 1;

// What a thread adds up over its tiles.
struct Totals {
    float loss, weight;
    float bias[BIAS_SUMS];
};

__device__ __forceinline__ float2 unpack(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
// NaN goes through: `cvt.relu` makes it the canonical one.
__device__ __forceinline__ u32 pack_relu(float low, float high) {
    u32 pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// `pair` where the same half of the non-negative `gate` is positive, else 0.
__device__ __forceinline__ u32 gate_positive(u32 pair, u32 gate) {
    u32 mask;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("{ .reg .b32 zero; mov.b32 zero, 0; set.gt.u32.bf16x2 %0, %1, zero; }" : "=r"(mask) : "r"(gate));
#else
    asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(mask) : "r"(gate + 0x7fff7fffu));  // spreads each half's top bit
#endif
    return pair & mask;
}

template <int KIND>
__device__ __forceinline__ u32 activate_pair(float a, float b, u32& slope) {
    float slope_a, slope_b;
    const float y = activate(KIND, a, slope_a), z = activate(KIND, b, slope_b);
    slope = pack_pair(slope_a, slope_b);
    return pack_pair(y, z);
}

template <int KIND>
__device__ __forceinline__ u32 backward_pair(float a, float b, u32 kept) {
    if (KIND == RELU) return gate_positive(pack_pair(a, b), kept);
    const float2 k = unpack(kept);
    if (stores_slope(KIND)) return pack_pair(a * k.x, b * k.y);
    return pack_pair(a * slope_of_output(KIND, k.x), b * slope_of_output(KIND, k.y));
}

struct Chain {
    u32 shared;           // start of shared memory
    const float* scales;  // in it
    int row_block;        // of this warp's 16 rows in the tile

    template <int L>
    __device__ __forceinline__ float2 bias(int block) const {
        float2 pair;
        const u32 at = shared + FIXED(bias_at(L)) + block * 32 + (threadIdx.x & 3) * 8;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at));
        return pair;
    }
    template <int I>
    __device__ __forceinline__ u32 activation_fragment() const {
        return fragment_address(shared + FIXED(activation_at(I)), row_block, FIXED(activation_columns(I)));
    }
    template <int I>
    __device__ __forceinline__ u32 delta_fragment() const {
        return fragment_address(shared + FIXED(delta_at(I)), row_block, FIXED(columns(I)));
    }

    // Inputs of the warp's 16 rows on their way to shared memory: loads that are waited for only when they are stored.
    struct Inputs {
        float2 x[2 * columns(0)];  // halves of rows (i & 1) and of 16 columns (i >> 1)
    };
    __device__ __forceinline__ void load_inputs(const Raw& raw, const RowPair& rows, Inputs& inputs) const {
        const int t = threadIdx.x & 3;
        const bool plain = ENGINE.raw_type == RAW_F32;
#pragma unroll
        for (int i = 0; i < FIXED(2 * columns(0)); ++i) {
            const float* row = (const float*)raw.inputs + rows.row[i & 1] * width(0);
            inputs.x[i] = plain && rows.there[i & 1] ? load_columns<width(0)>(row, (i >> 1) * 8 + 2 * t)
                                                     : make_float2(0.f, 0.f);
        }
    }
    // `at`: position of the warp's first row in the batch.
    __device__ __forceinline__ void store_inputs(
        const Raw& raw, const StepInfo& info, const RowPair& rows, int at, const Inputs& inputs) const {
        if (ENGINE.raw_type == RAW_F32) {
            const int t = threadIdx.x & 3;
            u32 pairs[2 * columns(0)];
#pragma unroll
            for (int i = 0; i < FIXED(2 * columns(0)); ++i) {
                const float2 x = scale_columns<width(0)>(inputs.x[i], (i >> 1) * 8 + 2 * t, scales, 0);
                pairs[i] = rows.there[i & 1] ? pack_pair(x.x, x.y) : 0u;
            }
            store_fragments<columns(0), activation_columns(0)>(activation_fragment<0>(), pairs);
        } else {  // element by element, so that there is one copy of the conversions
            u8* matrix = dynamic_shared + FIXED(activation_at(0));
            constexpr int COLUMNS = padded(0), STRIDE = activation_columns(0);
            for (int i = threadIdx.x & 31; i < 16 * COLUMNS; i += 32) {
                const int r = i / COLUMNS, c = i % COLUMNS;
                const bool there = at + r < info.rows && c < width(0);
                const float x = there ? raw_column(raw.inputs, raw_row(raw, info.first + at + r), c, scales) : 0.f;
                const int block = (row_block + (r >> 3)) * STRIDE + (c >> 3);
                *(Element*)(matrix + block * BLOCK_BYTES + (r & 7) * 16 + (c & 7) * 2) = to_element(x);
            }
        }
        __syncwarp();
    }
    // Operands that come from two branches make the compiler serialise `wgmma`: they are read back on either way.
    __device__ __forceinline__ void read_inputs(u32 (&a)[2 * columns(0)]) const {
        const u32 address = activation_fragment<0>();
#pragma unroll
        for (int k = 0; k < FIXED(columns(0) / 2); ++k) {
            u32 piece[4];
            load_blocks4<false>(piece, address + k * 256);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[4 * k + i] = piece[i];
        }
    }

    // Targets are asked for ahead of the first layer where there are registers for them.
    static constexpr bool EARLY_TARGETS = !LABELS && OUTPUT_COLUMNS <= 4;
    struct Targets {
        float2 x[EARLY_TARGETS ? 2 * OUTPUT_COLUMNS : 1];
    };
    __device__ __forceinline__ float2 load_target(const Raw& raw, const RowPair& rows, int half, int column) const {
        if (!rows.there[half]) return make_float2(0.f, 0.f);
        return load_columns<OUTPUTS>(raw.targets + rows.row[half] * OUTPUTS, column);
    }
    __device__ __forceinline__ void load_targets(const Raw& raw, const RowPair& rows, Targets& targets) const {
        if (EARLY_TARGETS) {
#pragma unroll
            for (int i = 0; i < 2 * OUTPUT_COLUMNS; ++i)
                targets.x[i] = load_target(raw, rows, i & 1, (i >> 1) * 8 + 2 * (threadIdx.x & 3));
        }
    }
    __device__ __forceinline__ float2 target(
        const Raw& raw, const RowPair& rows, const Targets& targets, int half, int block) const {
        const int column = block * 8 + 2 * (threadIdx.x & 3);
        const float2 x = EARLY_TARGETS ? targets.x[2 * block + half] : load_target(raw, rows, half, column);
        return scale_columns<OUTPUTS>(x, column, scales, FIXED(padded(0)));
    }

    template <int COLUMNS, int STRIDE>
    __device__ __forceinline__ void store_fragments(u32 address, const u32 (&a)[2 * COLUMNS]) const {
#pragma unroll
        for (int k = 0; k < COLUMNS / 2; ++k)
            store_blocks4(address + k * 256, {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]}, STRIDE);
    }

    // Layer L and all that follow, then backward. `a`: this warp's rows of the layer's input. `next_rows`: of the tile
    // to come, whose `inputs` are asked for on the way.
    template <int L>
    __device__ __forceinline__ void forward(
        const u32 (&a)[2 * columns(L)], const Raw& raw, const RowPair& rows, const RowPair& next_rows,
        Inputs& inputs, const Targets& targets, Totals& totals) const {
        constexpr int OUT = columns(L + 1), KIND = activation(L);
        float z[4 * OUT];
        const Operand<OUT * BLOCK_BYTES, BLOCK_BYTES, true> weight{shared + FIXED(weight_at(L))};
        begin_products();
#pragma unroll
        for (int k = 0; k < FIXED(columns(L) / 2); ++k) product<OUT>(z, a + 4 * k, weight.step(k), k > 0);
        commit_products();
        float2 b[OUT];
#pragma unroll
        for (int j = 0; j < OUT; ++j) b[j] = bias<L>(j);
        wait_products();
        settle(z);
#pragma unroll
        for (int i = 0; i < 4 * OUT; ++i) z[i] += i & 1 ? b[i / 4].y : b[i / 4].x;
        if constexpr (L + 1 < LAYERS) {
            u32 next[2 * OUT], slope[2 * OUT];
#pragma unroll
            for (int i = 0; i < 2 * OUT; ++i) {
                if (KIND == RELU)
                    next[i] = pack_relu(z[2 * i], z[2 * i + 1]);
                else
                    next[i] = activate_pair<KIND>(z[2 * i], z[2 * i + 1], slope[i]);
            }
            store_fragments<OUT, activation_columns(L + 1)>(activation_fragment<L + 1>(), next);
            // The place of dZ is free until it is known: the slope waits there.
            if (stores_slope(KIND)) store_fragments<OUT, OUT>(delta_fragment<L + 1>(), slope);
            forward<L + 1>(next, raw, rows, next_rows, inputs, targets, totals);
        } else {
            u32 dz[2 * OUT];
            load_inputs(raw, next_rows, inputs);  // early enough to be there behind the weight gradients
            output(z, raw, rows, targets, totals, dz);
            store_fragments<OUT, OUT>(delta_fragment<LAYERS>(), dz);
            backward<LAYERS - 1>(dz);
        }
    }

    // From dZ of layer L's output to dZ of its input's layer, and on to the first.
    template <int L>
    __device__ __forceinline__ void backward(const u32 (&dz)[2 * columns(L + 1)]) const {
        if constexpr (L > 0) {
            constexpr int IN = columns(L), KIND = activation(L - 1);
            float d[4 * IN];
            const Operand<BLOCK_BYTES, columns(L + 1) * BLOCK_BYTES, false> weight{shared + FIXED(weight_at(L))};
            begin_products();
#pragma unroll
            for (int k = 0; k < FIXED(columns(L + 1) / 2); ++k) product<IN>(d, dz + 4 * k, weight.step(k), k > 0);
            commit_products();
            const u32 from = stores_slope(KIND) ? delta_fragment<L>() : activation_fragment<L>();
            u32 kept[IN / 2][4], next[2 * IN];
#pragma unroll
            for (int k = 0; k < IN / 2; ++k) load_blocks4<false>(kept[k], from + k * 256);
            wait_products();
            settle(d);
#pragma unroll
            for (int i = 0; i < 2 * IN; ++i) next[i] = backward_pair<KIND>(d[2 * i], d[2 * i + 1], kept[i / 4][i % 4]);
            store_fragments<IN, IN>(delta_fragment<L>(), next);
            backward<L - 1>(next);
        }
    }

    // Loss and its gradient at the output layer's sums `z`.
    __device__ __forceinline__ void output(
        float (&z)[4 * OUTPUT_COLUMNS], const Raw& raw, const RowPair& rows, const Targets& targets, Totals& totals,
        u32 (&dz)[2 * OUTPUT_COLUMNS]) const {
        if (LOSS == SOFTMAX_CROSS_ENTROPY)
            softmax(z, raw, rows, targets, totals);
        else
            elementwise(z, raw, rows, targets, totals);
#pragma unroll
        for (int i = 0; i < 2 * OUTPUT_COLUMNS; ++i) dz[i] = pack_pair(z[2 * i], z[2 * i + 1]);
        if (CHAIN_SUMS_BIAS) {
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
                totals.bias[2 * j] += z[4 * j] + z[4 * j + 2];
                totals.bias[2 * j + 1] += z[4 * j + 1] + z[4 * j + 3];
            }
        }
    }

    __device__ __forceinline__ void elementwise(
        float (&z)[4 * OUTPUT_COLUMNS], const Raw& raw, const RowPair& rows, const Targets& targets,
        Totals& totals) const {
        const int t = threadIdx.x & 3;
        float loss[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2 * OUTPUT_COLUMNS; ++i) {
            const int half = i & 1, column = (i >> 1) * 8 + 2 * t;
            const float2 goal = target(raw, rows, targets, half, i >> 1);
            const float scale = rows.weight[half] * (1.f / OUTPUTS);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float slope, out_slope;
                const float y = activate(OUTPUT_ACTIVATION, z[2 * i + e], out_slope);
                const float l = output_loss(y, e ? goal.y : goal.x, ENGINE.huber_delta, slope);
                const bool counts = rows.there[half] && column + e < OUTPUTS;
                loss[half] += counts ? l : 0.f;
                z[2 * i + e] = counts ? scale * slope * out_slope : 0.f;
            }
        }
        totals.loss += (rows.weight[0] * loss[0] + rows.weight[1] * loss[1]) * (1.f / OUTPUTS);
    }

    // A row's classes are spread over the four lanes of a quad.
    __device__ __forceinline__ float quad_max(float x) const {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
    __device__ __forceinline__ float quad_sum(float x) const {
        x += __shfl_xor_sync(~0u, x, 1);
        return x + __shfl_xor_sync(~0u, x, 2);
    }

    __device__ __forceinline__ void softmax(
        float (&z)[4 * OUTPUT_COLUMNS], const Raw& raw, const RowPair& rows, const Targets& targets,
        Totals& totals) const {
        const int t = threadIdx.x & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool there = rows.there[half];
            float largest = -__int_as_float(0x7f800000), total = 0.f, mass = 0.f, inner = 0.f;
            float2 goals[OUTPUT_COLUMNS];
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
                const int column = 8 * j + 2 * t;
                goals[j] = LABELS ? make_float2(column == rows.label[half], column + 1 == rows.label[half])
                                   : target(raw, rows, targets, half, j);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (column + e < OUTPUTS) largest = fmaxf(largest, z[4 * j + 2 * half + e]);
            }
            largest = quad_max(largest);
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& value = z[4 * j + 2 * half + e];
                    const float shifted = value - largest, goal = e ? goals[j].y : goals[j].x;
                    const bool counts = 8 * j + 2 * t + e < OUTPUTS;
                    value = counts ? expf(shifted) : 0.f;
                    total += value;
                    mass += counts ? goal : 0.f;
                    inner += counts && goal != 0.f ? goal * shifted : 0.f;
                }
            }
            total = quad_sum(total);
            inner = quad_sum(inner);
            mass = quad_sum(mass);
            if (LABELS && (rows.label[half] < 0 || rows.label[half] >= OUTPUTS)) mass = __int_as_float(0x7fc00000);
            const float scale = mass / total, weight = rows.weight[half];
#pragma unroll
            for (int j = 0; j < OUTPUT_COLUMNS; ++j) {
                float* value = z + 4 * j + 2 * half;
                value[0] = there ? weight * (value[0] * scale - goals[j].x) : 0.f;
                value[1] = there ? weight * (value[1] * scale - goals[j].y) : 0.f;
            }
            if (there && t == 0) totals.loss += weight * (mass * logf(total) - inner);
        }
    }
};

}  // namespace narrow
