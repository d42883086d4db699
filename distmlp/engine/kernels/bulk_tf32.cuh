// How results leave the registers of `wgmma`, in tf32: to transposes, straight from the registers. The eight lanes of a column
// fill a sector.
#pragma once

struct Pair {  // two neighbours of a row, as bits
    u32 low, high;
};
__device__ __forceinline__ Pair operator&(Pair pair, u32 mask) { return {pair.low & mask, pair.high & mask}; }
__device__ __forceinline__ Pair pack_pair(float low, float high) {
    return {__float_as_uint(to_element(low)), __float_as_uint(to_element(high))};
}
__device__ __forceinline__ float low_of(Pair pair) { return __uint_as_float(pair.low); }
__device__ __forceinline__ float high_of(Pair pair) { return __uint_as_float(pair.high); }

__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
// Two outputs of ReLU; NaN goes through. None is negative, so integers round them: the unsigned minimum keeps NaN.
__device__ __forceinline__ Pair pack_relu(float low, float high) {
    const auto round = [](float x) { return min(__float_as_uint(larger_or_nan(x, 0.f)) + 0x1000u, 0x7fffffffu) & 0xffffe000u; };
    return {round(low), round(high)};
}

constexpr bool SENDS = false;
constexpr u32 PLACE_BYTES = 0;
// A warp's way out to memory: 16 rows of a block of columns.
struct Writer {
    u32 staging;
    u32 own;  // place of this lane's first element among the 32 rows that are a block of the transpose

    __device__ __forceinline__ explicit Writer(Ring& ring) : staging(staging_of_warp(ring.base)) {
        const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 1) * 16 + (lane >> 2), column = (lane & 3) * 2;
        own = column * 128 + ((row / CHUNK_COLUMNS ^ column) & 7) * 16 + row % CHUNK_COLUMNS * 4;
    }
    __device__ __forceinline__ u32 spare() const { return staging; }
    // Of element `e` of pair i of what lies at `block`. Pairs 2 * j and 2 * j + 1 are group j of the two rows.
    __device__ __forceinline__ u32* place(u8* block, int i, int e) const {
        return (u32*)(block + (own ^ (i % 2 * 32 + e * 16)) + (i / 2 * 1024 + e * 128));
    }
    // From row `row0` and block of columns `block` on.
    __device__ __forceinline__ void put(const Pair (&packed)[PAIRS_OF_BLOCK], const Blocked& to, int row0, int block) const {
        u8* at = to.at(block * COLUMNS, row0 / COLUMNS);
#pragma unroll
        for (int i = 0; i < PAIRS_OF_BLOCK; ++i) {
            __stcg(place(at, i, 0), packed[i].low);
            __stcg(place(at, i, 1), packed[i].high);
        }
    }
};

// The largest magnitude, NaN above all.
struct Largest {
    float low = 0.f, high = 0.f;

    __device__ __forceinline__ void see(Pair packed) {
        low = larger_or_nan(low, fabsf(low_of(packed)));
        high = larger_or_nan(high, fabsf(high_of(packed)));
    }
    __device__ __forceinline__ u32 bits() const { return magnitude_bits(larger_or_nan(low, high)); }
};

// Bits that say which outputs of two blocks are positive: those of pair i of 16 are i and 16 + i.
__device__ __forceinline__ u32 add_signs(u32 signs, Pair packed, int i) {
    return signs | ((int)packed.low > 0 ? 1u << i : 0u) | ((int)packed.high > 0 ? 0x10000u << i : 0u);
}
// What of pair i belongs to positive outputs.
__device__ __forceinline__ Pair keep_positive(Pair packed, u32 signs, int i) {
    return {signs & 1u << i ? packed.low : 0u, signs & 0x10000u << i ? packed.high : 0u};
}

// Sums over the 16 rows of a warp of eight columns of each lane, a lane gets one of them: lanes of a column exchange halves of
// what they have.
__device__ __forceinline__ float sum_rows(const Pair (&packed)[PAIRS_OF_BLOCK]) {
    const int lane = threadIdx.x & 31;
    float sums[PAIRS_OF_BLOCK];
#pragma unroll
    for (int j = 0; j < PAIRS_OF_BLOCK / 2; ++j) {
        sums[2 * j] = low_of(packed[2 * j]) + low_of(packed[2 * j + 1]);
        sums[2 * j + 1] = high_of(packed[2 * j]) + high_of(packed[2 * j + 1]);
    }
#pragma unroll
    for (int half = PAIRS_OF_BLOCK / 2; half; half /= 2) {
        const bool upper = lane & half * 4;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float other = __shfl_xor_sync(~0u, upper ? sums[i] : sums[i + half], half * 4);
            sums[i] = (upper ? sums[i + half] : sums[i]) + other;
        }
    }
    return sums[0];
}

// Where the sums of the columns of a tile's errors over the warp's rows go.
struct ColumnSums {
    float* to;

    __device__ __forceinline__ explicit ColumnSums(float* sums) {
        const int lane = threadIdx.x & 31, column = (lane >> 2) / 2 * 8 + (lane & 3) * 2 + (lane >> 2) % 2;
        to = sums + column;
    }
};

// A block of outputs; behind the last one `beside` stores what is read together with the tile.
template <class F>
__device__ __forceinline__ void put_outputs(
    const Writer& writer, const Pair (&packed)[PAIRS_OF_BLOCK], const Blocked& to, int row0, int block, bool last, const F& beside) {
    writer.put(packed, to, row0, block);
    if (last) beside();
}
// A block of errors, and the sums of its columns over the warp's rows.
__device__ __forceinline__ void put_errors(
    const Writer& writer, const Pair (&packed)[PAIRS_OF_BLOCK], const Blocked& to, int row0, int block, const ColumnSums& sums, int number) {
    writer.put(packed, to, row0, block);
    __stcg(sums.to + number * COLUMNS, sum_rows(packed));
}

// Slopes of a block of hidden outputs, where they are not told by signs: from the outputs, or from where the errors
// will lie. Loaded a block ahead.
struct StoredSlopes {
    const Blocked& known;
    int row0, block0;
    Pair next[PAIRS_OF_BLOCK], now[PAIRS_OF_BLOCK];

    __device__ __forceinline__ void load(const Writer& writer, int block) {
        u8* at = known.at((block0 + block) * COLUMNS, row0 / COLUMNS);
#pragma unroll
        for (int i = 0; i < PAIRS_OF_BLOCK; ++i)
            next[i] = {__ldcg(writer.place(at, i, 0)), __ldcg(writer.place(at, i, 1))};
    }
    __device__ __forceinline__ void take(const Writer&) {
#pragma unroll
        for (int i = 0; i < PAIRS_OF_BLOCK; ++i) now[i] = next[i];
    }
    // Of pairs 4 * four to 4 * four + 3 of the block taken last.
    __device__ __forceinline__ void get(const Writer&, int four, Pair (&slopes)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) slopes[k] = now[four * 4 + k];
    }
};

// The copies of weight (r, c), or of it and its three neighbours.
__device__ __forceinline__ void copy_weight(const Matrices& m, int r, int c, float value) {
    *(Element*)m.weight.place(r, c) = *(Element*)m.weight_transpose.place(c, r) = to_element(value);
}
__device__ __forceinline__ void copy_weights(const Matrices& m, int r, int c, const float4& values) {
    store_quad((Element*)m.weight.place(r, c), values);
#pragma unroll
    for (int k = 0; k < 4; ++k) *(Element*)m.weight_transpose.place(c + k, r) = to_element(part(values, k));
}
// As the second operand of a forward product, from column `column` on.
__device__ __forceinline__ Source weight_columns(const Matrices& m, int column) { return rows_of(m.weight_transpose, column); }
