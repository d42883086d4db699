// The batches to come on their way from the raw store into operands, a step or two ahead, so that nothing waits for it:
// a warp of the grid takes one tile (16 rows, 16 features).
#pragma once
#include "gather.cuh"
#include "resident_products.cuh"

namespace resident {

// What a raw element is, and what the mean is taken from: float64 for types that float32 does not hold.
template <int TYPE>
struct RawOf;
#define RAW(code, type, wide) \
    template <>               \
    struct RawOf<code> {      \
        typedef type Type;    \
        typedef wide Wide;    \
    }
RAW(RAW_U8, u8, float);
RAW(RAW_I8, signed char, float);
RAW(RAW_U16, u16, float);
RAW(RAW_I16, short, float);
RAW(RAW_F16, Half, float);
RAW(RAW_F32, float, float);
RAW(RAW_U32, u32, double);
RAW(RAW_I32, int, double);
RAW(RAW_U64, u64, double);
RAW(RAW_I64, i64, double);
RAW(RAW_F64, double, double);
#undef RAW

// Steps [.., end) of the table; nothing behind them.
__device__ __forceinline__ StepInfo step_info(int s, int end) { return s < end ? ENGINE.steps[s] : StepInfo{0.f, 0, 0}; }

struct Feed {
    typedef RawOf<RAW_TYPE>::Type Type;
    typedef RawOf<RAW_TYPE>::Wide Wide;
    Type v[8];      // of the lane's place in the tile: inputs of the next step
    u32 there;      // which of them exist
    i64 row[2];     // raw rows, of the step after it; -1: none
    int block, tile;

    __device__ __forceinline__ Feed() : v(), there(0) {
        const int unit = warp_id() * BLOCKS + blockIdx.x;
        tile = unit % TILES;
        block = unit / TILES;
    }
    __device__ __forceinline__ bool works() const { return block < DEPTH<0>; }

    __device__ __forceinline__ void pick(const Raw& raw, const StepInfo& info) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row_of(tile) + 8 * half;
            row[half] = works() && r < info.rows ? raw_row(raw, info.first + r) : -1;
        }
    }
    // Place i: row half i / 2 % 2, column pair i / 4, element i % 2 of it.
    __device__ __forceinline__ int input(int i) const { return 16 * block + column() + 8 * (i >> 2) + (i & 1); }
    __device__ __forceinline__ void load(const Raw& raw) {
        there = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const i64 r = row[i >> 1 & 1];
            if (r < 0 || input(i) >= WIDTH<0>) continue;
            v[i] = ((const Type*)raw.inputs)[r * WIDTH<0> + input(i)];
            there |= 1u << i;
        }
    }
    // To the batch `turn` of the ring. Returns whether one is large.
    __device__ __forceinline__ bool store(u8* exchange, int turn) const {
        if (!works()) return false;
        float x[8];
        bool large = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = 0.f;
            if (there >> i & 1)
                x[i] = standardize(
                    (Wide)raw_to_float(v[i]), ENGINE.input_mean_high, ENGINE.input_mean_low, ENGINE.input_factor,
                    input(i));
            large |= exceeds(x[i], LARGE_ACTIVATION);
        }
        __syncwarp();
        const Tile operand = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
        const int at = turn * MATRIX_BYTES<0>;
        store_tile(exchange + FIXED(activation_at(0)) + at, block * TILES + tile, operand);
        store_tile(exchange + FIXED(activation_turned_at(0)) + at, block * TILES + tile, transpose(operand));
        return large;
    }
#if RESIDENT_RANKS > 1
    // This step's part, as it was stored in the last one, to the other ranks: not before it is sure to be needed.
    __device__ __forceinline__ uint4 recall(const u8* exchange, int step) const {
        const int at = step % RING * (MATRIX_BYTES<0> / 16) + (block * TILES + tile) * 32 + lane_id();
        return works() ? __ldcg((const uint4*)(exchange + FIXED(activation_turned_at(0))) + at) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void send_recalled(int step, const uint4& v) const {
        if (works()) send(step, FIXED(sent_activation_at(0)) + 16 * ((block * TILES + tile) * 32 + lane_id()), v);
    }
#endif
};

// What the loss needs of a row, by one thread each, a step ahead as well: weights of all rows, the rest of the group's.
struct Wanted {
    i64 row;  // -1: none
    int own;  // its place in the group

    __device__ __forceinline__ explicit Wanted(int group) : row(-1), own((int)threadIdx.x - group * GROUP_ROWS) {}
    __device__ __forceinline__ void pick(const Raw& raw, const StepInfo& info) {
        row = threadIdx.x < info.rows ? raw_row(raw, info.first + threadIdx.x) : -1;
    }
    // Begins to copy; `copy_wait` and a barrier of the block end it.
    __device__ __forceinline__ void load(const Raw& raw) const {
        if (threadIdx.x < ROWS) {
            const auto copy = [&](int at, const void* from) {
                copy_word_async(dynamic_shared + at, row < 0 ? ENGINE.parameters : from, row >= 0);
            };
            if (raw.weights) copy(WEIGHTS_AT + 4 * threadIdx.x, raw.weights + row);
            else shared<float>(WEIGHTS_AT)[threadIdx.x] = row < 0 ? 0.f : 1.f;
            if (own >= 0 && own < GROUP_ROWS) {
                if (LABELS) copy(LABELS_AT + 4 * own, raw.labels + row);
                else
#pragma unroll
                    for (int c = 0; c < OUTPUTS; ++c)
                        copy(TARGETS_AT + 4 * (own * OUTPUTS + c), raw.targets + row * OUTPUTS + c);
            }
        }
        copy_commit();
    }
};

}  // namespace resident
