// The passes of a block over its rows: up through the layers as far as a pass needs, down to its lowest, its weight
// gradients on top of those of the block's other tiles. Rows go from registers to registers as in narrow_chain.cuh.
//
// Between passes a thread leaves its part of the network's inputs and of the errors at the lower end in device memory,
// and only the same thread reads them back. What lies in between is computed anew.
#pragma once
#include "bulk_copy.cuh"
#include "narrow_exchange.cuh"
#include "passes_shape.cuh"

namespace narrow {

// Keeps what follows from `x` from being computed ahead of a loop, where it would cost a register each.
__device__ __forceinline__ u32 here(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T>
__device__ __forceinline__ T* here(T* x) {
    asm volatile("" : "+l"(x));
    return x;
}
// An operand's descriptor for `wgmma` from one base in units of 16 bytes: everything else is a constant.
template <int K_BYTES, int OTHER_BYTES>
__device__ __forceinline__ u64 descriptor(u32 base16, int at, int k16) {
    const u32 low = base16 + (u32)((at >> 4) + k16 * (2 * K_BYTES >> 4) + (K_BYTES >> 4 << 16));
    return (u64)(OTHER_BYTES >> 4) << 32 | low;
}

// Both warpgroups have the same items of pass P but for the rows: 64 each of every layer.
template <int P>
SHAPE_FN bool alike() {
    for (int i = 0; i < ITEM_COUNT; ++i) {
        if (item(i).layer < pass(P).low || item(i).layer >= pass(P).high) continue;
        if (item(i).block != item(i).group) return false;
        bool partner = false;
        for (int k = 0; k < ITEM_COUNT; ++k)
            partner |= item(k).layer == item(i).layer && item(k).block != item(i).block && item(k).offset == item(i).offset;
        if (!partner) return false;
    }
    return true;
}
// Nobody reads it again: it makes room in L2 first.
__device__ __forceinline__ uint4 load_last(const void* where) {
    uint4 x;
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "ld.relaxed.gpu.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], policy; }"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(where)
        : "memory");
    return x;
}

struct Walk : Chain {
    int group;
    u32 weights_there;  // barriers, one a layer
    u32 phase;          // of them
    uint4* kept;        // this thread's vectors of the block's first tile

    __device__ __forceinline__ uint4* kept_tile(int tile) const {
        return here(kept + tile * KEPT_VECTORS * BLOCK_THREADS);
    }
    template <int P>
    static __device__ __forceinline__ uint4* inputs_of(uint4* tile) {
        return tile + FIXED(input_vector_at(P)) * BLOCK_THREADS;
    }
    template <int P>
    static __device__ __forceinline__ uint4* slopes_of(uint4* tile) {
        return inputs_of<P>(tile) + FIXED(input_vectors(P)) * BLOCK_THREADS;
    }
    static __device__ __forceinline__ uint4* errors_of(uint4* tile) { return tile + ERRORS_VECTOR_AT * BLOCK_THREADS; }
    template <int COUNT>
    static __device__ __forceinline__ void keep(uint4* where, const u32 (&a)[4 * COUNT]) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
            __stcg(where + k * BLOCK_THREADS, make_uint4(a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]));
    }
    template <int COUNT>
    static __device__ __forceinline__ void fetch(const uint4* where, u32 (&a)[4 * COUNT]) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const uint4 x = load_last(where + k * BLOCK_THREADS);
            a[4 * k] = x.x, a[4 * k + 1] = x.y, a[4 * k + 2] = x.z, a[4 * k + 3] = x.w;
        }
    }
    // What store_inputs does with inputs that need no conversion. No branch, as products may be under way.
    __device__ __forceinline__ void store_plain_inputs(const RowPair& rows, const Inputs& inputs) const {
        u32 pairs[2 * columns(0)];
#pragma unroll
        for (int i = 0; i < FIXED(2 * columns(0)); ++i) {
            const float2 x = scale_columns<width(0)>(inputs.x[i], (i >> 1) * 8 + 2 * (threadIdx.x & 3), scales, 0);
            pairs[i] = pack_pair(x.x, x.y) & (rows.there[i & 1] ? ~0u : 0u);
        }
        store_fragments<columns(0), activation_columns(0)>(activation_fragment<0>(), pairs);
    }
    // The rows of the tile whose inputs are in shared memory wait there, too.
    __device__ __forceinline__ uint4* row_place(int half) const {
        return (uint4*)(dynamic_shared + ROWS_AT) + 8 * (row_block + half) + ((threadIdx.x & 31) >> 2);
    }
    __device__ __forceinline__ void remember(const RowPair& rows) const {  // no branch
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u64 row = rows.there[half] ? rows.row[half] : ~0ull;
            asm volatile(
                "{ .reg .pred p; setp.eq.u32 p, %5, 0; @p st.shared.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"r"(
                    (u32)__cvta_generic_to_shared(row_place(half))),
                "r"((u32)row), "r"((u32)(row >> 32)), "f"(rows.weight[half]), "r"(rows.label[half]), "r"(threadIdx.x & 3)
                : "memory");
        }
        __syncwarp();
    }
    __device__ __forceinline__ void recall(RowPair& rows) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 x = *row_place(half);
            rows.there[half] = x.y != ~0u;
            rows.row[half] = rows.there[half] ? (i64)((u64)x.y << 32 | x.x) : 0;
            rows.weight[half] = __uint_as_float(x.z);
            rows.label[half] = (int)x.w;
        }
    }
    template <int P, int I>
    __device__ __forceinline__ u32 input_fragment() const {
        return fragment_address(here(shared) + FIXED(input_at(P, I)), row_block, FIXED(activation_columns(I)));
    }
    template <int P, int I>
    __device__ __forceinline__ u32 error_fragment() const {
        return fragment_address(here(shared) + FIXED(error_at(P, I)), row_block, FIXED(columns(I)));
    }

    // Layer L and those above it that pass P needs, then down again. `a`: this warp's rows of the layer's input.
    template <int P, int L, class Above>
    __device__ __forceinline__ void forward(const u32 (&a)[2 * columns(L)], const Above& above) const {
        constexpr int OUT = columns(L + 1), KIND = activation(L), LOW = pass(P).low, HIGH = pass(P).high;
        constexpr bool LAST = HIGH < LAYERS && L + 1 == HIGH - 1;
        constexpr int BEGINS = P == 0 ? pass_from(L + 1) : 0;  // the pass that begins with what comes out
        float z[4 * OUT];
        if constexpr (P == 0)
            if (above.first) barrier_wait(weights_there + 8 * L, phase);
#pragma unroll
        for (int j = 0; j < OUT; ++j) {
            const float2 b = bias<L>(j);
            z[4 * j] = z[4 * j + 2] = b.x, z[4 * j + 1] = z[4 * j + 3] = b.y;
        }
        if (L == 1 && group == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
        const u32 base = here(shared >> 4);
        settle(z);
        begin_products();
#pragma unroll
        for (int k = 0; k < FIXED(columns(L) / 2); ++k)
            Wgmma<OUT>::template rs<true>(
                z, a + 4 * k, descriptor<OUT * BLOCK_BYTES, BLOCK_BYTES>(base, FIXED(weight_at(L)), k), true);
        commit_products();
        if constexpr (P == 0 && L == (LAYERS > 1 ? LAYERS - 2 : 0)) {  // to be there for the output layer
            recall(above.rows);
            load_targets(above.raw, above.rows, above.targets);
        }
        wait_products();
        settle(z);
        if (L == 1 && group == 0) asm volatile("bar.arrive 1, 256;" ::: "memory");
        if constexpr (L + 1 < LAYERS) {
            u32 next[2 * OUT], slope[2 * OUT];
#pragma unroll
            for (int i = 0; i < 2 * OUT; ++i) {
                if (KIND == RELU)
                    next[i] = pack_relu(z[2 * i], z[2 * i + 1]);
                else
                    next[i] = activate_pair<KIND>(z[2 * i], z[2 * i + 1], slope[i]);
            }
            if constexpr (L + 1 >= LOW) {
                store_fragments<OUT, activation_columns(L + 1)>(input_fragment<P, L + 1>(), next);
                if constexpr (slope_waits(L + 1)) store_fragments<OUT, OUT>(error_fragment<P, L + 1>(), slope);
            }
            if constexpr (BEGINS > 0) {
                keep<OUT / 2>(inputs_of<BEGINS>(above.kept), next);
                if constexpr (keeps_slope(BEGINS)) keep<OUT / 2>(slopes_of<BEGINS>(above.kept), slope);
            }
            if constexpr (LAST)
                turn<P>(above.dz, above);
            else
                forward<P, L + 1>(next, above);
        } else {
            if ((threadIdx.x & 3) == 0) above.totals.weight += above.rows.weight[0] + above.rows.weight[1];
            u32 dz_top[2 * OUT];
            output(z, above.raw, above.rows, above.targets, above.totals, dz_top);
            store_fragments<OUT, OUT>(error_fragment<P, LAYERS>(), dz_top);
            backward<P, LAYERS - 1>(dz_top, above);
        }
    }
    // Down again from the errors that the pass before has left.
    template <int P, class Above>
    __device__ __forceinline__ void turn(const u32 (&dz)[2 * columns(pass(P).high)], const Above& above) const {
        constexpr int HIGH = pass(P).high;
        store_fragments<columns(HIGH), columns(HIGH)>(error_fragment<P, HIGH>(), dz);
        backward<P, HIGH - 1>(dz, above);
    }

    template <int P, int L, class Above>
    __device__ __forceinline__ void backward(const u32 (&dz)[2 * columns(L + 1)], const Above& above) const {
        if constexpr (L > 0) {
            constexpr int IN = columns(L);
            float d[4 * IN];
#pragma unroll
            for (int i = 0; i < 4 * IN; ++i) d[i] = 0.f;  // else they would live all along the loop over tiles
            settle(d);
            begin_products();
            multiply_back<L>(d, dz);
            wait_products();
            settle(d);
            u32 next[2 * IN];
            finish_back<P, L>(d, next);
            if constexpr (L > pass(P).low) {
                store_fragments<IN, IN>(error_fragment<P, L>(), next);
                backward<P, L - 1>(next, above);
            } else {
                keep<IN / 2>(errors_of(above.kept), next);
            }
        }
    }
    template <int L>
    __device__ __forceinline__ void multiply_back(float (&d)[4 * columns(L)], const u32 (&dz)[2 * columns(L + 1)]) const {
        constexpr int IN = columns(L), OUT = columns(L + 1);
        const u32 base = here(shared >> 4);
#pragma unroll
        for (int k = 0; k < FIXED(OUT / 2); ++k)
            Wgmma<IN>::template rs<false>(
                d, dz + 4 * k, descriptor<BLOCK_BYTES, OUT * BLOCK_BYTES>(base, FIXED(weight_at(L)), k), true);
        commit_products();
    }
    template <int P, int L>
    __device__ __forceinline__ void finish_back(const float (&d)[4 * columns(L)], u32 (&next)[2 * columns(L)]) const {
        u32 from;
        if constexpr (slope_waits(L)) from = error_fragment<P, L>();
        else from = input_fragment<P, L>();
#pragma unroll
        for (int k = 0; k < columns(L) / 2; ++k) {
            u32 known[4];
            load_blocks4<false>(known, from + k * 256);
#pragma unroll
            for (int i = 4 * k; i < 4 * k + 4; ++i)
                next[i] = backward_pair<activation(L - 1)>(d[2 * i], d[2 * i + 1], known[i % 4]);
        }
    }
};

// What the upmost pass meets at the output layer.
struct Top {
    const Raw& raw;
    RowPair& rows;
    Chain::Targets& targets;
    Totals& totals;
    uint4* kept;  // this thread's, of the tile at hand
    bool first;   // tile of a step
};
// And a lower one.
template <int P>
struct Lower {
    const u32 (&dz)[2 * columns(pass(P).high)];  // the errors that the pass before has left
    uint4* kept;
};

template <int P>
__device__ __forceinline__ constexpr bool belongs(int layer) {
    return layer >= pass(P).low && layer < pass(P).high;
}
// `left`: `base`, and where that is the other warpgroup's item, its rows.
template <int P, int GROUP, int I>
__device__ __forceinline__ void add_pass_items(float* sums, u32 base, u32 left) {
    if constexpr (I < ITEM_COUNT) {
        constexpr Item ITEM = item(I);
        constexpr int L = ITEM.layer, FIRST = ITEM.block * 8 * BLOCK_BYTES;
        if constexpr (ITEM.group == GROUP && belongs<P>(L)) {
            constexpr int IN = activation_columns(L), OUT = columns(L + 1), A = input_at(P, L), DZ = error_at(P, L + 1);
#pragma unroll
            for (int k = 0; k < TILE / 16; ++k) {
                if constexpr (ITEM.out_major)
                    Wgmma<IN>::template ss<true, true>(
                        sums + ITEM.offset, descriptor<OUT * BLOCK_BYTES, BLOCK_BYTES>(left, DZ + FIRST, k),
                        descriptor<IN * BLOCK_BYTES, BLOCK_BYTES>(base, A, k));
                else
                    Wgmma<OUT>::template ss<true, true>(
                        sums + ITEM.offset, descriptor<IN * BLOCK_BYTES, BLOCK_BYTES>(left, A + FIRST, k),
                        descriptor<OUT * BLOCK_BYTES, BLOCK_BYTES>(base, DZ, k));
            }
        }
        add_pass_items<P, GROUP, I + 1>(sums, base, left);
    }
}
// `meanwhile()` is called with the products under way; it must not branch.
template <int P, int GROUP, int N, class F>
__device__ __forceinline__ void add_pass_tile(int group_, float (&sums)[N], u32 shared, const F& meanwhile) {
    if constexpr (GROUP < GROUPS) {
        const int group = GROUP == 0 ? __shfl_sync(~0u, group_, 0) : group_;  // the same in a warp, as the compiler sees
        if (alike<P>() || group == GROUP) {
            const u32 base = here(shared >> 4);
            const u32 left = base + (alike<P>() ? group * (8 * BLOCK_BYTES >> 4) : 0);
            settle(sums);
            begin_products();
            add_pass_items<P, GROUP, 0>(sums, base, left);
            commit_products();
            meanwhile();
            wait_products();
            settle(sums);
        } else {
            add_pass_tile<P, GROUP + 1>(group, sums, shared, meanwhile);
        }
    }
}
template <int P, int GROUP, int I>
__device__ __forceinline__ void write_pass_items(const float* sums, float* partial, Limit& limit) {
    if constexpr (I < ITEM_COUNT) {
        if constexpr (item(I).group == GROUP && belongs<P>(item(I).layer)) write_item<I>(sums, partial, limit);
        write_pass_items<P, GROUP, I + 1>(sums, partial, limit);
    }
}
template <int P, int N>
__device__ __forceinline__ void write_pass(int group, float (&sums)[N], float* partial, Limit& limit) {
    static_assert(GROUPS == 2, "two branches");
    settle(sums);
    if (group == 0) write_pass_items<P, 0, 0>(sums, partial, limit);
    else write_pass_items<P, 1, 0>(sums, partial, limit);
}

// The columns of ones of pass P. Those beside the network's inputs stay.
template <int P, int I = 0>
__device__ __forceinline__ void write_ones() {
    if constexpr (I < LAYERS) {
        if constexpr (out_major(I) && (I == 0 ? P < 0 : P >= 0 && belongs<(P < 0 ? 0 : P)>(I))) {
            for (int i = threadIdx.x; i < TILE; i += BLOCK_THREADS) {  // row i
                const int block = (i >> 3) * FIXED(activation_columns(I)) + FIXED(columns(I));
                *(uint4*)(dynamic_shared + FIXED(input_at(P < 0 ? 0 : P, I)) + block * BLOCK_BYTES + (i & 7) * 16) =
                    make_uint4(0x3f80u, 0u, 0u, 0u);
            }
        }
        write_ones<P, I + 1>();
    }
}

}  // namespace narrow
