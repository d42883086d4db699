// Sums over the ranks of one host inside a kernel, through memory that every rank has opened to the others.
//
// A rank writes its numbers into the other ranks' mailboxes and finds theirs in its own. A word says by itself whether
// it has been written: unwritten ones hold UNWRITTEN, and whoever has read one makes it so again. So nobody waits for
// more than the words it adds, no vector access needs to be atomic, and no fence stands between numbers and a flag.
// Two inboxes alternate. A rank that writes one again has read what the other rank sent in between, which that sent
// behind a grid barrier behind the moment when it had emptied this one: by then the emptying had reached that GPU's L2,
// where what comes in over the link arrives too, and nothing can overtake.
// Everything is added in the order of the ranks: all of them get the same bits.
//
// The tally behind the gradient is taken by block 0 alone, which tells the others: what is decided by it, and whether a
// rank is lost, is the same in every block. Blocks that lose a rank later, in the gradient, go on with whatever they
// have; the next exchange, or the host behind the launch, finds out.
#pragma once
#include "barrier.cuh"
#include "params.cuh"

#define MAX_PEERS 8
#define UNWRITTEN_WORD 0xffffffffu  // a NaN that no rank sends
#define PATIENCE 4096               // looks at a word between two looks at the host's: some milliseconds

// Ahead of a rank's inboxes, for that rank and its host alone.
struct Post {
    u64 first;            // number of the exchange of step 0 of a launch; all ranks count the same
    float votes[4];       // of this rank: stop, failed, seconds a step, nothing
    u64 waited_ns;        // for other ranks' tallies, so far
    u64 number;           // of the exchange that `totals` are of, and one
    float totals[TALLY];  // the sums of the tally over the ranks
    u32 lost;             // a rank is gone: nobody waits any more
    u32 verdict;          // `lost` when `totals` were told
    u32 padding[12];
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

__device__ __forceinline__ bool peers_sum() { return SEVERAL_RANKS && ENGINE.needs_norm == PEERS_SUM; }
__device__ __forceinline__ Post& own_post() { return *(Post*)PEERS.mailbox[PEERS.rank]; }

// Where rank `to` finds element 0 of what rank `from` sends in exchange `number`.
__device__ __forceinline__ float* inbox(int to, int from, u64 number) {
    const i64 place = (i64)((number & 1) * PEERS.ranks + from) * PEERS.stride;
    return (float*)(PEERS.mailbox[to] + sizeof(Post)) + place;
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
__device__ __forceinline__ void store_word(float* where, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(where), "r"(x) : "memory");
}
__device__ __forceinline__ void store_words(float4* where, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(where), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ u32 load_word(const float* where) {
    u32 x;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(where) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_words(const float4* where) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(where)
                 : "memory");
    return v;
}
__device__ __forceinline__ bool is_written(const uint4& v) {
    return v.x != UNWRITTEN_WORD && v.y != UNWRITTEN_WORD && v.z != UNWRITTEN_WORD && v.w != UNWRITTEN_WORD;
}

// Whether to wait no longer: the host says that a rank has died, or the time is up.
__device__ __noinline__ bool given_up(u64 began) {
    const bool lost = *(const volatile u32*)PEERS.gone || *(const volatile u32*)&own_post().lost ||
                      (PEERS.limit_ns && global_ns() - began > PEERS.limit_ns);
    if (lost) *(volatile u32*)&own_post().lost = 1;
    return lost;
}

// Number k of this rank's tally, its votes among it. `sure`: no gradient of its can be NaN or too large.
__device__ __forceinline__ float own_tally(int k, bool sure) {
    float x = ENGINE.gradient[ENGINE.size + k];
    if (k >= TALLY_STOP && k < TALLY_UNSURE) x += own_post().votes[k - TALLY_STOP];
    if (k == TALLY_UNSURE && !sure) x += 1.f;
    return x;
}

// The thread's share of this rank's gradient to all other ranks; block 0 sends the tally first.
__device__ __forceinline__ void send_gradient(u64 number, bool sure) {
    const int rank = PEERS.rank, ranks = PEERS.ranks;
    if (blockIdx.x == 0 && threadIdx.x < TALLY) {
        const u32 word = written_word(own_tally(threadIdx.x, sure));
        for (int r = 0; r < ranks; ++r)
            if (r != rank) store_word(inbox(r, rank, number) + ENGINE.size + threadIdx.x, word);
    }
    const i64 vectors = ENGINE.size / 4, step = (i64)gridDim.x * blockDim.x;
#pragma unroll 4
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < vectors; i += step) {
        const float4 v = ((const float4*)ENGINE.gradient)[i];
        const uint4 words = make_uint4(written_word(v.x), written_word(v.y), written_word(v.z), written_word(v.w));
        for (int r = 0; r < ranks; ++r)
            if (r != rank) store_words((float4*)inbox(r, rank, number) + i, words);
    }
}

// The tally summed over the ranks, to all blocks: `totals` lies in shared memory. False where a rank is lost: the same
// in every block.
__device__ __forceinline__ bool take_tally(u64 number, bool sure, float* totals) {
    Post& post = own_post();
    if (blockIdx.x == 0 && threadIdx.x < 32) {
        const u64 began = global_ns();
        bool lost = *(const volatile u32*)&post.lost;
        float sum = 0.f;
        if (threadIdx.x < TALLY)
            for (int r = 0; r < PEERS.ranks; ++r) {
                float x;
                if (r == PEERS.rank) {
                    x = own_tally(threadIdx.x, sure);
                } else {
                    float* where = inbox(PEERS.rank, r, number) + ENGINE.size + threadIdx.x;
                    u32 word = load_word(where);
                    for (u32 looks = 1; word == UNWRITTEN_WORD && !lost; ++looks) {
                        if (looks % PATIENCE == 0) lost = given_up(began);
                        word = load_word(where);
                    }
                    store_word(where, UNWRITTEN_WORD);
                    x = __uint_as_float(word);
                }
                sum = r == 0 ? x : sum + x;
            }
        lost = __any_sync(~0u, lost);
        if (threadIdx.x < TALLY) post.totals[threadIdx.x] = sum;
        if (threadIdx.x == 0) {
            post.verdict = lost;
            post.waited_ns += global_ns() - began;
        }
        __syncwarp();
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&post.number), "l"(number + 1) : "memory");
    }
    if (threadIdx.x == 0)
        while (load_acquire(&post.number) != number + 1) {
        }
    __syncthreads();
    if (threadIdx.x < TALLY) totals[threadIdx.x] = post.totals[threadIdx.x];
    const bool lost = post.verdict != 0;
    __syncthreads();
    return !lost;
}

// What the gradients of all ranks add up to, vector by vector. Every vector must be asked for once in an exchange.
struct PeerGradient {
    u64 number, began;
    bool lost;

    __device__ __forceinline__ explicit PeerGradient(u64 number)
        : number(number), began(global_ns()), lost(*(const volatile u32*)&own_post().lost) {}

    // Vectors i, i + step, … below `end`, up to COUNT of them.
    template <int COUNT>
    __device__ __forceinline__ void load(i64 i, i64 step, i64 end, float4 (&sums)[COUNT]) {
        for (int r = 0; r < PEERS.ranks; ++r) {
            const bool own = r == PEERS.rank;
            float4* from = own ? (float4*)ENGINE.gradient : (float4*)inbox(PEERS.rank, r, number);
            uint4 words[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; ++k)
                if (i + k * step < end) words[k] = load_words(from + i + k * step);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                if (i + k * step >= end) break;
                if (!own) {
                    for (u32 looks = 1; !is_written(words[k]) && !lost; ++looks) {
                        if (looks % PATIENCE == 0) lost = given_up(began);
                        words[k] = load_words(from + i + k * step);
                    }
                    const u32 none = UNWRITTEN_WORD;
                    store_words(from + i + k * step, make_uint4(none, none, none, none));
                }
                const float4 v = make_float4(
                    __uint_as_float(words[k].x), __uint_as_float(words[k].y), __uint_as_float(words[k].z),
                    __uint_as_float(words[k].w));
                if (r == 0) sums[k] = v;
                else sums[k].x += v.x, sums[k].y += v.y, sums[k].z += v.z, sums[k].w += v.w;
            }
        }
    }
};

// What lies in the gradient buffer.
struct OwnGradient {
    template <int COUNT>
    __device__ __forceinline__ void load(i64 i, i64 step, i64 end, float4 (&sums)[COUNT]) const {
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
            if (i + k * step < end) sums[k] = ((const float4*)ENGINE.gradient)[i + k * step];
    }
};
