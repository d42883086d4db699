// What main loops of tiles share: shapes, operands, the results of a tile in shared memory.
#pragma once
#include "mma.cuh"

#define THREADS 256
#if PRODUCT == BF16
#define STEP_K 16  // depth of one tensor-core product
#elif PRODUCT != FMA
#define STEP_K 8
#else
#define STEP_K 4
#endif

extern __shared__ __align__(1024) u8 dynamic_shared[];

// M × N output, K_ deep stages; the warps are arranged WM × WN over the tile, WK of them share a part of it and split
// the depth.
template <int M_, int N_, int K_, int WM_, int WN_, int WK_, int STAGES_>
struct Shape {
    static constexpr int M = M_, N = N_, K = K_, WM = WM_, WN = WN_, WK = WK_, STAGES = STAGES_;
    static_assert(WM * WN * WK * 32 == THREADS, "the warps make a block");
};

// A row-major matrix: element (r, c) at base[r * ld + c]; ld and cols are multiples of 16 bytes.
struct View {
    const Element* base;
    i64 ld;
    int rows, cols;
};

// A tile of ROWS × COLS elements in shared memory; the padding keeps fragment loads free of bank conflicts.
template <int ROWS, int COLS, int PAD>
struct Staged {
    static constexpr int STRIDE = COLS + PAD, SIZE = ROWS * STRIDE;
    static constexpr int CHUNK = 16 / sizeof(Element), CHUNKS = COLS / CHUNK, PASS = THREADS / CHUNKS;

    static __device__ __forceinline__ void load(Element* tile, const View& from, int row, int col) {
        static_assert(COLS % CHUNK == 0, "whole chunks");
        if constexpr (THREADS % CHUNKS != 0) {
#pragma unroll
            for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
                const int at = i + threadIdx.x, r = at / CHUNKS, c = at % CHUNKS * CHUNK;
                if ((ROWS * CHUNKS) % THREADS == 0 || at < ROWS * CHUNKS)
                    copy_async(
                        tile + r * STRIDE + c, from.base + (i64)(row + r) * from.ld + (col + c),
                        row + r < from.rows && col + c < from.cols);
            }
            return;
        }
        const int c = threadIdx.x % CHUNKS * CHUNK;
        const bool inside = col + c < from.cols;
        const int first = threadIdx.x / CHUNKS;
        const Element* source = from.base + (i64)(row + first) * from.ld + (col + c);
#pragma unroll
        for (int r = 0; r < ROWS; r += PASS) {
            if (ROWS % PASS == 0 || r + first < ROWS)
                copy_async(tile + (r + first) * STRIDE + c, source, inside && row + r + first < from.rows);
            source += (i64)PASS * from.ld;
        }
    }
};

// The results of a tile in shared memory, whatever main loop they came from. A thread keeps to four neighbouring
// columns, so that what belongs to columns stays in its registers; a warp reads and writes whole rows.
template <int M_, int N_>
struct OutputTile {
    static constexpr int M = M_, N = N_, STRIDE = N + 8, BYTES = M * STRIDE * 4;
    static constexpr int QUADS = N / 4;
    static constexpr int SHARE = THREADS % QUADS ? 4 : THREADS / QUADS;
    static constexpr int PASS = SHARE < M ? SHARE : M;  // rows at a time
    static_assert(PASS * QUADS <= THREADS && M % PASS == 0, "threads share the rows out evenly");

    static __device__ __forceinline__ int column() { return threadIdx.x % QUADS * 4; }
    static __device__ __forceinline__ bool has_rows() { return threadIdx.x < PASS * QUADS; }

    // finish(row in tile, four results, prepare(row in tile)); the loads that `prepare` makes for AHEAD rows are
    // under way before the first of them is finished.
    template <int AHEAD, class Prepare, class Finish>
    static __device__ __forceinline__ void for_each_row(const float* tile, const Prepare& prepare, const Finish& finish) {
        constexpr int ROWS = M / PASS, STEP = ROWS < AHEAD ? ROWS : AHEAD;
        static_assert(ROWS % STEP == 0, "whole steps");
        if (!has_rows()) return;
        const float* own = tile + threadIdx.x / QUADS * STRIDE + column();
        int r = threadIdx.x / QUADS;
#pragma unroll 1
        for (int step = 0; step < ROWS / STEP; ++step) {
            decltype(prepare(0)) known[STEP];
#pragma unroll
            for (int i = 0; i < STEP; ++i) known[i] = prepare(r + i * PASS);
#pragma unroll
            for (int i = 0; i < STEP; ++i) finish(r + i * PASS, *(const float4*)(own + i * PASS * STRIDE), known[i]);
            r += STEP * PASS;
            own += STEP * PASS * STRIDE;
        }
    }
    // Where nothing belongs to columns: quads are dealt to all threads. finish(row, column, four results, prepare(row,
    // column)); the loads that `prepare` makes for a step of quads are under way before the first is finished.
    template <class Prepare, class Finish>
    static __device__ __forceinline__ void for_each_quad(const float* tile, const Prepare& prepare, const Finish& finish) {
        constexpr int ITEMS = (M * QUADS + THREADS - 1) / THREADS;
        constexpr int STEP = ITEMS % 4 == 0 ? 4 : ITEMS % 3 == 0 ? 3 : 1;
#pragma unroll 1
        for (int first = threadIdx.x; first < ITEMS * THREADS; first += STEP * THREADS) {
            decltype(prepare(0, 0)) known[STEP];
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int item = first + i * THREADS;
                if (M * QUADS % THREADS == 0 || item < M * QUADS) known[i] = prepare(item / QUADS, item % QUADS * 4);
            }
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                const int item = first + i * THREADS, r = item / QUADS, c = item % QUADS * 4;
                if (M * QUADS % THREADS == 0 || item < M * QUADS)
                    finish(r, c, *(const float4*)(tile + r * STRIDE + c), known[i]);
            }
        }
    }

    template <class Finish>
    static __device__ __forceinline__ void for_each_row(const float* tile, const Finish& finish) {
        constexpr int AHEAD = M / PASS % 4 == 0 ? 4 : 1;
        for_each_row<AHEAD>(tile, [](int) { return 0; }, [&](int r, const float4& v, int) { finish(r, v); });
    }

    // Adds up every thread's sums of its four columns in a fixed order and writes the first `cols` to `out`. The tile
    // is used up. All threads call it.
    static __device__ __forceinline__ void column_sums(float* tile, const float4& own, float* out, int cols) {
        __syncthreads();
        if (has_rows()) *(float4*)(tile + threadIdx.x / QUADS * N + column()) = own;
        __syncthreads();
        for (int n = threadIdx.x; n < N && n < cols; n += THREADS) {
            float sum = 0.f;
#pragma unroll
            for (int g = 0; g < PASS; ++g) sum += tile[g * N + n];
            out[n] = sum;
        }
        __syncthreads();
    }
};

// A tile to compute: its operands, its place in the result, the depth it begins at and the stages it takes.
struct TileWork {
    View a, b;
    int m0, n0, k, steps;
};
