// A block's own parameters: from the flat buffers and back, their gradients, their update.
#pragma once
#include "resident_products.cuh"
#include "update.cuh"

namespace resident {

// Flat buffer of state number `i`.
__device__ __forceinline__ float* flat_buffer(int i) {
    return i == 0                          ? ENGINE.parameters
           : has_first_slot() && i == FIRST ? ENGINE.first_slot
           : has_second_slot() && i == SECOND ? ENGINE.second_slot
                                            : ENGINE.ema;
}

struct States {
    float v[STATES];
    __device__ __forceinline__ void update(const Hyper& h, float sum) {
        float none = 0.f;
        v[0] = update_rule(h, v[0], sum, has_first_slot() ? v[FIRST] : none, has_second_slot() ? v[SECOND] : none);
        if (RESIDENT_MEAN) v[STATES - 1] = average(h.ema_decay, v[STATES - 1], v[0]);
    }
};

__device__ __forceinline__ float& component(float4& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }
__device__ __forceinline__ bool is_large(const float4& w) {
    return exceeds(w.x, LARGE_WEIGHT) || exceeds(w.y, LARGE_WEIGHT) || exceeds(w.z, LARGE_WEIGHT) ||
           exceeds(w.w, LARGE_WEIGHT);
}

// A 16 x 16 of weights of layer L, halves `low` and `high`, to where all blocks multiply with them.
template <int L>
__device__ __forceinline__ void publish_weights(u8* exchange, int turn, int in, int out, const float4& low, const float4& high) {
    const Tile w = {pack(low.x, low.y), pack(high.x, high.y), pack(low.z, low.w), pack(high.z, high.w)};
    u8* to = exchange + FIXED(weight_at(L));
    const int number = out * DEPTH<L> + in;
    if (L > 0) {
        store_tile(to, number, w);
        return;
    }
    tell_tile(to + turn * WEIGHT_BYTES<L>, number, w);
    tell_tile(to + (turn ^ 1) * WEIGHT_BYTES<L>, number, same(pair_of(UNWRITTEN)));
}

// The block's patch of layer L, and how its warps share it out.
template <int L>
struct Patch {
    static constexpr int IN = patch_in(L), OUT = patch_out(L);
    static constexpr int ACROSS = IN > 4 ? WARPS : IN > 2 ? 4 : IN;  // warps side by side along the inputs
    static constexpr int DOWN = WARPS / ACROSS;
    static constexpr int IN_TURNS = divided(IN, ACROSS), OUT_TURNS = divided(OUT, DOWN);
    int in, out;  // its first blocks
    bool exists;

    __device__ __forceinline__ Patch() {
        const int number = (blockIdx.x + BLOCKS - FIXED(first_patch(L))) % BLOCKS;
        in = number % FIXED(patches_in(L)) * IN;
        out = number / FIXED(patches_in(L)) * OUT;
        exists = number < FIXED(patches(L));
    }
    // This warp's i-th block of inputs and j-th of outputs, from the first ones on.
    static __device__ __forceinline__ int in_of(int i) { return warp_id() % ACROSS + i * ACROSS; }
    static __device__ __forceinline__ int out_of(int j) { return warp_id() / ACROSS + j * DOWN; }
    __device__ __forceinline__ bool has_in(int i) const { return exists && in_of(i) < IN && in + in_of(i) < DEPTH<L>; }
    __device__ __forceinline__ bool has_out(int j) const { return exists && out_of(j) < OUT && out + out_of(j) < DEPTH<L + 1>; }
    static __device__ __forceinline__ float4* state(int i, int j) {
        return shared<float4>(FIXED(state_at(L))) + (out_of(j) * IN + in_of(i)) * (STATES * 64) + lane_id();
    }
};

// LOAD: flat buffers to shared memory, else back. Returns whether a weight is large.
template <bool LOAD, int L = 0>
__device__ __forceinline__ bool move_weights(u8* exchange) {
    bool large = false;
    if constexpr (L < LAYERS) {
        const Patch<L> patch;
#pragma unroll 1
        for (int i = 0; i < patch.IN_TURNS; ++i)
#pragma unroll 1
            for (int j = 0; j < patch.OUT_TURNS; ++j) {
                if (!patch.has_in(i) || !patch.has_out(j)) continue;
                const int in = patch.in + patch.in_of(i), out = patch.out + patch.out_of(j);
                float4* state = patch.state(i, j);
#pragma unroll
                for (int s = 0; s < STATES; ++s)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float4& v = state[(2 * s + half) * 32];
                        if (LOAD) v = zeros();
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int row = 16 * in + 8 * half + 2 * (lane_id() & 3) + (e & 1);
                            const int c = 16 * out + 8 * (e >> 1) + (lane_id() >> 2);
                            if (row >= WIDTH<L> || c >= WIDTH<L + 1>) continue;
                            float& flat = flat_buffer(s)[FIXED(flat_weight(L)) + row * WIDTH<L + 1> + c];
                            if (LOAD) component(v, e) = flat;
                            else flat = component(v, e);
                        }
                    }
                __syncwarp();
                if (LOAD) {
                    publish_weights<L>(exchange, 0, in, out, state[0], state[32]);
                    large |= is_large(state[0]) || is_large(state[32]);
                }
            }
        large |= move_weights<LOAD, L + 1>(exchange);
    }
    return large;
}

// f(place in the flat buffers, sums of the error over row tiles, their stride) for the block's bias `u`, if there is one.
template <int L = 0, class F>
__device__ __forceinline__ void for_few(const Place& place, int u, const F& f) {
    constexpr int I = L < HIDDEN ? L + 1 : LAYERS;
    if constexpr (L == HIDDEN) {
        f(FIXED(flat_bias(HIDDEN)) + u - OUTPUT_BIASES, FIXED(sums_at(I)) + 4 * (u - OUTPUT_BIASES), FIXED(sums_bytes(I)));
    } else if (u / COLUMNS == L) {
        const int out = 16 * place.block + u % COLUMNS;
        if (out < WIDTH<I>) f(FIXED(flat_bias(L)) + out, FIXED(sums_at(I)) + 4 * out, FIXED(sums_bytes(I)));
    } else {
        for_few<L + 1>(place, u, f);
    }
}

template <bool LOAD>
__device__ __forceinline__ void move_few(const Place& place) {
    for (int u = threadIdx.x; u < FEW; u += BLOCK_THREADS) {
        const bool ours = u < OUTPUT_BIASES ? place.group == 0 : blockIdx.x == 0;
        float* state = shared<float>(FEW_AT) + u;
        for_few(place, u, [&](int at, int, int) {
            for (int s = 0; s < STATES; ++s) {
                if (LOAD) state[s * FEW] = flat_buffer(s)[at];
                else if (ours) flat_buffer(s)[at] = state[s * FEW];
            }
        });
    }
}

// What an update needs. `limit` not 0: only look whether all gradient sums stay below it.
struct Update {
    const Hyper* hyper;  // but for the scale
    float scale;
    int turn;  // of the published weights of layer 0 that it writes
    float limit;
    int step;  // whose activations and errors
};

__device__ __forceinline__ bool beyond(const float4& v, float limit) {
    return !(fabsf(v.x) < limit && fabsf(v.y) < limit && fabsf(v.z) < limit && fabsf(v.w) < limit);
}

// A tile of errors in shared memory.
__device__ __forceinline__ Tile staged_tile(const u8* errors, int number) {
    return load_tile<false>(errors, number, [](const uint4* from) { return *from; });
}

// Gradient of the block's patch of layer L, and its update, in three parts: the activations asked for, the errors on their
// way to shared memory, and the rest behind a barrier of the block.
template <int L>
struct Gradient {
    typedef Patch<L> P;
    // All activations at once. On one GPU a few of the lowest layer: what spills for more of them costs more than waiting.
    static constexpr bool AHEAD = RANKS > 1 ? P::IN_TURNS * TILES <= 16
                                            : L == 0 && P::IN_TURNS * TILES * TILE_BYTES <= 4096;
    P patch;
    Tile inputs[AHEAD ? P::IN_TURNS : 1][TILES];

    __device__ __forceinline__ void load(const u8* exchange, int step, int i, Tile (&to)[TILES]) const {
        const u8* turned = exchange + FIXED(activation_turned_at(L)) + (L ? step & 1 : step % RING) * MATRIX_BYTES<L>;
        if (patch.has_in(i))
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                to[t] = load_tile(turned, (patch.in + P::in_of(i)) * TILES + t);
    }
#if RESIDENT_RANKS > 1
    // Those of the other ranks. Asked for earlier they would take registers that are missed more.
    __device__ __forceinline__ void take_inputs(int step, int i, uint4 (&others)[OTHERS * TILES]) const {
        const int at = FIXED(sent_activation_at(L)) + 16 * ((patch.in + P::in_of(i)) * TILES * 32 + lane_id());
        const u8* from[OTHERS];
        for_other_ranks([&](int other, int r) { from[other] = slot(PEERS.rank, r, step) + at; });
        take(others, [&](int n) { return from[n / TILES] + n % TILES * TILE_BYTES; });
        __syncwarp();
    }
    // The others' errors, which come beside the own ones: (rank, output block, row tile).
    static constexpr int ERRORS = P::OUT * TILES * 32, ERROR_TURNS = divided(ERRORS, BLOCK_THREADS);
    typedef uint4 Errors[OTHERS * ERROR_TURNS];
    __device__ __forceinline__ int error_place(int n) const {  // of a thread's n-th, -1: none
        const int at = threadIdx.x + n % ERROR_TURNS * BLOCK_THREADS;
        return patch.exists && at < ERRORS && patch.out + at / (TILES * 32) < DEPTH<L + 1> ? at : -1;
    }
    __device__ __forceinline__ void look_at_errors(int step, Errors& v) const {
        look(v, [&](int n) -> const u8* {
            if (error_place(n) < 0) return nullptr;
            return slot(PEERS.rank, other_rank(n / ERROR_TURNS), step) + FIXED(sent_error_at(L + 1)) +
                   16 * (patch.out * TILES * 32 + error_place(n));
        });
    }
    __device__ __forceinline__ void stage(const Errors& v, int scratch) const {
#pragma unroll
        for (int n = 0; n < OTHERS * ERROR_TURNS; ++n)
            if (error_place(n) >= 0)
                shared<uint4>(SCRATCH_AT + scratch)[other_rank(n / ERROR_TURNS) * ERRORS + error_place(n)] = v[n];
    }
    __device__ __forceinline__ void take_errors(int step, int scratch) const {
        Errors v;
        look_until([&] {
            look_at_errors(step, v);
            return all_written(v);
        });
        stage(v, scratch);
        __syncwarp();
    }
#endif
    __device__ __forceinline__ void ask_inputs(const u8* exchange, int step) {
        if constexpr (AHEAD)
#pragma unroll
            for (int i = 0; i < P::IN_TURNS; ++i) load(exchange, step, i, inputs[i]);
    }
    __device__ __forceinline__ void stage_errors(const u8* exchange, int step, int scratch) const {
        const u8* turned = exchange + FIXED(error_turned_at(L + 1)) + (step & 1) * MATRIX_BYTES<L + 1>;
        constexpr int EACH = TILES * (TILE_BYTES / 16);
        if (patch.exists)
            for (int i = threadIdx.x; i < P::OUT * EACH; i += BLOCK_THREADS)
                if (patch.out + i / EACH < DEPTH<L + 1>)
#if RESIDENT_RANKS > 1
                    copy_async(
                        shared<uint4>(SCRATCH_AT + scratch) + PEERS.rank * P::OUT * EACH + i,
                        (const uint4*)turned + patch.out * EACH + i, true);
        copy_commit();
#else
                    copy_async(shared<uint4>(SCRATCH_AT + scratch) + i, (const uint4*)turned + patch.out * EACH + i, true);
        copy_commit();
#endif
    }
    // Returns whether a new weight is large, or with a limit a sum is not below it.
    __device__ __forceinline__ bool update(u8* exchange, const Update& update, int scratch) {
        Hyper h = *update.hyper;
        h.scale = update.scale;
        bool found = false;
#pragma unroll
        for (int i = 0; i < P::IN_TURNS; ++i) {
            if (!patch.has_in(i)) break;
            Tile(&a)[TILES] = inputs[AHEAD ? i : 0];
            if (!AHEAD) load(exchange, update.step, i, a);
#if RESIDENT_RANKS > 1
            uint4 of_ranks[OTHERS * TILES];
            take_inputs(update.step, i, of_ranks);
#endif
#pragma unroll 1
            for (int j = 0; j < P::OUT_TURNS; ++j) {
                if (!patch.has_out(j)) break;
                const u8* errors = shared<u8>(SCRATCH_AT + scratch) + P::out_of(j) * TILES * TILE_BYTES;
                float4 sum[2] = {zeros(), zeros()};
#if RESIDENT_RANKS > 1
#pragma unroll
                for (int r = 0; r < RANKS; ++r)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        uint4 of_others[OTHERS];
#pragma unroll
                        for (int other = 0; other < OTHERS; ++other) of_others[other] = of_ranks[other * TILES + t];
                        const Tile x = of_rank(r, a[t], of_others), e = staged_tile(errors, r * P::OUT * TILES + t);
                        const Tile e_turned = {e.x, e.z, e.y, e.w};
                        multiply(sum[0], e_turned, x.x, x.y);
                        multiply(sum[1], e_turned, x.z, x.w);
                    }
#else
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const Tile e = staged_tile(errors, t), e_turned = {e.x, e.z, e.y, e.w};
                    multiply(sum[0], e_turned, a[t].x, a[t].y);
                    multiply(sum[1], e_turned, a[t].z, a[t].w);
                }
#endif
                if (update.limit != 0.f) {
                    found |= beyond(sum[0], update.limit) || beyond(sum[1], update.limit);
                    continue;
                }
                float4* state = P::state(i, j);
                float4 w[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float4 v[STATES];
#pragma unroll
                    for (int s = 0; s < STATES; ++s) v[s] = state[(2 * s + half) * 32];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        States one;
#pragma unroll
                        for (int s = 0; s < STATES; ++s) one.v[s] = component(v[s], e);
                        one.update(h, component(sum[half], e));
#pragma unroll
                        for (int s = 0; s < STATES; ++s) component(v[s], e) = one.v[s];
                    }
#pragma unroll
                    for (int s = 0; s < STATES; ++s) state[(2 * s + half) * 32] = v[s];
                    w[half] = v[0];
                    found |= is_large(v[0]);
                }
                publish_weights<L>(exchange, update.turn, patch.in + P::in_of(i), patch.out + P::out_of(j), w[0], w[1]);
            }
        }
        return found;
    }
};

// The same for a bias that the block adds, one a thread: the last ones, the others have more to do.
struct Bias {
    int place, from, bytes;  // -1: none; sums of its error
    float parts[TILES];
#if RESIDENT_RANKS > 1
    float others[OTHERS * TILES];
    int sent;  // those of the other ranks

    template <int I = 1>
    static __device__ __forceinline__ int sent_place(int from) {
        if constexpr (I < LAYERS)
            if (from >= FIXED(sums_at(I + 1))) return sent_place<I + 1>(from);
        return from - FIXED(sums_at(I)) + FIXED(sent_sums_at(I));
    }
#endif

    __device__ __forceinline__ explicit Bias(const Place& of_block) : place(-1) {
        if (number() < FEW)
            for_few(of_block, number(), [&](int, int at, int size) { place = number(), from = at, bytes = size; });
#if RESIDENT_RANKS > 1
        if (place >= 0) sent = sent_place(from);
#endif
    }
    static __device__ __forceinline__ int number() { return BLOCK_THREADS - 1 - threadIdx.x; }
    __device__ __forceinline__ void ask(const u8* exchange, int step) {
        const float* sums = (const float*)(exchange + from + (step & 1) * bytes);
        if (place >= 0)
#pragma unroll
            for (int t = 0; t < TILES; ++t) parts[t] = __ldcg(sums + t * (bytes / (4 * TILES)));
    }
#if RESIDENT_RANKS > 1
    __device__ __forceinline__ void look_at_others(int step) {
        look(others, [&](int n) -> const u8* {
            if (place < 0) return nullptr;
            return slot(PEERS.rank, other_rank(n / TILES), step) + sent + n % TILES * (bytes / TILES);
        });
    }
    __device__ __forceinline__ void take_others(int step) {
        look_until([&] {
            look_at_others(step);
            return all_written(others);
        });
        __syncwarp();
    }
#endif
    __device__ __forceinline__ bool update(const Update& update) {
        if (place < 0) return false;
#if RESIDENT_RANKS > 1
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < ALL_TILES; ++n) {
            float of_others[OTHERS];
#pragma unroll
            for (int other = 0; other < OTHERS; ++other) of_others[other] = others[other * TILES + n % TILES];
            sum += of_rank(n / TILES, parts[n % TILES], of_others);
        }
#else
        float sum = parts[0];
#pragma unroll
        for (int t = 1; t < TILES; ++t) sum += parts[t];
#endif
        if (update.limit != 0.f) return !(fabsf(sum) < update.limit);
        Hyper h = *update.hyper;
        h.scale = update.scale;
        float* state = shared<float>(FEW_AT) + place;
        States one;
#pragma unroll
        for (int s = 0; s < STATES; ++s) one.v[s] = state[s * FEW];
        one.update(h, sum);
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[s * FEW] = one.v[s];
        return false;
    }
};

}  // namespace resident
