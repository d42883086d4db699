// The main loop of `Product` by Hopper's warpgroup products: bf16, both operands in shared memory, 128-byte swizzle.
// Eight warps are two warpgroups: of 64 rows each, or of the same 64 rows and half of the depth each. The results lie
// in the threads exactly as Product's do for 8 × 1 × 1 or 4 × 1 × 2 warps, so all that follows the main loop is shared.
//
// Operands come by tensor copies. The two blocks of a cluster compute neighbouring tiles that have one operand in
// common, A where it lies by rows of the result and B else: each copies half of that for both.
#pragma once
#include "tile.cuh"
#if PRODUCT == BF16
#include "tensor_copies.cuh"
#include "wgmma.cuh"

#ifndef DEV_SHARE
#define DEV_SHARE 1
#endif
#define COPY_SETS 3         // of barriers: main loops that differ in their stages
#define MOST_STAGES 8
__shared__ u64 stage_barriers[COPY_SETS][2][MOST_STAGES];  // a stage is filled, is free again
__shared__ u32 stages_used[COPY_SETS];                     // since the kernel began

// Before anything else in a kernel; `leave_copies` behind everything.
__device__ __forceinline__ void enter_copies() {
    if (threadIdx.x == 0) {
        for (int set = 0; set < COPY_SETS; ++set) {
            stages_used[set] = 0;
            for (int s = 0; s < MOST_STAGES; ++s) {
                barrier_init(shared_address(&stage_barriers[set][0][s]), 1);
                barrier_init(shared_address(&stage_barriers[set][1][s]), DEV_SHARE ? 2 * CLUSTER : 2);  // warpgroups that read it
            }
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_wait();
}
__device__ __forceinline__ void leave_copies() { cluster_wait(); }

// A tile of ROWS × COLS elements as `wgmma` reads it: rows are cut into columns of 64 elements (128 bytes), one column
// block after the other; the eight 16-byte chunks of a row change places with the row's number (PTX ISA, "Shared memory
// matrix layout", 128-byte swizzle).
template <int ROWS, int COLS>
struct Swizzled {
    static constexpr int BLOCKS = (COLS + 63) / 64, BLOCK = ROWS * 64, SIZE = BLOCKS * BLOCK;  // elements
    static_assert(ROWS % (BOX_ROWS * CLUSTER) == 0, "whole boxes");

    // This block's half of the rows to both blocks where SHARED, else all rows to this one. By one thread.
    template <bool SHARED>
    static __device__ __forceinline__ void copy(u32 tile, const View& from, int row, int col, u32 barrier) {
        constexpr int OWN = SHARED ? ROWS / CLUSTER : ROWS;
        const int first = SHARED ? cluster_rank() * OWN : 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int r = 0; r < OWN; r += BOX_ROWS) {
                const u32 to = tile + (b * BLOCK + (first + r) * 64) * 2;
                if (SHARED) copy_box_to_all(to, from.map, row + first + r, col + b * 64, barrier);
                else copy_box(to, from.map, row + r, col + b * 64, barrier);
            }
    }

    // Zeros to rows [first, ROWS), by all threads.
    static __device__ __forceinline__ void clear(Element* tile, int first) {
        for (int i = threadIdx.x; i < BLOCKS * (ROWS - first) * 8; i += THREADS) {
            const int block = i / ((ROWS - first) * 8), at = i % ((ROWS - first) * 8);
            *(uint4*)(tile + block * BLOCK + first * 64 + at * 8) = make_uint4(0, 0, 0, 0);
        }
    }
};

template <class S, bool A_ROWS_M, bool B_ROWS_K, int SET_>
struct WarpgroupProduct : Product<S, A_ROWS_M, B_ROWS_K> {
    static_assert(S::K == 64 && S::M == 128 / S::WK && S::WM == 8 / S::WK && S::WN == 1 && S::STAGES >= 3 &&
                  S::STAGES <= MOST_STAGES, "two warpgroups, one atom deep");
    typedef Swizzled<A_ROWS_M ? S::M : S::K, A_ROWS_M ? S::K : S::M> StageA;
    typedef Swizzled<B_ROWS_K ? S::K : S::N, B_ROWS_K ? S::N : S::K> StageB;
    static constexpr bool COPIED = true, SHARES_A = A_ROWS_M;
    static constexpr int SET = SET_;
    static constexpr int STAGE = StageA::SIZE + StageB::SIZE;  // elements; a multiple of the 1024-byte atom
    static constexpr int AHEAD = S::STAGES - 2;                // the stage before last may still be read
    static constexpr int PIPE_BYTES = STAGE * S::STAGES * (int)sizeof(Element) + 1024;
    typedef Product<S, A_ROWS_M, B_ROWS_K> Base;
    static constexpr bool APART = S::N <= 128;  // wider results share the memory of the stages
    static constexpr int TILE_AT = APART ? PIPE_BYTES : 0;
    static constexpr int SHARED_BYTES =
        APART ? PIPE_BYTES + Base::TILE_BYTES : PIPE_BYTES > Base::TILE_BYTES ? PIPE_BYTES : Base::TILE_BYTES;

    static __device__ __forceinline__ Element* stages(void* shared) {
        return (Element*)(((u64)shared + 1023) & ~(u64)1023);
    }
    static __device__ __forceinline__ u32 filled(int slot) { return shared_address(&stage_barriers[SET][0][slot]); }
    static __device__ __forceinline__ u32 free(int slot) { return shared_address(&stage_barriers[SET][1][slot]); }

    // By one thread, when the stage is free.
    static __device__ __forceinline__ void copy(const TileWork& work, int k, const Element* stage, int slot) {
        const u32 at = shared_address(stage), barrier = filled(slot);
        barrier_expect(barrier, STAGE * (int)sizeof(Element));
        StageA::template copy<SHARES_A && DEV_SHARE>(at, work.a, A_ROWS_M ? work.m0 : k, A_ROWS_M ? k : work.m0, barrier);
        StageB::template copy<!SHARES_A && DEV_SHARE>(
            at + StageA::SIZE * 2, work.b, B_ROWS_K ? k : work.n0, B_ROWS_K ? work.n0 : k, barrier);
    }
    // This warpgroup is done with a stage: tells both blocks, whose copies it waits for and who wait for it.
    static __device__ __forceinline__ void release(int slot) {
        if (DEV_SHARE) { if (threadIdx.x % 128 < CLUSTER) barrier_arrive(free(slot), threadIdx.x % 128); }
        else if (threadIdx.x % 128 == 0) barrier_arrive(free(slot), cluster_rank());
    }
    // What was copied from rows that are no longer the batch's counts as zero where it is summed over.
    static __device__ __forceinline__ void clear(Element* stage, int depth) {
        if (A_ROWS_M) return;
        StageA::clear(stage, depth);
        StageB::clear(stage + StageA::SIZE, depth);
        fence_copies();
        __syncthreads();
    }

    __device__ __forceinline__ void start(const Element* stage) {
        const u32 at = shared_address(stage);
        const int group = threadIdx.x >> 7;  // warpgroup
        constexpr int STEPS = S::K / 16 / S::WK;
        const int first = S::WK > 1 ? group * STEPS : 0;  // of the stage's products
        const u64 of_a = matrix<A_ROWS_M>(at + (S::WK > 1 ? 0 : group * 64 * 64 * 2), StageA::BLOCK);
        const u64 of_b = matrix<!B_ROWS_K>(at + StageA::SIZE * 2, StageB::BLOCK);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            narrow::Wgmma<S::N / 8>::template ss<!A_ROWS_M, B_ROWS_K>(
                this->c, of_a + (first + k) * (A_ROWS_M ? 2 : 128), of_b + (first + k) * (B_ROWS_K ? 128 : 2));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    // The product of a stage runs while one further on is copied and the next is waited for.
    __device__ __forceinline__ void settle() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
    __device__ __forceinline__ void end() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

    // Matrix descriptor of an operand at a shared-memory address; DEEP: its rows run along k, as they do by default.
    template <bool DEEP>
    static __device__ __forceinline__ u64 matrix(u32 at, int block) {
        return (u64)((at & 0x3ffff) >> 4) | (u64)(DEEP ? 1 : block * 2 / 16) << 16 | (u64)(1024 / 16) << 32 | 1ull << 62;
    }
};

// A place in the ring of stages, and which time round it is.
template <int STAGES>
struct Turn {
    int slot;
    u32 parity;
    __device__ __forceinline__ explicit Turn(u32 used) : slot(used % STAGES), parity(used / STAGES & 1) {}
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

__device__ long long LOGS[264][32][64];
#define LOG(k) if (threadIdx.x == 0 && (k) < 64) { long long c_; asm volatile("mov.u64 %0, %%clock64;" : "=l"(c_)::"memory"); LOGS[blockIdx.x][fine_phase & 31][k] = c_; }
// `for_each_tile` by tensor copies. Both blocks of a cluster have as many tiles, of as many stages.
template <class P, class Work, class Begin, class Finish>
__device__ __forceinline__ void for_each_copied_tile(
    void* shared, const Work& work, const Begin& begin, const Finish& finish) {
    LOG(0)
    Element* stages = P::stages(shared);
    const u32 before = stages_used[P::SET];
    const bool copies = threadIdx.x < 32;  // a warp of them, so that it stays together
    Turn<P::STAGES> fill(before), use(before);
    TileWork ahead, tile;
    int next = 0, next_step = 0, stages_now = 0;
    bool more = work(0, ahead);
    const auto copy = [&](int i) {
        while (more && next_step == ahead.steps && (P::APART || next < i)) {
            next_step = 0;
            more = work(++next, ahead);
        }
        if (!more || next_step >= ahead.steps) return;
        if (threadIdx.x == 0) {
            barrier_wait(P::free(fill.slot), fill.parity ^ 1);
            P::copy(ahead, ahead.k + next_step * P::DEPTH, stages + fill.slot * P::STAGE, fill.slot);
        }
        ++next_step;
        fill.advance();
        __syncwarp();
    };
#pragma unroll 1
    for (int i = 0; work(i, tile); ++i) {
        LOG(1)
        if (i && !P::APART) cluster_wait();  // neither block copies over the other's results
        if (copies && (i == 0 || !P::APART))
#pragma unroll 1
            for (int s = 0; s < P::AHEAD; ++s) copy(i);
        LOG(2)
        P product;
        product.begin();
        begin(i, tile);
        LOG(3)
        int last = 0;
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            Element* stage = stages + use.slot * P::STAGE;
            barrier_wait(P::filled(use.slot), use.parity);
            if (step == 0) FINE(0)
            LOG(4 + 3 * step)
            if (tile.k + (step + 1) * P::DEPTH > tile.a.rows) P::clear(stage, tile.a.rows - tile.k - step * P::DEPTH);
            product.start(stage);
            if (copies) copy(i);
            LOG(5 + 3 * step)
            product.settle();
            LOG(6 + 3 * step)
            if (step) P::release(last);
            last = use.slot;
            use.advance();
        }
        product.end();
        if (tile.steps) P::release(last);
        stages_now += tile.steps;
        FINE(1)
        if (!P::APART || !tile.steps) __syncthreads();  // all are done with the stages, or with the last results
        finish(i, tile, product);
        FINE(2)
        if (!P::APART) {
            fence_copies();
            __syncthreads();
        }
    }
    fence_copies();  // what later copies may overwrite has been read and written
    __syncthreads();
    if (threadIdx.x == 0) stages_used[P::SET] = before + stages_now;
    __syncthreads();
}
#endif

// The product by one main loop or the other.
template <bool WARPGROUPS, class S, bool A_ROWS_M, bool B_ROWS_K, int SET>
struct MainLoopOf {
    typedef Product<S, A_ROWS_M, B_ROWS_K> Type;
};
#if PRODUCT == BF16
template <class S, bool A_ROWS_M, bool B_ROWS_K, int SET>
struct MainLoopOf<true, S, A_ROWS_M, B_ROWS_K, SET> {
    typedef WarpgroupProduct<S, A_ROWS_M, B_ROWS_K, SET> Type;
};
#endif
template <bool WARPGROUPS, class S, bool A_ROWS_M, bool B_ROWS_K, int SET>
using MainLoop = typename MainLoopOf<WARPGROUPS, S, A_ROWS_M, B_ROWS_K, SET>::Type;

template <class P, class Work, class Begin, class Finish>
__device__ __forceinline__ void for_each_tile(
    void* shared, const Work& work, const Begin& begin, const Finish& finish) {
#if PRODUCT == BF16
    if constexpr (P::COPIED) for_each_copied_tile<P>(shared, work, begin, finish);
    else
#endif
        for_each_fetched_tile<P>(shared, work, begin, finish);
}
