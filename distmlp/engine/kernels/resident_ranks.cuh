// Other ranks of the host (RESIDENT_RANKS > 1). For few rows a gradient is far larger than what it is made of, so ranks send
// each other activations, errors and the errors' sums as they come to be, and every rank makes the gradients over the
// rows of all of them, in the order of the ranks: all get the same bits, and keep the same weights.
//
// Words say themselves whether they are written, as everywhere here. What comes in goes round in SLOTS parts of an inbox. A
// step marks what the last step but one has left as unwritten; it will be written again six steps later, when everybody has heard
// all blocks say things behind that.
//
// When it arrives at the barrier of a step, every block also tells the other ranks whether it doubts the step, with the
// weight of its rank's rows; behind the barrier every block hears all blocks of the other ranks. Whoever loses a rank goes on
// to the end of the launch with whatever it finds, as if all were well: blocks may have heard of different things. The
// host then throws the outcome away.
#pragma once
#include "resident_exchange.cuh"
#if RESIDENT_RANKS > 1
#define RARELY __forceinline__  // calls would cost registers
#include "launch_ranks.cuh"

namespace resident {

// A part of an inbox, bytes: activations 0 to HIDDEN and errors 1 to LAYERS with every 8 x 8 transposed, sums of errors.
SHAPE_FN int sent_activation_at(int i) {
    int at = 0;
    for (int k = 0; k < i; ++k) at += matrix_bytes(k);
    return at;
}
SHAPE_FN int sent_error_at(int i) {
    int at = sent_activation_at(HIDDEN + 1);
    for (int k = 1; k < i; ++k) at += matrix_bytes(k);
    return at;
}
SHAPE_FN int sent_sums_at(int i) {
    int at = sent_error_at(LAYERS + 1);
    for (int k = 1; k < i; ++k) at += sums_bytes(k);
    return at;
}
constexpr int SLOTS = 8;
// Of every block: weight and doubt; then loss and votes, from one block.
constexpr int SENT_DOUBTS_AT = sent_sums_at(LAYERS + 1), SENT_LOSS_AT = SENT_DOUBTS_AT + 8 * BLOCKS;
constexpr int SENT_BYTES = SENT_DOUBTS_AT + 8 * ((BLOCKS + 3) / 2 * 2);
static_assert(SENT_BYTES == RESIDENT_SENT_BYTES, "as plan_resident.py");

__shared__ struct : LaunchRanks {
    float weight;  // of the rows of all ranks
    u32 doubts;    // what the other ranks say of the step, see Doubt
} ranks_seen;
enum Doubt { UNSURE = 1, FAILED = 2 };  // magnitudes leave it open; a rank could not take part

// What rank `to` finds of rank `from` in step `step` of the launch.
__device__ __forceinline__ u8* slot(int to, int from, int step) {
    const u32 number = (u32)ranks_seen.first + step;
    return (u8*)inbox(to, from, number & 1) + (number >> 1) % (SLOTS / 2) * SENT_BYTES;
}
constexpr int OTHERS = RANKS - 1;  // in turn: the ranks behind this one, then those before it
__device__ __forceinline__ int other_rank(int other) {
    const int r = PEERS.rank + 1 + other;
    return r < RANKS ? r : r - RANKS;
}
// f(other, rank)
template <class F>
__device__ __forceinline__ void for_other_ranks(const F& f) {
#pragma unroll
    for (int other = 0; other < OTHERS; ++other) f(other, other_rank(other));
}
// What belongs to rank `r`, of what is this one's and what is the others'.
template <class T>
__device__ __forceinline__ T of_rank(int r, const T& own, const T (&others)[OTHERS]) {
    T x = own;
#pragma unroll
    for (int other = 0; other < OTHERS; ++other)
        if (other_rank(other) == r) x = others[other];
    return x;
}
__device__ __forceinline__ void send(int step, int at, const uint4& v) {
    for_other_ranks([&](int, int r) { store_words((float4*)(slot(r, PEERS.rank, step) + at), v.x, v.y, v.z, v.w); });
}
__device__ __forceinline__ void send(int step, int at, u32 x, u32 y) {
    for_other_ranks([&](int, int r) {
        asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(slot(r, PEERS.rank, step) + at), "r"(x), "r"(y)
                     : "memory");
    });
}
__device__ __forceinline__ void send(int step, int at, float x) {
    for_other_ranks([&](int, int r) { store_word((u32*)(slot(r, PEERS.rank, step) + at), written_word(x)); });
}
// Half a tile, as store_half.
__device__ __forceinline__ void send_half(int step, int at, int group, int tile, u32 upper, u32 lower) {
    send(step, at + (int)((u8*)half_place(nullptr, group, tile) - (u8*)nullptr), upper, lower);
}

// Until `look()` says that all is there, or a rank is lost.
template <class F>
__device__ __forceinline__ void look_until(const F& look) {
    Exchange ranks(0);
    u64 began = 0;
    for (u32 looks = 1; !look(); ++looks) {
        if (looks == 1) ranks.lost = ranks_seen.any_lost();
        if (!ranks.patient(looks, began)) {
            ranks_seen.lose();
            break;
        }
    }
}
// N vectors or words from other ranks; `at(i)`: where the i-th is, null: nowhere, zeros. A look and whether all was there
// are apart, so that many loads can be under way.
template <int N, class At>
__device__ __forceinline__ void look(uint4 (&v)[N], const At& at) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u8* from = at(i);
        v[i] = make_uint4(0, 0, 0, 0);
        if (from) v[i] = load_words((const float4*)from);
    }
}
template <int N, class At>
__device__ __forceinline__ void look(float (&x)[N], const At& at) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u8* from = at(i);
        x[i] = 0.f;
        if (from) x[i] = __uint_as_float(load_word((const u32*)from));
    }
}
template <int N>
__device__ __forceinline__ bool all_written(const uint4 (&v)[N]) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) all = all && written(v[i]);
    return all;
}
template <int N>
__device__ __forceinline__ bool all_written(const float (&x)[N]) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) all = all && __float_as_uint(x[i]) != UNWRITTEN_WORD;
    return all;
}
template <class T, int N, class At>
__device__ __forceinline__ void take(T (&v)[N], const At& at) {
    look_until([&] {
        look(v, at);
        return all_written(v);
    });
}

// What the last step but one has left of the other ranks' is unwritten again.
__device__ __forceinline__ void clear_sent(int step) {
    for_other_ranks([&](int, int r) {
        float4* const at = (float4*)slot(PEERS.rank, r, step - 2);
        for (int i = blockIdx.x * BLOCK_THREADS + threadIdx.x; i < SENT_BYTES / 16; i += BLOCKS * BLOCK_THREADS)
            store_words(at + i, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD);
    });
}

// By one thread of a block that arrives at the barrier.
__device__ __forceinline__ void tell_ranks(int step, float weight, bool doubted) {
    const u32 doubts = (doubted ? UNSURE : 0) | (own_post().votes[1] != 0.f ? FAILED : 0);
    send(step, SENT_DOUBTS_AT + 8 * (int)blockIdx.x, written_word(weight), doubts);
}
// All blocks of all other ranks to `ranks_seen`; by a warp. `weight`: of this rank's rows.
__device__ __forceinline__ void hear_ranks(int step, float weight) {
    constexpr int COUNT = divided(BLOCKS, 32);
    const u64 began = global_ns();
    float weights[OTHERS];
    u32 doubts = own_post().votes[1] != 0.f ? FAILED : 0;
    for_other_ranks([&](int other, int r) {
        const u8* from = slot(PEERS.rank, r, step) + SENT_DOUBTS_AT;
        uint2 v[COUNT];
        look_until([&] {
            bool all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];"
                             : "=r"(v[i].x), "=r"(v[i].y)
                             : "l"(from + 8 * min(lane_id() + 32 * i, BLOCKS - 1))
                             : "memory");
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && v[i].x != UNWRITTEN_WORD && v[i].y != UNWRITTEN_WORD;
            return all;
        });
        weights[other] = __uint_as_float(v[0].x);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) doubts |= v[i].y;
    });
    __syncwarp();
    doubts = __reduce_or_sync(~0u, doubts);
    if (lane_id() != 0) return;
    float sum = of_rank(0, weight, weights);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) sum += of_rank(r, weight, weights);
    ranks_seen.weight = sum;
    ranks_seen.doubts = doubts;
    if (blockIdx.x == 0) own_post().waited_ns += global_ns() - began;
}

// Loss and votes of this rank, to the others; by the first lanes of a warp of block 0.
__device__ __forceinline__ float own_outcome(double loss) {
    const int k = lane_id();
    return k == 0 ? (float)loss : k < 4 ? own_post().votes[k - 1] : 0.f;
}
__device__ __forceinline__ void send_outcome(int step, double loss) {
    if (lane_id() < 4) send(step, SENT_LOSS_AT + 4 * lane_id(), own_outcome(loss));
}
// Those of all ranks; the votes to the Post. Returns the loss, to lane 0.
__device__ __forceinline__ float take_outcome(int step, double loss) {
    const int k = lane_id();
    float sum = 0.f;
    if (k < 4) {
        const float own = own_outcome(loss);
        float others[OTHERS];
        take(others, [&](int other) { return slot(PEERS.rank, other_rank(other), step) + SENT_LOSS_AT + 4 * k; });
        sum = of_rank(0, own, others);
#pragma unroll
        for (int r = 1; r < RANKS; ++r) sum += of_rank(r, own, others);
        if (k > 0) own_post().totals[k - 1] = sum;
    }
    __syncwarp();
    return sum;
}

}  // namespace resident
#endif
