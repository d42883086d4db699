// How operands of a tile come into shared memory: pieces of 16 bytes of row-major matrices, by all threads of a block.
#pragma once
#include "mma.cuh"

#define THREADS 256

// A row-major matrix: element (r, c) at base[r * ld + c]; ld and cols are multiples of 16 bytes.
struct View {
    const Element* base;
    i64 ld;
    int rows, cols;
};

// A thread's share of the copies of ROWS × CHUNKS pieces of 16 bytes, for one stage after another: what they have in
// common is worked out once a tile. K_ROWS: the depth runs along rows.
template <int ROWS, int CHUNKS, bool K_ROWS, int DEPTH>
struct Copies {
    static constexpr int CHUNK = 16 / sizeof(Element), PASS = THREADS / CHUNKS;  // elements; rows at a time
    static_assert(THREADS % CHUNKS == 0, "threads share the rows out evenly");
    const u8* source;
    u32 row_bytes;
    int rows, cols;  // that there are from the thread's first element on, may be negative

    static __device__ __forceinline__ int row() { return threadIdx.x / CHUNKS; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % CHUNKS; }

    __device__ __forceinline__ void begin(const View& from, int r, int c) {
        r += row(), c += chunk() * CHUNK;
        source = (const u8*)(from.base + r * from.ld + c);
        rows = from.rows - r, cols = from.cols - c;
        row_bytes = (u32)from.ld * (u32)sizeof(Element);
    }
    // place(r): address in shared memory of the thread's piece r rows below its first one.
    template <class Place>
    __device__ __forceinline__ void copy(const Place& place) const {
        const bool inside = cols > 0;
        const u8* from = source;
#pragma unroll
        for (int r = 0; r < ROWS; r += PASS) {
            if (ROWS % PASS == 0 || r + row() < ROWS) copy_async(place(r), from, inside && r < rows);
            from += PASS * row_bytes;
        }
    }
    __device__ __forceinline__ void next() {
        source += DEPTH * (K_ROWS ? row_bytes : (u32)sizeof(Element));
        (K_ROWS ? rows : cols) -= DEPTH;
    }
};

// A tile of ROWS × COLS elements in shared memory; the padding keeps fragment loads free of bank conflicts.
template <int ROWS, int COLS, int PAD>
struct Staged {
    static constexpr int STRIDE = COLS + PAD, SIZE = ROWS * STRIDE;
    static constexpr int CHUNK = 16 / sizeof(Element);

    template <bool K_ROWS, int DEPTH>
    struct Cursor {
        typedef Copies<ROWS, COLS / CHUNK, K_ROWS, DEPTH> All;
        All all;

        __device__ __forceinline__ void begin(const View& from, int r, int c) { all.begin(from, r, c); }
        __device__ __forceinline__ void copy(u32 tile) const {
            const u32 own = tile + (All::row() * STRIDE + All::chunk() * CHUNK) * (int)sizeof(Element);
            all.copy([=](int r) { return own + r * STRIDE * (int)sizeof(Element); });
        }
        __device__ __forceinline__ void next() { all.next(); }
    };
};

// A tile to compute: its operands, its place in the result, the depth it begins at and the stages it takes.
struct TileWork {
    View a, b;
    int m0, n0, k, steps;
};

// Where a thread stands in the copies of a tile's stages.
template <class StageA, class StageB, bool A_ROWS_M, bool B_ROWS_K, int DEPTH>
struct Operands {
    typename StageA::template Cursor<!A_ROWS_M, DEPTH> a;
    typename StageB::template Cursor<B_ROWS_K, DEPTH> b;

    __device__ __forceinline__ void begin(const TileWork& w) {
        a.begin(w.a, A_ROWS_M ? w.m0 : w.k, A_ROWS_M ? w.k : w.m0);
        b.begin(w.b, B_ROWS_K ? w.k : w.n0, B_ROWS_K ? w.n0 : w.k);
    }
    __device__ __forceinline__ void copy_a(u32 stage) const { a.copy(stage); }
    __device__ __forceinline__ void copy_b(u32 stage) const { b.copy(stage + StageA::SIZE * (int)sizeof(Element)); }
    __device__ __forceinline__ void next() {
        a.next();
        b.next();
    }
};
