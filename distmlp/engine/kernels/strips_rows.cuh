// Rows of the raw store for the strips kernel: which ones a block has, and on their way to shared memory.
#pragma once
#include "gather.cuh"
#include "strips_products.cuh"

extern __shared__ __align__(128) unsigned char dynamic_shared[];

namespace strips {

#define RAW_ELEMENT(code, of_type, of_wide) \
    template <>                             \
    struct RawElement<code> {               \
        typedef of_type type;               \
        typedef of_wide wide;               \
    }
template <int CODE>
struct RawElement;  // `wide`: what the mean is taken from
RAW_ELEMENT(RAW_U8, u8, float);
RAW_ELEMENT(RAW_I8, signed char, float);
RAW_ELEMENT(RAW_U16, u16, float);
RAW_ELEMENT(RAW_I16, short, float);
RAW_ELEMENT(RAW_F16, Half, float);
RAW_ELEMENT(RAW_F32, float, float);
RAW_ELEMENT(RAW_U32, u32, double);
RAW_ELEMENT(RAW_I32, int, double);
RAW_ELEMENT(RAW_U64, u64, double);
RAW_ELEMENT(RAW_I64, i64, double);
RAW_ELEMENT(RAW_F64, double, double);
#undef RAW_ELEMENT

constexpr int GRAIN = larger(PIECE, STAGE_ROWS);  // rows that a strip is filled up to

// The rows of a strip: sixteen neighbours of the batch to a block, in turn over the blocks.
struct Share {
    int strip, rows;  // rows: filled up to GRAIN with some that are not there

    __device__ __forceinline__ static int strips(int batch_rows) {
        const int tiles = (batch_rows + 15) / 16, own = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        return (own + STRIP_ROWS / 16 - 1) / (STRIP_ROWS / 16);
    }
    __device__ __forceinline__ Share(int strip, int batch_rows) : strip(strip) {
        const int tiles = (batch_rows + 15) / 16, own = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        rows = min(STRIP_ROWS, (16 * own - strip * STRIP_ROWS + GRAIN - 1) / GRAIN * GRAIN);
    }
    // Position in the batch of the strip's row `r`.
    __device__ __forceinline__ int position(int r) const {
        return ((strip * (STRIP_ROWS / 16) + (r >> 4)) * (int)gridDim.x + (int)blockIdx.x) * 16 + (r & 15);
    }
};

__device__ __forceinline__ i64* row_numbers() { return (i64*)(dynamic_shared + INDEX_AT); }  // -1: not there

// Numbers of the strip's rows. The block synchronises behind it.
__device__ __forceinline__ void find_rows(const Raw& raw, const StepInfo& info, const Share& share) {
    for (int r = threadIdx.x; r < share.rows; r += BLOCK_THREADS) {
        const int at = share.position(r);
        row_numbers()[r] = at < info.rows ? raw_row(raw, info.first + at) : -1;
    }
}

__device__ __forceinline__ void prefetch(const void* from, int bytes) {
    for (int i = 0; i < bytes; i += 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)from + i));
}
// Rows of a strip to come, on their way to L2.
__device__ __forceinline__ void prefetch_rows(const Raw& raw, const StepInfo& info, int strip) {
    constexpr int INPUTS = width(0) * sizeof(RawElement<RAW_TYPE>::type), TARGETS = width(LAYERS) * 4;
    const Share share(strip, info.rows);
    for (int r = threadIdx.x; r < share.rows && share.position(r) < info.rows; r += BLOCK_THREADS) {
        const i64 row = raw_row(raw, info.first + share.position(r));
        prefetch((const u8*)raw.inputs + row * INPUTS, INPUTS);
        if (!LABELS) prefetch(raw.targets + row * width(LAYERS), TARGETS);
    }
}

// Inputs of the strip, four columns a thread and turn: to shared memory, and to where they are met again on the way down.
__device__ __forceinline__ void gather(const Raw& raw, const Share& share, float* kept) {
    typedef RawElement<RAW_TYPE>::type T;
    typedef RawElement<RAW_TYPE>::wide Wide;
    constexpr bool WHOLE = RAW_TYPE == RAW_F32 && width(0) % 4 == 0;
    constexpr int VECTORS = padded(0) / 4, TURNS = WHOLE ? 8 : 2;  // so many are under way
    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low, *factor = ENGINE.input_factor;
    for (int first = threadIdx.x; first < share.rows * VECTORS; first += TURNS * BLOCK_THREADS) {
        T x[TURNS][4];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int u = first + i * BLOCK_THREADS, r = u / VECTORS, c = u % VECTORS * 4;
            const i64 row = u < share.rows * VECTORS ? row_numbers()[r] : -1;
            const T* from = (const T*)raw.inputs + row * width(0) + c;
            if constexpr (WHOLE) {
                const float4 v = row >= 0 && c < width(0) ? *(const float4*)from : make_float4(0.f, 0.f, 0.f, 0.f);
                x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) x[i][k] = row >= 0 && c + k < width(0) ? from[k] : T{};
            }
        }
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int u = first + i * BLOCK_THREADS, r = u / VECTORS, c = u % VECTORS * 4;
            if (u >= share.rows * VECTORS) break;
            const bool there = row_numbers()[r] >= 0;
            float y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                y[k] = there && c + k < width(0)
                           ? to_element(standardize((Wide)raw_to_float(x[i][k]), high, low, factor, c + k))
                           : 0.f;
            const float4 v = make_float4(y[0], y[1], y[2], y[3]);
            *(float4*)(dynamic_shared + r * row_bytes(0) + 4 * c) = v;
            if (!KEEPS) *(float4*)(kept + kept_at(0) + (i64)r * padded(0) + c) = v;
        }
    }
}

// Both. What lay in the strip's place has been used by the whole block.
__device__ __noinline__ void take_rows(const Raw& raw, const StepInfo& info, int strip, float* kept) {
    const Share share(strip, info.rows);
    find_rows(raw, info, share);
    __syncthreads();
    gather(raw, share, kept);
}

}  // namespace strips
