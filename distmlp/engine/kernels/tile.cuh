// One output tile of a matrix product by one block: the main loop.
// Knows nothing of layers. Operands come from row-major matrices in global memory through a ring of shared-memory
// stages; whatever lies outside a matrix counts as zero, so no size needs to be a multiple of anything.
#pragma once
#include "tile_parts.cuh"

// C (m, n) = sum over k of A (m, k) B (k, n). A lies as (m, k) where A_ROWS_M, else as (k, m);
// B lies as (k, n) where B_ROWS_K, else as (n, k).
template <class S, bool A_ROWS_M, bool B_ROWS_K>
struct Product {
    static constexpr int DEEP_PAD = 16 / sizeof(Element);  // rows run along k
    static constexpr int FLAT_PAD = PRODUCT == TF32 || PRODUCT == TF32X3 ? 8 : 16 / (int)sizeof(Element);
    typedef Staged<A_ROWS_M ? S::M : S::K, A_ROWS_M ? S::K : S::M, A_ROWS_M ? DEEP_PAD : FLAT_PAD> StageA;
    typedef Staged<B_ROWS_K ? S::K : S::N, B_ROWS_K ? S::N : S::K, B_ROWS_K ? FLAT_PAD : DEEP_PAD> StageB;
    static constexpr int STAGE = StageA::SIZE + StageB::SIZE;
    static constexpr int M = S::M, N = S::N, DEPTH = S::K, SLICES = S::WK;
    static constexpr int STAGES = S::STAGES, AHEAD = STAGES - 1;  // stages in all, and fetched before they are used
    static constexpr int PIPE_BYTES = STAGE * STAGES * (int)sizeof(Element);
    // Wide results are finished a part of their columns at a time.
    static constexpr int PARTS = N > 144 ? N / 128 : 1;
    typedef OutputTile<M, N / PARTS> Output;
    static constexpr int SLICE_BYTES = M * N * 4 * (SLICES - 1);
    static constexpr int TILE_BYTES = Output::BYTES > SLICE_BYTES ? Output::BYTES : SLICE_BYTES;
    // The output tile lies behind the stages, so that these can be filled while it is in use.
    static constexpr bool APART = true;
    static constexpr int TILE_AT = PIPE_BYTES, SHARED_BYTES = PIPE_BYTES + TILE_BYTES;

    static constexpr int WARP_M = S::M / S::WM, WARP_N = S::N / S::WN;
#if PRODUCT == FMA
    // A warp is 4 × 8 lanes of TM × TN results.
    static constexpr int TM = WARP_M / 4, TN = WARP_N / 8, PAIRS = TM * TN / 2;
    static constexpr int VM = TM < 4 ? TM : 4, VN = TN < 4 ? TN : 4;
    static_assert(TN % 2 == 0 && TM % VM == 0 && TN % VN == 0, "pairs and vectors");
#else
    static constexpr int TM = WARP_M / 16, TN = WARP_N / 8, PAIRS = TM * TN * 2;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "fragments are loaded 16 × 16");
#endif

    float c[PAIRS * 2];
    int lane, warp_m, warp_n, warp_k;

    __device__ __forceinline__ Product() {
        const int warp = threadIdx.x >> 5;
        lane = threadIdx.x & 31;
        warp_n = warp % S::WN;
        warp_m = warp / S::WN % S::WM;
        warp_k = warp / (S::WN * S::WM);
    }

    // Results come in pairs of neighbouring columns: pair p is c[2 p], c[2 p + 1] at (row(p), col(p)), (row(p), col(p) + 1).
    __device__ __forceinline__ int row(int p) const {
#if PRODUCT == FMA
        const int i = p / (TN / 2);
        return warp_m * WARP_M + i / VM * (4 * VM) + (lane >> 3) * VM + i % VM;
#else
        return warp_m * WARP_M + p / (2 * TN) * 16 + (p & 1) * 8 + (lane >> 2);
#endif
    }
    __device__ __forceinline__ int col(int p) const {
#if PRODUCT == FMA
        const int j = p % (TN / 2) * 2;
        if (B_ROWS_K) return warp_n * WARP_N + j / VN * (8 * VN) + (lane & 7) * VN + j % VN;
        return warp_n * WARP_N + j * 8 + (lane & 7) * 2;
#else
        return warp_n * WARP_N + p / 2 % TN * 8 + (lane & 3) * 2;
#endif
    }
    __device__ __forceinline__ bool holds_results() const { return S::WK == 1 || warp_k == 0; }

    // f(part) for every part of the columns, with its results laid out as rows of a tile in shared memory.
    template <class F>
    __device__ __forceinline__ void for_each_part(float* tile, const F& f) {
        add_slices(tile);
        for_each_summed_part(tile, f);
    }
    template <class F>
    __device__ __forceinline__ void for_each_summed_part(float* tile, const F& f) const {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (part) __syncthreads();
            if (holds_results())
#pragma unroll
                for (int p = 0; p < PAIRS; ++p)
                    if (PARTS == 1 || col(p) / Output::N == part)
                        *(float2*)(tile + row(p) * Output::STRIDE + col(p) % Output::N) =
                            make_float2(c[2 * p], c[2 * p + 1]);
            __syncthreads();
            f(part);
        }
    }

    // The main loop, as `for_each_tile` drives it.
    static __device__ __forceinline__ Element* stages(void* shared) { return (Element*)shared; }
    static __device__ __forceinline__ void fetch(const TileWork& work, int k, Element* stage) {
        StageA::load(stage, work.a, A_ROWS_M ? work.m0 : k, A_ROWS_M ? k : work.m0);
        StageB::load(stage + StageA::SIZE, work.b, B_ROWS_K ? k : work.n0, B_ROWS_K ? work.n0 : k);
    }
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < PAIRS * 2; ++i) c[i] = 0.f;
    }
    static __device__ __forceinline__ void arrived() {}             // before the barrier that opens a stage to all
    __device__ __forceinline__ void start(const Element*) {}        // a stage's product, before the next fetch
    __device__ __forceinline__ void settle(const Element* stage) {  // and behind it
        multiply(stage, stage + StageA::SIZE);
    }
    __device__ __forceinline__ void end() {}  // all products of the tile are in c

    // Warps that split the depth: the first adds the others' sums in order.
    __device__ __forceinline__ void add_slices(float* shared) {
        if (SLICES == 1) return;
        const int thread = threadIdx.x % (S::WM * S::WN * 32);
        constexpr int THREADS_OF_SLICE = S::WM * S::WN * 32;
        if (warp_k > 0)
#pragma unroll
            for (int i = 0; i < PAIRS * 2; ++i)
                shared[((warp_k - 1) * PAIRS * 2 + i) * THREADS_OF_SLICE + thread] = c[i];
        __syncthreads();
        if (warp_k == 0)
#pragma unroll
            for (int w = 0; w < S::WK - 1; ++w)
#pragma unroll
                for (int i = 0; i < PAIRS * 2; ++i) c[i] += shared[(w * PAIRS * 2 + i) * THREADS_OF_SLICE + thread];
        __syncthreads();
    }

    __device__ __forceinline__ void multiply(const Element* a, const Element* b) {
#if PRODUCT == FMA
        multiply_fma(a, b);
#else
        a += A_ROWS_M ? warp_m * WARP_M * StageA::STRIDE : warp_m * WARP_M;
        b += B_ROWS_K ? warp_n * WARP_N : warp_n * WARP_N * StageB::STRIDE;
#if PRODUCT == TF32X3
        float part[PAIRS * 2] = {};
#endif
#pragma unroll
        for (int k = 0; k < S::K / STEP_K / S::WK; ++k) {
            const int k0 = (k * S::WK + warp_k) * STEP_K;
            u32 fa[TM][4], fb[TN / 2][4];
#pragma unroll
            for (int i = 0; i < TM; ++i) fragment_a(fa[i], a, i * 16, k0);
#pragma unroll
            for (int j = 0; j < TN / 2; ++j) fragment_b(fb[j], b, j * 16, k0);
#if PRODUCT == TF32X3
            u32 la[TM][4], lb[TN / 2][4];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int q = 0; q < 4; ++q) split_tf32(fa[i][q], la[i][q]);
#pragma unroll
            for (int j = 0; j < TN / 2; ++j)
#pragma unroll
                for (int q = 0; q < 4; ++q) split_tf32(fb[j][q], lb[j][q]);
#endif
#if PRODUCT == TF32X3  // so that no product waits for the one before
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j)
                    mma_tf32(part + (i * TN + j) * 4, la[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j)
                    mma_tf32(part + (i * TN + j) * 4, fa[i], lb[j / 2][j % 2 * 2], lb[j / 2][j % 2 * 2 + 1]);
#endif
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
#if PRODUCT == TF32X3
                    float* where = part + (i * TN + j) * 4;
#else
                    float* where = c + (i * TN + j) * 4;
#endif
#if PRODUCT == BF16
                    mma_bf16(where, fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
#else
                    mma_tf32(where, fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
#endif
                }
        }
#if PRODUCT == TF32X3
#pragma unroll
        for (int i = 0; i < PAIRS * 2; ++i) c[i] += part[i];
#endif
#endif
    }

#if PRODUCT == BF16
    // 16 (m) × 16 (k) of A, and 16 (k) × 16 (n) of B as two 8-column fragments, in the registers mma.m16n8k16 wants.
    __device__ __forceinline__ void fragment_a(u32 (&f)[4], const Element* a, int m, int k) const {
        if (A_ROWS_M) load_matrices(f, a + (m + (lane & 15)) * StageA::STRIDE + k + (lane >> 4) * 8);
        else load_matrices_transposed(
            f, a + (k + (lane & 7) + (lane >> 4) * 8) * StageA::STRIDE + m + (lane >> 3 & 1) * 8);
    }
    __device__ __forceinline__ void fragment_b(u32 (&f)[4], const Element* b, int n, int k) const {
        if (B_ROWS_K) load_matrices_transposed(f, b + (k + (lane & 15)) * StageB::STRIDE + n + (lane >> 4) * 8);
        else load_matrices(f, b + (n + (lane & 7) + (lane >> 4) * 8) * StageB::STRIDE + k + (lane >> 3 & 1) * 8);
    }
#elif PRODUCT != FMA
    // 16 (m) × 8 (k) of A, and 8 (k) × 16 (n) of B. An 8 × 8 matrix of 2-byte elements is one of 8 × 4 floats.
    __device__ __forceinline__ void fragment_a(u32 (&f)[4], const Element* a, int m, int k) const {
        if (A_ROWS_M) {
            load_matrices(f, a + (m + (lane & 15)) * StageA::STRIDE + k + (lane >> 4) * 4);
        } else {
            const Element* at = a + (k + (lane & 3)) * StageA::STRIDE + m + (lane >> 2);
            f[0] = __float_as_uint(at[0]);
            f[1] = __float_as_uint(at[8]);
            f[2] = __float_as_uint(at[4 * StageA::STRIDE]);
            f[3] = __float_as_uint(at[4 * StageA::STRIDE + 8]);
        }
    }
    __device__ __forceinline__ void fragment_b(u32 (&f)[4], const Element* b, int n, int k) const {
        if (B_ROWS_K) {
            const Element* at = b + (k + (lane & 3)) * StageB::STRIDE + n + (lane >> 2);
            f[0] = __float_as_uint(at[0]);
            f[1] = __float_as_uint(at[4 * StageB::STRIDE]);
            f[2] = __float_as_uint(at[8]);
            f[3] = __float_as_uint(at[4 * StageB::STRIDE + 8]);
        } else {
            load_matrices(f, b + (n + (lane & 7) + (lane >> 4) * 8) * StageB::STRIDE + k + (lane >> 3 & 1) * 4);
        }
    }
#else
    template <int V>
    static __device__ __forceinline__ void load_vector(float (&to)[V], const float* from) {
        if constexpr (V == 4) {
            const float4 v = *(const float4*)from;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        } else if constexpr (V == 2) {
            const float2 v = *(const float2*)from;
            to[0] = v.x, to[1] = v.y;
        } else {
            to[0] = *from;
        }
    }
    __device__ __forceinline__ void multiply_fma(const float* a, const float* b) {
#pragma unroll
        for (int k = 0; k < S::K / 4 / S::WK; ++k) {
            const int k0 = (k * S::WK + warp_k) * 4;
            float fa[4][TM], fb[4][TN];
#pragma unroll
            for (int i = 0; i < TM; i += A_ROWS_M ? 1 : VM) {
                const int m = row(i * (TN / 2));
                if (A_ROWS_M) {
                    const float4 v = *(const float4*)(a + m * StageA::STRIDE + k0);
                    fa[0][i] = v.x, fa[1][i] = v.y, fa[2][i] = v.z, fa[3][i] = v.w;
                } else {
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        float v[VM];
                        load_vector<VM>(v, a + (k0 + q) * StageA::STRIDE + m);
#pragma unroll
                        for (int e = 0; e < VM; ++e) fa[q][i + e] = v[e];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < TN; j += B_ROWS_K ? VN : 1) {
                const int n = col(j / 2) + (B_ROWS_K ? 0 : j % 2);
                if (B_ROWS_K) {
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        float v[VN];
                        load_vector<VN>(v, b + (k0 + q) * StageB::STRIDE + n);
#pragma unroll
                        for (int e = 0; e < VN; ++e) fb[q][j + e] = v[e];
                    }
                } else {
                    const float4 v = *(const float4*)(b + n * StageB::STRIDE + k0);
                    fb[0][j] = v.x, fb[1][j] = v.y, fb[2][j] = v.z, fb[3][j] = v.w;
                }
            }
#pragma unroll
            for (int q = 0; q < 4; ++q)
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) c[i * TN + j] = fmaf(fa[q][i], fb[q][j], c[i * TN + j]);
        }
    }
#endif
};

// Computes this block's tiles one after another: work(i, tile) describes the i-th, false behind the last;
// begin(i, tile) may ask for what finishing needs while the product runs; finish(i, tile, product) takes its results.
// Where the output tile lies apart from the stages, those of later tiles are fetched while a tile is finished.
template <class P, class Work, class Begin, class Finish>
__device__ __forceinline__ void for_each_tile(
    void* shared, const Work& work, const Begin& begin, const Finish& finish) {
    Element* stages = P::stages(shared);
    TileWork ahead, tile;
    int next = 0, next_step = 0, fill = 0, use = 0;
    bool more = work(0, ahead);
    const auto fetch = [&] {
        if (more && next_step < ahead.steps) P::fetch(ahead, ahead.k + next_step++ * P::DEPTH, stages + fill * P::STAGE);
        copy_commit();
        fill = fill + 1 == P::STAGES ? 0 : fill + 1;
    };
    const auto advance = [&](int i) {  // to the tile whose next stage is to be fetched
        while (more && next_step == ahead.steps && (P::APART || next < i)) {
            next_step = 0;
            more = work(++next, ahead);
        }
    };
#pragma unroll 1
    for (int i = 0; work(i, tile); ++i) {
        if (i == 0 || !P::APART) {
            fill = use = 0;
#pragma unroll 1
            for (int s = 0; s < P::AHEAD; ++s) {
                advance(i);
                fetch();
            }
        }
        P product;
        product.begin();
        begin(i, tile);
        advance(i);
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            copy_wait<P::AHEAD - 1>();
            P::arrived();
            __syncthreads();
            const Element* stage = stages + use * P::STAGE;
            product.start(stage);
            fetch();
            product.settle(stage);
            advance(i);
            use = use + 1 == P::STAGES ? 0 : use + 1;
        }
        product.end();
        if (!P::APART) copy_wait<0>();
        if (!P::APART || !tile.steps) __syncthreads();  // all are done with the stages, or with the last results
        finish(i, tile, product);
        if (!P::APART) __syncthreads();
    }
    copy_wait<0>();
    __syncthreads();
}
