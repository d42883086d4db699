// The main loop of the bulk kernel: one thread fills a ring of stages by bulk copies, two warpgroups multiply.
// Two blocks, a cluster, work on tiles one above the other; each fetches half of B for both.
#pragma once
#include "bulk_copy.cuh"
#include "wgmma.cuh"

#define TILE_M 128       // rows of a tile: 64 a warpgroup
#define STAGES BULK_STAGES
#define CONSUMERS 256    // threads that multiply
#define HELPERS 128      // behind them: a thread that copies, and three warps for what comes from outside
#define BULK_THREADS (CONSUMERS + HELPERS)
#define CONSUMER_WARPS 8
#define PIECE (COLUMNS * 128)  // bytes of a square of a block

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WIDEST = larger(BULK_N, BULK_GRADIENT_N);
constexpr int STAGE_BYTES = (TILE_M + WIDEST) * 128;
constexpr int STAGING_BYTES = PRODUCT == TF32 ? 1024 : 2048;  // half of what a warp has; in bfloat16 16 rows of a block
constexpr int STAGING_AT = STAGES * STAGE_BYTES, BARRIERS_AT = STAGING_AT + CONSUMER_WARPS * 2 * STAGING_BYTES;
constexpr int SENDING_AT = BARRIERS_AT + 2 * STAGES * 8;  // barriers of places on the way out, see `Writer` of bulk_bf16.cuh
constexpr int TILES_AT = SENDING_AT + 2 * 4 * 8, NOTED_TILES = 16;  // see `Tile`
constexpr int RINGS_AT = TILES_AT + NOTED_TILES * 8;  // see keep_ring
constexpr int SHARED_BYTES = RINGS_AT + CONSUMER_WARPS * 8;
extern __shared__ __align__(1024) u8 dynamic_shared[];
static_assert(STAGES + 2 < NOTED_TILES, "a tile has a stage at least");

// What a warp that multiplies has of shared memory beside the stages: for its results, and before them for what they need.
__device__ __forceinline__ u32 staging_of_warp(u32 base) {
    return base + STAGING_AT + (threadIdx.x >> 5) * 2 * STAGING_BYTES;
}

// One side's place in the ring.
struct Ring {
    u32 base, rank;
    int slot;
    u32 parity;
    u32 sent;  // blocks of columns of results, so far

    __device__ __forceinline__ u32 stage() const { return base + slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int s) const { return base + BARRIERS_AT + s * 8; }
    __device__ __forceinline__ u32 empty(int s) const { return base + BARRIERS_AT + (STAGES + s) * 8; }
    // A warp has no use for the stage that comes next, once it is there.
    __device__ __forceinline__ void let_go() {
        barrier_wait(full(slot), parity);
        barrier_arrive(address_at(empty(slot), threadIdx.x & 1), (threadIdx.x & 31) < 2);
        advance();
    }
    // A warpgroup's place on its way out has been written; has been read.
    __device__ __forceinline__ u32 written(int group, int place) const { return base + SENDING_AT + group * 32 + place * 8; }
    __device__ __forceinline__ u32 gone(int group, int place) const { return written(group, place) + 16; }
    __device__ __forceinline__ void advance() {
        const bool wrap = slot + 1 == STAGES;
        slot = wrap ? 0 : slot + 1;
        parity ^= wrap;
    }
};

// The warps that multiply put their place in the ring down in shared memory until they multiply again: what they do in between needs
// all registers.
__device__ __forceinline__ u32 place_of_ring() { return shared_address(dynamic_shared) + RINGS_AT + (thread_anew() >> 5) * 8; }
__device__ __forceinline__ void keep_ring(const Ring& ring) {
    __syncwarp();
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(place_of_ring()), "r"(ring.slot | ring.parity << 8), "r"(ring.sent) : "memory");
    __syncwarp();
}
__device__ __forceinline__ Ring recall_ring() {
    const u32 at = place_of_ring(), place = load_shared(at);
    return {shared_address(dynamic_shared), rank_in_cluster(), (int)(place & 255), place >> 8, load_shared(at + 4)};
}

__device__ __forceinline__ void open_ring(const Ring& ring) {
    if (threadIdx.x < CONSUMERS) keep_ring(ring);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(ring.full(s), 1);
            barrier_init(ring.empty(s), 2 * CONSUMER_WARPS);
        }
        for (int i = 0; i < 8; ++i) barrier_init(ring.base + SENDING_AT + i * 8, i % 4 < 2 ? CONSUMER_WARPS / 2 : 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    cluster_sync();
}

// A tile of the chain, as the copying thread has noted it down before it fills the tile's first stage. The warps that multiply have
// no registers left to find out themselves, or to keep it: they read what they need when they need it.
struct Tile {
    u32 at;  // in shared memory

    __device__ __forceinline__ Tile(const Ring& ring, int left) : at(ring.base + TILES_AT + (left & NOTED_TILES - 1) * 8) {}
    __device__ __forceinline__ void note(int phase, int row_block, int n) const {
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(phase | n << 8), "r"(row_block) : "memory");
    }
    __device__ __forceinline__ int phase() const { return load_shared(at) & 255; }
    __device__ __forceinline__ int n0() const { return (load_shared(at) >> 8) * BULK_N; }
    __device__ __forceinline__ int m0() const { return load_shared(at + 4) * TILE_M; }
};

// Where an operand's stages come from: COUNT pieces of `bytes` each, `jump` apart up to the last that exists, every
// stage `step` further on.
struct Source {
    const u8* base;
    i64 step, jump;
    int last;  // number of the last piece that exists
};
__device__ __forceinline__ Source rows_of(const Blocked& m, int row) {  // rows from `row` on, blocks in turn
    return {m.at(row, 0), m.block_bytes, 0, 0};
}
__device__ __forceinline__ Source blocks_of(const Blocked& m, int row, int block) {  // rows from `row` on in turn
    return {m.at(row, block), PIECE, m.block_bytes, m.blocks - 1 - block};
}

// All stages of a tile; of B this block fetches its half for both. ROWS: an operand's tile is one piece, else one piece
// for every block of columns.
template <int N, bool A_ROWS, bool B_ROWS>
__device__ __forceinline__ void fill(Ring& ring, Source a, Source b, int steps) {
    static_assert(B_ROWS || !TRANSPOSED, "tf32");
    constexpr int HALF = N * 64;  // bytes
    const int first = ring.rank * (N / 128);  // piece of this half; with 64 columns there are two of half a piece
    b.base += B_ROWS ? ring.rank * HALF : N == 64 ? ring.rank * HALF : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(ring.empty(ring.slot), ring.parity ^ 1);
        const u32 full = ring.full(ring.slot), to = ring.stage(), to_b = to + TILE_M * 128 + ring.rank * HALF;
        barrier_expect(full, (TILE_M + N) * 128);
        if (A_ROWS) bulk_load(to, a.base, TILE_M * 128, full);
        else
#pragma unroll
            for (int j = 0; j < TILE_M / COLUMNS; ++j) bulk_load(to + j * PIECE, a.base + min(j, a.last) * a.jump, PIECE, full);
        if (B_ROWS || N == 64) bulk_load_both(to_b, b.base, HALF, full);
        else
#pragma unroll
            for (int j = 0; j < N / 128; ++j)
                bulk_load_both(to_b + j * PIECE, b.base + min(first + j, b.last) * b.jump, PIECE, full);
        a.base += a.step;
        b.base += b.step;
        ring.advance();
    }
}

// Matrix descriptor of an operand; DEEP: its rows run along the depth.
template <bool DEEP>
__device__ __forceinline__ u64 describe(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(DEEP ? 1 : PIECE / 16) << 16 | (u64)(1024 / 16) << 32 | 1ull << 62;
}

// What a warp has to tell about the tile before; see announce_chain in bulk.cu.
struct Announcement {
    u32 counter;  // of warps' tiles, in shared memory
    bool due;

    __device__ __forceinline__ void add() {
        __syncwarp();
        due = true;
    }
    __device__ __forceinline__ void make() {
        tell_stores(counter, due && (threadIdx.x & 31) == 0);
        due = false;
    }
};

// Until the first stage of a tile is there. It may wait for what the last tile has to announce; else that may wait for
// its stores.
__device__ __forceinline__ void await_tile(const Ring& ring, Announcement& before) {
    if (before.due && !barrier_passed(ring.full(ring.slot), ring.parity)) before.make();
    barrier_wait(ring.full(ring.slot), ring.parity);
}

// A warp's 16 columns of the first operand, 16 deep, from shared memory to the registers of two `wgmma`. Lanes of odd depth
// begin with what lies four deeper: so all banks are used at once.
struct FirstOperand {
    u32 place;  // of this lane's first element in a stage

    __device__ __forceinline__ FirstOperand() {
        const int thread = thread_anew();
        const int warp = thread >> 5, lane = thread & 31, column = warp % 2 * 16 + (lane >> 2);
        const int depth = (lane & 3) + (lane & 1) * 4;
        place = warp / 2 * PIECE + depth * 128 + ((column / CHUNK_COLUMNS ^ depth) & 7) * 16 + column % CHUNK_COLUMNS * 4;
    }
    __device__ __forceinline__ void load(u32 from, u32 (&a)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // depth i / 2 * 8, column i % 2 * 8
            u32 first, second;
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(first)
                         : "r"(from + (place ^ i % 2 * 32) + i / 2 * 1024)
                         : "memory");
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(second)
                         : "r"(from + (place ^ (i % 2 * 32 + 4 * 128 + 4 * 16)) + i / 2 * 1024)
                         : "memory");
            const bool odd = threadIdx.x & 1;
            a[i / 2 * 4 + i % 2] = odd ? second : first;
            a[i / 2 * 4 + i % 2 + 2] = odd ? first : second;
        }
    }
};

// The same as `multiply` for tf32 and a first operand that lies by columns.
template <int N>
__device__ __forceinline__ void multiply_columns(float (&c)[WIDEST / 2], Ring& ring, int steps, Announcement& before) {
    const int lane = threadIdx.x & 31;
    const u32 empty = address_at(ring.empty(0), lane & 1);
    const FirstOperand first;
    u32 upper[8], lower[8];  // halves of a stage's depth; one is loaded while the other is multiplied
    const auto start = [&](const u32 (&a)[8], int k) {
        const u64 b = describe<true>(ring.stage() + TILE_M * 128);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        narrow::Wgmma<N / 8>::rs_tf32(c, a, b + k * 2);
        narrow::Wgmma<N / 8>::rs_tf32(c, a + 4, b + k * 2 + 2);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };
    await_tile(ring, before);
    first.load(ring.stage(), upper);
    int step = 0, previous = 0;
#pragma unroll 1
    do {
        start(upper, 0);
        tell_stores(before.counter, before.due && lane == 0 && step == 0);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        barrier_arrive(empty + previous * 8, lane < 2 && step > 0);
        first.load(ring.stage() + 2048, lower);
        start(lower, 2);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        previous = ring.slot;
        ring.advance();
        if (step + 1 < steps) {
            barrier_wait(ring.full(ring.slot), ring.parity);
            first.load(ring.stage(), upper);
        }
    } while (++step < steps);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    barrier_arrive(empty + previous * 8, lane < 2);
    before.due = false;
}

// c += A B over `steps` >= 1 stages, in the layout of wgmma: warp w has rows 16 w to 16 w + 15 of the tile.
template <int N, bool A_ROWS, bool B_ROWS>
__device__ __forceinline__ void multiply(float (&c)[WIDEST / 2], Ring& ring, int steps, Announcement& before) {
    if constexpr (TRANSPOSED && !A_ROWS) return multiply_columns<N>(c, ring, steps, before);
    const int group = __shfl_sync(~0u, thread_anew() >> 7, 0), lane = thread_anew() & 31;
    const u32 empty = address_at(ring.empty(0), lane & 1);  // lanes 0 and 1 tell both blocks
    await_tile(ring, before);
    int step = 0, previous = 0;
#pragma unroll 1
    do {
        barrier_wait(ring.full(ring.slot), ring.parity);
        const u64 a = describe<A_ROWS>(ring.stage() + group * 64 * 128);
        const u64 b = describe<B_ROWS>(ring.stage() + TILE_M * 128);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if constexpr (TRANSPOSED) narrow::Wgmma<N / 8>::ss_tf32(c, a + k * 2, b + k * 2);
            else narrow::Wgmma<N / 8>::template ss<!A_ROWS, !B_ROWS>(c, a + k * (A_ROWS ? 2 : 128), b + k * (B_ROWS ? 2 : 128));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        tell_stores(before.counter, before.due && lane == 0 && step == 0);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        barrier_arrive(empty + previous * 8, lane < 2 && step > 0);
        previous = ring.slot;
        ring.advance();
    } while (++step < steps);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(c[i])::"memory");
    barrier_arrive(empty + previous * 8, lane < 2);
    before.due = false;
}

// A barrier of those that multiply.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void clear(float (&c)[WIDEST / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[i] = 0.f;
}
