// Sums over the ranks of one host inside a kernel, through memory that every rank has opened to the others.
//
// A rank writes its numbers into the other ranks' mailboxes and finds theirs in its own. A word says by itself whether
// it has been written: unwritten ones hold UNWRITTEN, and whoever has read one makes it so again. So nobody waits for
// more than the words it adds, no vector access needs to be atomic, and no fence stands between numbers and a flag.
// Two inboxes alternate. A rank that writes one again has read what the other rank sent in between, which that sent
// behind a grid barrier behind the moment when it had emptied this one: by then the emptying had reached that GPU's L2,
// where what comes in over the link arrives too, and nothing can overtake.
// Everything is added in the order of the ranks: all of them get the same bits.
#pragma once
#include "params.cuh"
#include "reduce.cuh"

#ifndef RARELY  // executed; but a kernel that hands registers around cannot call functions
#define RARELY __noinline__
#endif

#define MAX_PEERS 8
#define UNWRITTEN_WORD 0xffffffffu  // a NaN that no rank sends
#define PATIENCE 4096               // looks at a word between two looks at the host's: some milliseconds

// Ahead of a rank's inboxes, for that rank and its host alone.
struct Post {
    u64 exchanges;       // so far; all ranks count the same
    u64 waited_ns;       // in them, by block 0
    float votes[4];      // of this rank: stop, failed, seconds a step, nothing
    float totals[4];     // and the sums over the ranks in the last exchange
    u32 lost;            // a rank is gone: nobody waits any more
    u32 padding[19];
};

struct Peers {
    u8* mailbox[MAX_PEERS];  // of every rank as this one reaches it: a Post, then inboxes (2, ranks, stride)
    const u32* gone;         // host memory: not zero once a rank has died
    u64 limit_ns;            // for the slowest rank; 0: any time
    i64 stride;              // floats
    int ranks, rank;
};

extern "C" {
__constant__ Peers PEERS;
}

__device__ __forceinline__ Post& own_post() { return *(Post*)PEERS.mailbox[PEERS.rank]; }

// Where rank `to` finds vector 0 of what rank `from` sends.
__device__ __forceinline__ float4* inbox(int to, int from, int parity) {
    return (float4*)(PEERS.mailbox[to] + sizeof(Post)) + ((i64)(parity * PEERS.ranks + from) * PEERS.stride >> 2);
}

__device__ __forceinline__ u64 global_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ u32 written_word(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == UNWRITTEN_WORD ? 0x7fffffffu : bits;
}
__device__ __forceinline__ void store_words(float4* where, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(where), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Whether to wait no longer: the host says that a rank has died, or the time is up.
__device__ RARELY bool given_up(u64 began) {
    const bool lost = *(const volatile u32*)PEERS.gone || (PEERS.limit_ns && global_ns() - began > PEERS.limit_ns);
    if (lost) *(volatile u32*)&own_post().lost = 1;
    return lost;
}

// What another rank has put at `where`, which is unwritten again afterwards; `lost`: nobody may come any more.
__device__ __forceinline__ float4 take_words(float4* where, u64 began, bool& lost) {
    uint4 v;
    for (u32 looks = 1;; ++looks) {
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(where)
                     : "memory");
        if (v.x != UNWRITTEN_WORD && v.y != UNWRITTEN_WORD && v.z != UNWRITTEN_WORD && v.w != UNWRITTEN_WORD) break;
        if (lost || (looks % PATIENCE == 0 && (lost = given_up(began)))) break;
    }
    store_words(where, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// Vector i of gradient and tally as this rank has it, its votes among them.
__device__ __forceinline__ float4 own_vector(i64 i) {
    float4 v = ((const float4*)ENGINE.gradient)[i];
    const i64 tally = ENGINE.size >> 2;
    if (i == tally) v.w += own_post().votes[0];
    if (i == tally + 1) v.x += own_post().votes[1], v.y += own_post().votes[2];
    return v;
}

// Replaces gradient and tally by their sums over the ranks; f(sum) for every vector of the gradient. All blocks call
// it, and `finish_exchange` behind a barrier.
template <class F>
__device__ __forceinline__ void exchange_gradient(F& f) {
    Post& post = own_post();
    const int parity = post.exchanges & 1, rank = PEERS.rank, ranks = PEERS.ranks;
    const i64 own = ENGINE.size / 4, vectors = own + TALLY / 4, step = (i64)gridDim.x * blockDim.x;
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    const u64 began = global_ns();
    bool lost = *(const volatile u32*)&post.lost;
    for (i64 i = first; i < vectors; i += step) {
        const float4 v = own_vector(i);
        for (int r = 0; r < ranks; ++r)
            if (r != rank)
                store_words(
                    inbox(r, rank, parity) + i, written_word(v.x), written_word(v.y), written_word(v.z),
                    written_word(v.w));
    }
    for (i64 i = first; i < vectors; i += step) {
        float4 sum;
        for (int r = 0; r < ranks; ++r) {
            const float4 v = r == rank ? own_vector(i) : take_words(inbox(rank, r, parity) + i, began, lost);
            if (r == 0) sum = v;
            else sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        ((float4*)ENGINE.gradient)[i] = sum;
        if (i < own) f(sum);
    }
    if (first == 0) post.waited_ns += global_ns() - began;
}

// Behind the barrier: whether the sums are whole and every rank has its part in them, the same in every block.
__device__ __forceinline__ bool finish_exchange() {
    Post& post = own_post();
    const float* tally = ENGINE.gradient + ENGINE.size;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        ++post.exchanges;
        for (int k = 0; k < 3; ++k) post.totals[k] = tally[TALLY_STOP + k];
    }
    return *(const volatile u32*)&post.lost == 0 && tally[TALLY_STOP + 1] == 0.f;
}
