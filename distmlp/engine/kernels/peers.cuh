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
#include "epilogue.cuh"
#include "reduce.cuh"

#ifndef RARELY  // executed; but a kernel that hands registers around cannot call functions
#define RARELY __noinline__
#endif

// How large gradients go (plan_peers.py decides by their size and the ranks): all to everybody, among two or more, or every part
// to one that adds it up for all.
#define PAIR 0
#define EVERYBODY 1
#define SCATTER 2
#ifndef PEER_FORM
#define PEER_FORM PAIR
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
// By one thread of block 0, which nothing has to wait for.
__device__ __forceinline__ void count_wait(u64 began) {
    atomicAdd((unsigned long long*)&own_post().waited_ns, (unsigned long long)(global_ns() - began));
}
__device__ __forceinline__ u32 written_word(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == UNWRITTEN_WORD ? 0x7fffffffu : bits;
}
__device__ __forceinline__ void store_words(float4* where, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(where), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

__device__ __forceinline__ void store_word(u32* where, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(where), "r"(x) : "memory");
}
__device__ __forceinline__ void store_pair(u32* where, u32 x, u32 y) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1,%2};" ::"l"(where), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ u32 load_word(const u32* where) {
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
__device__ __forceinline__ bool written(const uint4& v) {
    return v.x != UNWRITTEN_WORD && v.y != UNWRITTEN_WORD && v.z != UNWRITTEN_WORD && v.w != UNWRITTEN_WORD;
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
        v = load_words(where);
        if (written(v)) break;
        if (lost || (looks % PATIENCE == 0 && (lost = given_up(began)))) break;
    }
    store_words(where, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// Sums over the ranks without a grid barrier: every thread that owns numbers sends them and waits for those of the same
// thread on the other ranks, at the same places. All blocks of all ranks count the exchanges alike. Whoever loses a rank
// goes on with what it has; a barrier later all blocks see `lost` in the Post.
struct Exchange {
    u64 number;
    bool lost;

    __device__ __forceinline__ explicit Exchange(u64 number) : number(number), lost(false) {}

    __device__ __forceinline__ u32* words(int to, int from, i64 at) const {
        return (u32*)inbox(to, from, number & 1) + at;
    }
    // Whether to look once more; `began` is zero at first.
    __device__ __forceinline__ bool patient(u32 looks, u64& began) {
        if (looks % PATIENCE == 0 && !lost) {
            if (!began) began = global_ns();
            lost = *(const volatile u32*)&own_post().lost || given_up(began);
        }
        return !lost;
    }
    // f(rank) for all others.
    template <class F>
    static __device__ __forceinline__ void for_each_other(const F& f) {
        if (PEER_FORM == PAIR) {
            f(1 - PEERS.rank);
        } else {
            for (int r = 0; r < PEERS.ranks; ++r)
                if (r != PEERS.rank) f(r);
        }
    }

    // The sum of the ranks' numbers `at`, of which this thread has `own`.
    __device__ __forceinline__ float sum(i64 at, float own) {
        send(at, own);
        return take(at, own);
    }
    __device__ __forceinline__ void send(i64 at, float own) const {
        for_each_other([&](int r) { store_word(words(r, PEERS.rank, at), written_word(own)); });
    }
    __device__ __forceinline__ float take(i64 at, float own) {
        u64 began = 0;
        if (PEER_FORM == PAIR) return own + receive(1 - PEERS.rank, at, began);
        float sum = 0.f;
        for (int r = 0; r < PEERS.ranks; ++r) {
            const float x = r == PEERS.rank ? own : receive(r, at, began);
            sum = r == 0 ? x : sum + x;
        }
        return sum;
    }
    // With a first look apart.
    __device__ __forceinline__ u32 look(i64 at) const {
        return PEER_FORM == PAIR ? load_word(words(PEERS.rank, 1 - PEERS.rank, at)) : UNWRITTEN_WORD;
    }
    __device__ __forceinline__ float take(i64 at, float own, u32 seen) {
        u64 began = 0;
        return PEER_FORM == PAIR ? own + receive(1 - PEERS.rank, at, began, seen) : take(at, own);
    }
    __device__ __forceinline__ float receive(int r, i64 at, u64& began) {
        return receive(r, at, began, load_word(words(PEERS.rank, r, at)));
    }
    __device__ __forceinline__ float receive(int r, i64 at, u64& began, u32 word) {
        u32* where = words(PEERS.rank, r, at);
        for (u32 looks = 1; word == UNWRITTEN_WORD && patient(looks, began); ++looks) word = load_word(where);
        store_word(where, UNWRITTEN_WORD);
        return __uint_as_float(word);
    }
    // Two numbers, at a multiple of two.
    __device__ __forceinline__ void send(i64 at, const float2& v) const {
        for_each_other([&](int r) { store_pair(words(r, PEERS.rank, at), written_word(v.x), written_word(v.y)); });
    }
};

// The same of the gradient of a tile, by fours at multiples of four. Sending, a first look and taking are apart, so that much can
// be under way.
//
// In the form SCATTER a vector goes to one rank, which adds it up and sends the sum to all: of all bytes a link carries two
// `ranks`-ths for every other rank instead of all of them, and there is one way more. Then a tile is sent, passed on, taken, each
// as a whole. A sum lies where its sender would have put its own part, or in the sender's own mailbox where it would put
// nothing at all: no place has two uses in an exchange.
struct TileExchange : Exchange {
    __device__ __forceinline__ explicit TileExchange(u64 number) : Exchange(number) {}

    // Who adds up the vector `at`: in turn, 256 bytes each.
    static __device__ __forceinline__ int owner(i64 at) { return (int)((u32)(at >> 6) % (u32)PEERS.ranks); }

    __device__ __forceinline__ void send(i64 at, const float4& v) const {
        if (PEER_FORM != SCATTER) for_each_other([&](int r) { put(r, at, v); });
        else if (owner(at) != PEERS.rank) put(owner(at), at, v);
    }
    __device__ __forceinline__ void send(i64 at, const float2& v) const {
        if (PEER_FORM != SCATTER) Exchange::send(at, v);
        else if (owner(at) != PEERS.rank)
            store_pair(words(owner(at), PEERS.rank, at), written_word(v.x), written_word(v.y));
    }
    __device__ __forceinline__ void put(int to, i64 at, const float4& v) const {
        store_words(
            (float4*)words(to, PEERS.rank, at), written_word(v.x), written_word(v.y), written_word(v.z),
            written_word(v.w));
    }
    // Between sending a tile and taking it.
    __device__ __forceinline__ void pass_on(i64 at, const float4& own) {
        if (PEER_FORM != SCATTER || owner(at) != PEERS.rank) return;
        const float4 sum = gather(at, own);
        for (int r = 0; r < PEERS.ranks; ++r) put(r, at, sum);
    }
    __device__ __forceinline__ uint4 look(i64 at) const {
        return look_from(PEER_FORM == SCATTER ? owner(at) : PEERS.rank == 0, at);
    }
    __device__ __forceinline__ float4 take(i64 at, const float4& own, uint4 seen) {
        if (PEER_FORM == SCATTER) return receive(owner(at), at, seen);
        if (PEER_FORM == EVERYBODY) return gather(at, own);
        float4 sum = receive(1 - PEERS.rank, at, seen);
        add_to(sum, own);
        return sum;
    }

    __device__ __forceinline__ uint4 look_from(int r, i64 at) const {
        return load_words((const float4*)words(PEERS.rank, r, at));
    }
    // What rank `r` has put there; `seen`: what was found in a first look.
    __device__ __forceinline__ float4 receive(int r, i64 at, uint4 seen) {
        u64 began = 0;
        for (u32 looks = 1; !written(seen) && patient(looks, began); ++looks) seen = look_from(r, at);
        store_words(
            (float4*)words(PEERS.rank, r, at), UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD, UNWRITTEN_WORD);
        return make_float4(
            __uint_as_float(seen.x), __uint_as_float(seen.y), __uint_as_float(seen.z), __uint_as_float(seen.w));
    }
    // Everybody's sum; looks at four ranks at a time.
    __device__ __forceinline__ float4 gather(i64 at, const float4& own) {
        float4 sum = own;
#pragma unroll 1
        for (int first = 0; first < PEERS.ranks; first += 4) {
            uint4 seen[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = first + i;
                if (r < PEERS.ranks && r != PEERS.rank) seen[i] = look_from(r, at);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = first + i;
                if (r >= PEERS.ranks) break;
                const float4 v = r == PEERS.rank ? own : receive(r, at, seen[i]);
                if (r == 0) sum = v;
                else add_to(sum, v);
            }
        }
        return sum;
    }
};

// Vector i of gradient and tally as this rank has it, its votes among them.
__device__ __forceinline__ float4 own_vector(i64 i) {
    float4 v = ((const float4*)ENGINE.gradient)[i];
    const i64 tally = ENGINE.size >> 2;
    if (i == tally) v.w += own_post().votes[0];
    if (i == tally + 1) v.x += own_post().votes[1], v.y += own_post().votes[2];
    return v;
}

// The sum over the ranks of vector i, of which they have sent theirs.
__device__ __forceinline__ float4 take_sum(i64 i, int parity, u64 began, bool& lost) {
    float4 sum;
    for (int r = 0; r < PEERS.ranks; ++r) {
        const float4 v = r == PEERS.rank ? own_vector(i) : take_words(inbox(PEERS.rank, r, parity) + i, began, lost);
        if (r == 0) sum = v;
        else add_to(sum, v);
    }
    return sum;
}
__device__ __forceinline__ void put_vector(int to, i64 i, int parity, const float4& v) {
    store_words(
        inbox(to, PEERS.rank, parity) + i, written_word(v.x), written_word(v.y), written_word(v.z), written_word(v.w));
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
    const auto owner = [&](i64 i) { return (int)((u32)(i >> 4) % (u32)ranks); };  // as TileExchange::owner
    for (i64 i = first; i < vectors; i += step) {
        const float4 v = own_vector(i);
        for (int r = 0; r < ranks; ++r)
            if (r != rank && (PEER_FORM != SCATTER || r == owner(i))) put_vector(r, i, parity, v);
    }
    if (PEER_FORM == SCATTER)
        for (i64 i = first; i < vectors; i += step) {
            if (owner(i) != rank) continue;
            const float4 sum = take_sum(i, parity, began, lost);
            for (int r = 0; r < ranks; ++r) put_vector(r, i, parity, sum);
        }
    for (i64 i = first; i < vectors; i += step) {
        const float4 sum = PEER_FORM == SCATTER ? take_words(inbox(rank, owner(i), parity) + i, began, lost)
                                                : take_sum(i, parity, began, lost);
        ((float4*)ENGINE.gradient)[i] = sum;
        if (i < own) f(sum);
    }
    if (first == 0) post.waited_ns += global_ns() - began;
}

// Several hosts: the first rank of a host has the sums over all of them and hands them to the others, by way of the place
// in a mailbox that its owner has no other use for. They were summed over the host in the exchange before.
__device__ __forceinline__ void spread_gradient() {
    Post& post = own_post();
    const int parity = (post.exchanges - 1) & 1, rank = PEERS.rank;
    const i64 vectors = ENGINE.size / 4 + TALLY / 4, step = (i64)gridDim.x * blockDim.x;
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    const u64 began = global_ns();
    float4* gradient = (float4*)ENGINE.gradient;
    bool lost = *(const volatile u32*)&post.lost;
    for (i64 i = first; i < vectors; i += step) {
        if (rank > 0) {
            gradient[i] = take_words(inbox(rank, rank, parity) + i, began, lost);
            continue;
        }
        const float4 v = gradient[i];
        for (int r = 1; r < PEERS.ranks; ++r)
            store_words(inbox(r, r, parity) + i, written_word(v.x), written_word(v.y), written_word(v.z), written_word(v.w));
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
