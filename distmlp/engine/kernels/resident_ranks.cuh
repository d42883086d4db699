// Other ranks of the host (RESIDENT_RANKS > 1). For few rows a gradient is far larger than what it is made of, so ranks send
// each other activations, errors and the errors' sums as they come to be, and every rank makes the gradients over the
// rows of all of them, in the order of the ranks: all get the same bits, and keep the same weights.
//
// Words say themselves whether they are written, as everywhere here. What comes in goes round in SLOTS parts of an inbox. A
// step marks what the last step but one has left as unwritten; it will be written again six steps later, when everybody has had
// tallies that were sent behind that.
//
// In its tally a rank says what its batch came to and whether its blocks doubt the step; every block sends its own copy and
// waits for that of the same block. Whoever loses a rank goes on to the end of the launch with whatever it finds, as if
// all were well: blocks may have heard of different things. The host then throws the outcome away.
#pragma once
#include "resident_exchange.cuh"
#if RESIDENT_RANKS > 1
#include "barrier.cuh"
#define RARELY __forceinline__  // calls would cost registers
#include "peers.cuh"

namespace resident {

// A part of an inbox, bytes: activations 0 to HIDDEN and errors 1 to LAYERS with every 8 x 8 transposed, sums of errors,
// tallies of blocks.
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
constexpr int SENT_TALLY_AT = sent_sums_at(LAYERS + 1), SENT_BYTES = SENT_TALLY_AT + BLOCKS * TALLY * 4;
static_assert(SENT_BYTES == RESIDENT_SENT_BYTES, "as plan_resident.py");

__shared__ struct {
    u64 first;            // exchange of the launch
    u32 lost;             // a rank is gone, as somebody of the block has seen
    float agreed[TALLY];  // the tally of all ranks
} ranks_seen;

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
        if (looks == 1) ranks.lost = *(volatile u32*)&ranks_seen.lost;
        if (!ranks.patient(looks, began)) {
            *(volatile u32*)&ranks_seen.lost = 1;
            break;
        }
    }
}
// N vectors from other ranks; `at(i)`: where the i-th is, null: nowhere, zeros.
template <int N, class At>
__device__ __forceinline__ void take(uint4 (&v)[N], const At& at) {
    look_until([&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u8* from = at(i);
            v[i] = make_uint4(0, 0, 0, 0);
            if (from) v[i] = load_words((const float4*)from);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) all = all && written(v[i]);
        return all;
    });
}
template <int N, class At>
__device__ __forceinline__ void take(float (&x)[N], const At& at) {
    look_until([&] {
        bool all = true;
        u32 v[N];
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = load_word((const u32*)at(i));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            all = all && v[i] != UNWRITTEN_WORD;
            x[i] = __uint_as_float(v[i]);
        }
        return all;
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

// By one thread, before a barrier; and behind the last step, by one of the grid.
__device__ __forceinline__ void begin_ranks() {
    ranks_seen.first = own_post().exchanges;
    ranks_seen.lost = own_post().lost;
}
__device__ __forceinline__ void end_ranks(int steps) { own_post().exchanges = ranks_seen.first + steps; }

constexpr int UNSURE = TALLY - 1;
__device__ __forceinline__ int tally_at(int entry) { return SENT_TALLY_AT + 4 * ((int)blockIdx.x * TALLY + entry); }

// Entry `lane` of this rank's tally, sent; by a warp.
__device__ __forceinline__ float send_tally(int step, double loss, float weight, int rows, bool sure) {
    const int k = lane_id();
    float x = k == TALLY_LOSS     ? (float)loss
              : k == TALLY_WEIGHT ? weight
              : k == TALLY_ROWS   ? (float)rows
              : k == UNSURE       ? (sure ? 0.f : 1.f)
                                  : 0.f;
    if (k >= TALLY_STOP && k < TALLY_STOP + 3) x = own_post().votes[k - TALLY_STOP];
    if (k < TALLY) send(step, tally_at(k), x);
    return x;
}
// The tally of all ranks to `ranks_seen`; by the same warp.
__device__ __forceinline__ void take_tally(int step, float own) {
    const int k = lane_id();
    if (k >= TALLY) return;
    const u64 began = global_ns();
    float others[OTHERS];
    take(others, [&](int other) { return slot(PEERS.rank, other_rank(other), step) + tally_at(k); });
    float sum = of_rank(0, own, others);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) sum += of_rank(r, own, others);
    ranks_seen.agreed[k] = sum;
    if (blockIdx.x > 0) return;
    if (k == 0) own_post().waited_ns += global_ns() - began;
    if (k >= TALLY_STOP && k < TALLY_STOP + 3) own_post().totals[k - TALLY_STOP] = sum;
}

// Where a step was not sure: a grid barrier. False where that is not to be had, because a rank is lost and other blocks
// may have heard enough to be sure.
__device__ __forceinline__ bool meet_unsure(GridBarrier& barrier) {
    barrier.arrive();
    if (threadIdx.x == 0)
        while (load_acquire(barrier.arrivals) < barrier.target)
            if (*(const volatile u32*)&own_post().lost) {
                *(volatile u32*)&ranks_seen.lost = 1;
                break;
            }
    __syncthreads();
    return *(volatile u32*)&ranks_seen.lost == 0;
}

}  // namespace resident
#endif
