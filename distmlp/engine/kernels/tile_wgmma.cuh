// The main loop of `Product` by Hopper's warpgroup products: bf16, both operands in shared memory, 128-byte swizzle.
// Eight warps are two warpgroups: of 64 rows each, or of the same 64 rows and half of the depth each. The results lie
// in the threads exactly as Product's do for 8 × 1 × 1 or 4 × 1 × 2 warps, so all that follows the main loop is shared.
#pragma once
#include "tile.cuh"
#if PRODUCT == BF16
#include "wgmma.cuh"

// A tile of ROWS × COLS elements as `wgmma` reads it. Rows are cut into columns of 64 elements (128 bytes), one column
// block after the other; the eight 16-byte chunks of a row change places with the row's number, which keeps both
// copies and products free of bank conflicts (PTX ISA, "Shared memory matrix layout", 128-byte swizzle).
template <int ROWS, int COLS>
struct Swizzled {
    static constexpr int BLOCK = ROWS * 64, SIZE = (COLS + 63) / 64 * BLOCK;  // elements
    static constexpr int CHUNKS = COLS / 8, FULL = CHUNKS < 16 ? 8 : CHUNKS < 32 ? 16 : 32;
    static constexpr int REST = CHUNKS - FULL > 0 ? CHUNKS - FULL : 1;  // behind a power of two
    static_assert(COLS % 8 == 0 && CHUNKS >= FULL && THREADS / FULL % 8 == 0 && ROWS % (THREADS / FULL) == 0, "whole passes");

    static __device__ __forceinline__ u32 place(int chunk, int row) {  // bytes
        return ((chunk / 8) * BLOCK + row * 64 + ((chunk ^ row) & 7) * 8) * 2;
    }

    template <bool K_ROWS, int DEPTH>
    struct Cursor {
        typedef Copies<ROWS, FULL, K_ROWS, DEPTH> Main;
        typedef Copies<ROWS, REST, K_ROWS, DEPTH> Rest;
        Main main;
        Rest rest;

        __device__ __forceinline__ void begin(const View& from, int r, int c) {
            main.begin(from, r, c);
            if (CHUNKS > FULL) rest.begin(from, r, c + FULL * 8);
        }
        __device__ __forceinline__ void copy(u32 tile) const {
            // the row's number modulo 8 is the same in every pass
            const u32 own = tile + place(Main::chunk(), Main::row());
            main.copy([=](int r) { return own + r * 128; });
            if (CHUNKS == FULL) return;
            const u32 behind = tile + place(FULL + Rest::chunk(), Rest::row());
            rest.copy([=](int r) { return behind + r * 128; });
        }
        __device__ __forceinline__ void next() {
            main.next();
            if (CHUNKS > FULL) rest.next();
        }
    };
};

template <class S, bool A_ROWS_M, bool B_ROWS_K>
struct WarpgroupProduct : Product<S, A_ROWS_M, B_ROWS_K> {
    static_assert(S::K == 64 && S::M == 128 / S::WK && S::WM == 8 / S::WK && S::WN == 1 && S::STAGES >= 3,
                  "two warpgroups, one atom deep");
    typedef Swizzled<A_ROWS_M ? S::M : S::K, A_ROWS_M ? S::K : S::M> StageA;
    typedef Swizzled<B_ROWS_K ? S::K : S::N, B_ROWS_K ? S::N : S::K> StageB;
    static constexpr int STAGE = StageA::SIZE + StageB::SIZE;  // elements; a multiple of the 1024-byte atom
    static constexpr int AHEAD = S::STAGES - 2;                // the stage before last may still be read
    static constexpr int PIPE_BYTES = STAGE * S::STAGES * (int)sizeof(Element) + 1024;
    typedef Product<S, A_ROWS_M, B_ROWS_K> Base;
    static constexpr bool APART = S::N <= 128;  // wider results share the memory of the stages
    static constexpr int TILE_AT = APART ? PIPE_BYTES : 0;
    static constexpr int SHARED_BYTES =
        APART ? PIPE_BYTES + Base::TILE_BYTES : PIPE_BYTES > Base::TILE_BYTES ? PIPE_BYTES : Base::TILE_BYTES;

    // The main loop. The product of a stage runs while one further on is fetched and the next is waited for.
    static __device__ __forceinline__ Element* stages(void* shared) {
        return (Element*)(((u64)shared + 1023) & ~(u64)1023);
    }
    static __device__ __forceinline__ void arrived() {
#if !NO_PROXY_FENCE
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // plain copies, read by the tensor cores
#endif
    }
    __device__ __forceinline__ void start(u32 stage) {
        const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // warpgroup
        constexpr int STEPS = S::K / 16 / S::WK;
        const int first = S::WK > 1 ? group * STEPS : 0;  // of the stage's products
        const u32 a = matrix<A_ROWS_M>(stage, StageA::BLOCK) + (S::WK > 1 ? 0 : group * (64 * 64 * 2 / 16));
        const u32 b = matrix<!B_ROWS_K>(stage + StageA::SIZE * 2, StageB::BLOCK);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            narrow::Wgmma<S::N / 8>::template ss<!A_ROWS_M, B_ROWS_K>(
                this->c, whole(a + (first + k) * (A_ROWS_M ? 2 : 128)), whole(b + (first + k) * (B_ROWS_K ? 128 : 2)));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    __device__ __forceinline__ void settle(const Element*) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    __device__ __forceinline__ void end() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
    typedef Operands<StageA, StageB, A_ROWS_M, B_ROWS_K, S::K> Cursor;

    // Lower half of the matrix descriptor of an operand at a shared-memory address; DEEP: its rows run along k, as they
    // do by default. The upper half is the same for all.
    template <bool DEEP>
    static __device__ __forceinline__ u32 matrix(u32 at, int block) {
        return (at & 0x3ffff) >> 4 | (u32)(DEEP ? 1 : block * 2 / 16) << 16;
    }
    static __device__ __forceinline__ u64 whole(u32 lower) { return (u64)(1024 / 16 | 1u << 30) << 32 | lower; }
};
#endif

// The product by one main loop or the other.
template <bool WARPGROUPS, class S, bool A_ROWS_M, bool B_ROWS_K>
struct MainLoopOf {
    typedef Product<S, A_ROWS_M, B_ROWS_K> Type;
};
#if PRODUCT == BF16
template <class S, bool A_ROWS_M, bool B_ROWS_K>
struct MainLoopOf<true, S, A_ROWS_M, B_ROWS_K> {
    typedef WarpgroupProduct<S, A_ROWS_M, B_ROWS_K> Type;
};
#endif
template <bool WARPGROUPS, class S, bool A_ROWS_M, bool B_ROWS_K>
using MainLoop = typename MainLoopOf<WARPGROUPS, S, A_ROWS_M, B_ROWS_K>::Type;
