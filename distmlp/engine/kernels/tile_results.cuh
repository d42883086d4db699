// Where the results of a tile lie, and who takes which of them.
#pragma once
#include "tile_copies.cuh"

#ifndef UPDATE_AHEAD
#define UPDATE_AHEAD 4
#endif

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
    // Where nothing belongs to columns: fours of the first `rows` and `columns` are dealt to all threads. finish(row,
    // column, four results, prepare(row, column), whether it is the thread's own or one too many); the loads that `prepare`
    // makes for a step of them are under way before the first is finished.
    template <class Prepare, class Finish>
    static __device__ __forceinline__ void for_each_quad(
        const float* tile, int rows, int columns, const Prepare& prepare, const Finish& finish) {
        const int across = (columns + 3) / 4, fours = rows * across;
        const float per = 1.f / (float)across;
#pragma unroll 1
        for (int first = threadIdx.x; first < fours; first += UPDATE_AHEAD * THREADS) {
            decltype(prepare(0, 0)) known[UPDATE_AHEAD];
            int at[UPDATE_AHEAD];  // row and column
#pragma unroll
            for (int i = 0; i < UPDATE_AHEAD; ++i) {
                const int four = min(first + i * THREADS, fours - 1), r = (int)(((float)four + 0.5f) * per);
                at[i] = r << 16 | (four - r * across) * 4;
                known[i] = prepare(r, at[i] & 0xffff);
            }
#pragma unroll
            for (int i = 0; i < UPDATE_AHEAD; ++i) {
                const int r = at[i] >> 16, c = at[i] & 0xffff;
                finish(r, c, *(const float4*)(tile + r * STRIDE + c), known[i], first + i * THREADS < fours);
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
