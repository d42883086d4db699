// What comes into the bulk kernel's matrices from outside: rows of the raw store, weights of the flat buffer.
#pragma once
#include "bulk_store.cuh"

__device__ __forceinline__ uint4 pack_chunk(const float (&v)[8]) {
    return make_uint4(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]), pack_pair(v[6], v[7]));
}

template <class T, class Wide>
__device__ __forceinline__ void load_chunk(const T* raw, int column, int features, float (&v)[8]) {
    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low, *factor = ENGINE.input_factor;
    if constexpr (sizeof(T) == 4 && sizeof(Wide) == 4) {
        if (features % 4 == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float4 four = zeros();
                if (column + half * 4 < features) four = *(const float4*)(raw + column + half * 4);
                v[half * 4] = four.x, v[half * 4 + 1] = four.y, v[half * 4 + 2] = four.z, v[half * 4 + 3] = four.w;
            }
            if (high)
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    if (column + k < features) v[k] = standardize(v[k], high, low, factor, column + k);
            return;
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k)
        v[k] = column + k < features ? standardize((Wide)raw_to_float(raw[column + k]), high, low, factor, column + k) : 0.f;
}

__device__ __forceinline__ void load_any(const void* raw, i64 row, int column, int features, float (&v)[8]) {
#define RAW_CASE(code, type, wide) \
    if constexpr (RAW_TYPE == code) load_chunk<type, wide>((const type*)raw + row * features, column, features, v)
    RAW_CASE(RAW_U8, u8, float);
    RAW_CASE(RAW_I8, signed char, float);
    RAW_CASE(RAW_U16, u16, float);
    RAW_CASE(RAW_I16, short, float);
    RAW_CASE(RAW_F16, Half, float);
    RAW_CASE(RAW_F32, float, float);
    RAW_CASE(RAW_U32, u32, double);
    RAW_CASE(RAW_I32, int, double);
    RAW_CASE(RAW_U64, u64, double);
    RAW_CASE(RAW_I64, i64, double);
    RAW_CASE(RAW_F64, double, double);
#undef RAW_CASE
}

// `rows` rows from position `first` on, and zeros to the end of their last pair of tiles, by `warps` warps of the grid.
// `largest` collects the magnitude.
__device__ __forceinline__ void gather_blocked(
    const Raw& raw, i64 first, int rows, const Blocked& to, u32* largest, int warp, int warps) {
    const int features = LAYER(0).fan_in, lane = threadIdx.x & 31;
    const int padded = (rows + 2 * TILE_M - 1) / (2 * TILE_M) * (2 * TILE_M);
    u32 seen = 0;
    for (int r = warp; r < padded; r += warps) {
        const i64 row = r < rows ? raw_row(raw, first + r) : 0;
#pragma unroll 2
        for (int chunk = lane; chunk < to.blocks * 8; chunk += 32) {
            float v[8] = {};
            if (r < rows) load_any(raw.inputs, row, chunk * 8, features, v);
#pragma unroll
            for (int k = 0; k < 8; ++k) seen = max(seen, magnitude_bits(v[k]));
            *(uint4*)to.place(r, chunk * 8) = pack_chunk(v);
        }
    }
    warp_largest(largest, seen);
}

// Copies of all weights for the products, zeros around them.
__device__ __forceinline__ void pack_blocked() {
    const int lane = threadIdx.x & 31, warps = gridDim.x * (blockDim.x >> 5);
    for (int l = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        const Blocked& to = near_matrices[l].weight;
        for (int r = blockIdx.x + gridDim.x * (threadIdx.x >> 5); r < weight_rows(layer); r += warps)
            for (int chunk = lane; chunk < to.blocks * 8; chunk += 32) {
                float v[8];
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    v[k] = has_weights(layer, r, chunk * 8 + k) ? __ldcg(ENGINE.parameters + weight_place(layer, r, chunk * 8 + k)) : 0.f;
                *(uint4*)to.place(r, chunk * 8) = pack_chunk(v);
            }
    }
}
