// What comes into the bulk kernel's matrices from outside: rows of the raw store, weights of the flat buffer.
#pragma once
#include "bulk_store.cuh"

__device__ __forceinline__ uint4 pack_chunk(const float (&v)[CHUNK_COLUMNS]) {
    uint4 chunk;
    store_quad((Element*)&chunk, make_float4(v[0], v[1], v[2], v[3]));
    if constexpr (CHUNK_COLUMNS == 8) store_quad((Element*)&chunk.z, make_float4(v[4], v[5], v[6], v[7]));
    return chunk;
}

template <class T, class Wide>
__device__ __forceinline__ void load_chunk(const T* raw, int column, int features, float (&v)[CHUNK_COLUMNS]) {
    const float *high = ENGINE.input_mean_high, *low = ENGINE.input_mean_low, *factor = ENGINE.input_factor;
    if constexpr (sizeof(T) == 4 && sizeof(Wide) == 4) {
        if (features % 4 == 0) {
#pragma unroll
            for (int half = 0; half < CHUNK_COLUMNS / 4; ++half) {
                float4 four = zeros();
                if (column + half * 4 < features) four = *(const float4*)(raw + column + half * 4);
                v[half * 4] = four.x, v[half * 4 + 1] = four.y, v[half * 4 + 2] = four.z, v[half * 4 + 3] = four.w;
            }
            if (high)
#pragma unroll
                for (int k = 0; k < CHUNK_COLUMNS; ++k)
                    if (column + k < features) v[k] = standardize(v[k], high, low, factor, column + k);
            return;
        }
    }
#pragma unroll
    for (int k = 0; k < CHUNK_COLUMNS; ++k)
        v[k] = column + k < features ? standardize((Wide)raw_to_float(raw[column + k]), high, low, factor, column + k) : 0.f;
}

__device__ __forceinline__ void load_any(const void* raw, i64 row, int column, int features, float (&v)[CHUNK_COLUMNS]) {
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

// What is read once; the little cache beside the stages is left to others.
__device__ __forceinline__ float4 load_once(const float4* from) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}

// The same for rows that are float32, of whole chunks and not standardized. A warp has the loads of four rows under way
// together.
__device__ __forceinline__ void gather_plain(
    const Raw& raw, i64 first, int rows, const Blocked& to, u32* largest, int warp, int warps) {
    constexpr int AT_ONCE = 4;
    const int features = LAYER(0).fan_in, lane = threadIdx.x & 31;
    const int padded = (rows + 2 * TILE_M - 1) / (2 * TILE_M) * (2 * TILE_M);
    const auto row_of = [&](int r) { return r + lane % AT_ONCE < rows ? (u32)raw_row(raw, first + r + lane % AT_ONCE) : 0; };
    u32 seen = 0, next = row_of(warp * AT_ONCE);
#pragma unroll 1
    for (int r = warp * AT_ONCE; r < padded; r += warps * AT_ONCE) {
        const u32 row = next;
        next = row_of(r + warps * AT_ONCE);
#pragma unroll 1
        for (int chunk = lane; chunk - lane < blocks_over(features) * 8; chunk += 32) {
            float4 v[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float4* from = (const float4*)((const float*)raw.inputs + (i64)__shfl_sync(~0u, row, i) * features) + chunk * 2;
                const bool exists = r + i < rows && chunk * 8 < features;
                v[i][0] = v[i][1] = zeros();
                if (exists) v[i][0] = load_once(from);
                if (exists) v[i][1] = load_once(from + 1);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                seen = max(seen, max(magnitude_bits(v[i][0]), magnitude_bits(v[i][1])));
                uint4 packed;
                store_quad((Element*)&packed.x, v[i][0]);
                store_quad((Element*)&packed.z, v[i][1]);
                if (chunk < blocks_over(features) * 8) *(uint4*)to.place(r + i, chunk * 8) = packed;
            }
        }
    }
    warp_largest(largest, seen);
}

// `rows` rows from position `first` on, and zeros to the end of their last pair of tiles, by `warps` warps of the grid.
// `largest` collects the magnitude. A warp takes whole rows, or for a transpose eight at a time, a sector of that.
__device__ __forceinline__ void gather_blocked(
    const Raw& raw, i64 first, int rows, const Blocked& to, u32* largest, int warp, int warps) {
    if (!TRANSPOSED && RAW_TYPE == RAW_F32 && LAYER(0).fan_in % CHUNK_COLUMNS == 0 && !ENGINE.input_mean_high)
        return gather_plain(raw, first, rows, to, largest, warp, warps);
    constexpr int AT_ONCE = TRANSPOSED ? 8 : 1, LANES_OF_ROW = 32 / AT_ONCE;
    const int features = LAYER(0).fan_in, lane = threadIdx.x & 31;
    const int padded = (rows + 2 * TILE_M - 1) / (2 * TILE_M) * (2 * TILE_M);
    u32 seen = 0;
    for (int r = warp * AT_ONCE + lane / LANES_OF_ROW; r < padded; r += warps * AT_ONCE) {
        const i64 row = r < rows ? raw_row(raw, first + r) : 0;
#pragma unroll 1
        for (int chunk = lane % LANES_OF_ROW; chunk < blocks_over(features) * 8; chunk += LANES_OF_ROW) {
            float v[CHUNK_COLUMNS] = {};
            if (r < rows) load_any(raw.inputs, row, chunk * CHUNK_COLUMNS, features, v);
#pragma unroll
            for (int k = 0; k < CHUNK_COLUMNS; ++k) seen = max(seen, magnitude_bits(v[k]));
            if (!TRANSPOSED) *(uint4*)to.place(r, chunk * CHUNK_COLUMNS) = pack_chunk(v);
            else
#pragma unroll
                for (int k = 0; k < CHUNK_COLUMNS; ++k) *(Element*)to.place(chunk * CHUNK_COLUMNS + k, r) = to_element(v[k]);
        }
    }
    warp_largest(largest, seen);
}

// A copy of all weights of a layer, or of their transpose, with zeros around them; `lanes_of_row` lanes of a warp take a row.
template <class F>
__device__ __forceinline__ void pack_copy(const Blocked& to, int rows, int lanes_of_row, const F& weight) {
    const int lane = threadIdx.x & 31, warps = gridDim.x * (blockDim.x >> 5), rows_at_once = 32 / lanes_of_row;
    for (int r = (blockIdx.x + gridDim.x * (threadIdx.x >> 5)) * rows_at_once + lane / lanes_of_row; r < rows; r += warps * rows_at_once)
        for (int chunk = lane % lanes_of_row; chunk < to.blocks * 8; chunk += lanes_of_row) {
            float v[CHUNK_COLUMNS];
#pragma unroll
            for (int k = 0; k < CHUNK_COLUMNS; ++k) v[k] = weight(r, chunk * CHUNK_COLUMNS + k);
            *(uint4*)to.place(r, chunk * CHUNK_COLUMNS) = pack_chunk(v);
        }
}
__device__ __forceinline__ void pack_blocked() {
    for (int l = 0; l < ENGINE.layers; ++l) {
        const Layer& layer = LAYER(l);
        const auto weight = [&](int r, int c) {
            return has_weights(layer, r, c) ? __ldcg(ENGINE.parameters + weight_place(layer, r, c)) : 0.f;
        };
        pack_copy(near_matrices[l].weight, weight_rows(layer), 32, weight);
#if PRODUCT == TF32  // rows are neighbours in memory: eight of them are a sector
        pack_copy(near_matrices[l].weight_transpose, transpose_rows(layer.fan_out), 4, [&](int r, int c) { return weight(c, r); });
#endif
    }
}
