// The main loop of `Product` by Hopper's warpgroup products: bf16, both operands in shared memory, 128-byte swizzle.
// Eight warps are two warpgroups: of 64 rows each, or of the same 64 rows and half of the depth each. The results lie
// in the threads exactly as Product's do for 8 × 1 × 1 or 4 × 1 × 2 warps, so all that follows the main loop is shared.
#pragma once
#include "tile_split.cuh"
#if PRODUCT == BF16
#include "wgmma.cuh"

// A tile of ROWS × COLS elements as `wgmma` reads it. Rows are cut into columns of 64 elements (128 bytes), one column
// block after the other; the eight 16-byte chunks of a row change places with the row's number, which keeps both
// copies and products free of bank conflicts (PTX ISA, "Shared memory matrix layout", 128-byte swizzle).
template <int ROWS, int COLS>
struct Swizzled {
    static constexpr int BLOCK = ROWS * 64, SIZE = (COLS + 63) / 64 * BLOCK;  // elements
    static constexpr int CHUNKS = COLS / 8, PASS = THREADS / CHUNKS;
    static constexpr bool EVEN = THREADS % CHUNKS == 0;  // a thread keeps to a column
    static_assert(COLS % 8 == 0 && (!EVEN || (PASS % 8 == 0 && ROWS % PASS == 0)), "whole passes");

    static __device__ __forceinline__ void load(Element* tile, const View& from, int row, int col) {
        if constexpr (!EVEN) {
#pragma unroll
            for (int first = 0; first < ROWS * CHUNKS; first += THREADS) {
                const int i = first + threadIdx.x, r = i / CHUNKS, chunk = i % CHUNKS;
                if ((ROWS * CHUNKS) % THREADS == 0 || i < ROWS * CHUNKS)
                    copy_async(
                        tile + (chunk / 8) * BLOCK + r * 64 + ((chunk ^ r) & 7) * 8,
                        from.base + (i64)(row + r) * from.ld + (col + chunk * 8),
                        row + r < from.rows && col + chunk * 8 < from.cols);
            }
            return;
        }
        const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
        const bool inside = col + chunk * 8 < from.cols;
        const Element* source = from.base + (i64)(row + first) * from.ld + (col + chunk * 8);
        // the row's number modulo 8 is the same in every pass
        Element* to = tile + (chunk / 8) * BLOCK + first * 64 + ((chunk ^ first) & 7) * 8;
#pragma unroll
        for (int r = 0; r < ROWS; r += PASS) {
            copy_async(to + r * 64, source, inside && row + r + first < from.rows);
            source += (i64)PASS * from.ld;
        }
    }
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
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // plain copies, read by the tensor cores
    }
    __device__ __forceinline__ void start(const Element* stage) {
        const u32 at = (u32)__cvta_generic_to_shared(stage);
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
    __device__ __forceinline__ void settle(const Element*) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    __device__ __forceinline__ void end() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
    static __device__ __forceinline__ void fetch(const TileWork& work, int k, Element* stage) {
        StageA::load(stage, work.a, A_ROWS_M ? work.m0 : k, A_ROWS_M ? k : work.m0);
        StageB::load(stage + StageA::SIZE, work.b, B_ROWS_K ? k : work.n0, B_ROWS_K ? work.n0 : k);
    }

    // Matrix descriptor of an operand at a shared-memory address; DEEP: its rows run along k, as they do by default.
    template <bool DEEP>
    static __device__ __forceinline__ u64 matrix(u32 at, int block) {
        return (u64)((at & 0x3ffff) >> 4) | (u64)(DEEP ? 1 : block * 2 / 16) << 16 | (u64)(1024 / 16) << 32 | 1ull << 62;
    }
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
#if PRODUCT == TF32X3
template <class S, bool A_ROWS_M, bool B_ROWS_K>
struct MainLoopOf<true, S, A_ROWS_M, B_ROWS_K> {
    typedef SplitProduct<S, A_ROWS_M, B_ROWS_K> Type;
};
#endif
template <bool WARPGROUPS, class S, bool A_ROWS_M, bool B_ROWS_K>
using MainLoop = typename MainLoopOf<WARPGROUPS, S, A_ROWS_M, B_ROWS_K>::Type;
