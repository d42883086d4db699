// A block's own parameters: from the flat buffers and back, their gradients, their update.
#pragma once
#include "resident_products.cuh"
#include "update.cuh"

namespace resident {

// Flat buffer of state number `i`.
__device__ __forceinline__ float* flat_buffer(int i) {
    return i == 0                          ? ENGINE.parameters
           : has_first_slot() && i == FIRST ? ENGINE.first_slot
           : has_second_slot() && i == SECOND ? ENGINE.second_slot
                                            : ENGINE.ema;
}

struct States {
    float v[STATES];
    __device__ __forceinline__ void update(const Hyper& h, float sum) {
        float none = 0.f;
        v[0] = update_rule(h, v[0], sum, has_first_slot() ? v[FIRST] : none, has_second_slot() ? v[SECOND] : none);
        if (RESIDENT_MEAN) v[STATES - 1] = average(h.ema_decay, v[STATES - 1], v[0]);
    }
};

__device__ __forceinline__ float& component(float4& v, int e) { return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w; }

// Weights of layer L to the buffers that other blocks multiply backward with.
template <int L>
__device__ __forceinline__ void publish_weights(u8* exchange, int turn, int block, const float4& w) {
    if constexpr (L > 0) {
        u32* to = (u32*)(exchange + FIXED(backward_at(L, 0)) + turn * FIXED(backward_bytes(L))) +
                  (2 * block * 2 * depth(L + 1) + blockIdx.x) * 32 + lane_id();
        __stcg(to, transpose(pack_pair(w.x, w.y)));
        __stcg(to + 2 * depth(L + 1) * 32, transpose(pack_pair(w.z, w.w)));
    }
}

// LOAD: flat buffers to shared memory, else back. Returns whether a weight is large.
template <bool LOAD, int L = 0>
__device__ __forceinline__ bool move_weights(u8* exchange) {
    bool large = false;
    if constexpr (L < HIDDEN) {
        const int out = 8 * blockIdx.x + (lane_id() >> 2);
        for (int block = warp_id(); block < depth(L) && blockIdx.x < groups(L + 1); block += WARPS) {
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
                float4& v = shared<float4>(FIXED(state_at(L)))[(block * STATES + s) * 32 + lane_id()];
                if (LOAD) v = zeros();
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int in = 16 * block + column() + (e & 1) + 8 * (e >> 1);
                    if (in >= width(L) || out >= width(L + 1)) continue;
                    float& flat = flat_buffer(s)[FIXED(flat_weight(L)) + in * width(L + 1) + out];
                    if (LOAD) component(v, e) = flat;
                    else flat = component(v, e);
                }
                if (LOAD && s == 0) {
                    __syncwarp();
                    publish_weights<L>(exchange, 0, block, v);
                    large |= exceeds(v.x, LARGE_WEIGHT) || exceeds(v.y, LARGE_WEIGHT) ||
                             exceeds(v.z, LARGE_WEIGHT) || exceeds(v.w, LARGE_WEIGHT);
                }
            }
        }
        large |= move_weights<LOAD, L + 1>(exchange);
    }
    return large;
}

// Place of the block's parameter `u` of the few in the flat buffers; -1: there is none.
__device__ __forceinline__ int place_of_few(int u) {
    const int first = 8 * blockIdx.x;
    if (u < HIDDEN_BIASES)
        return first + u / OUTPUTS < width(HIDDEN) ? FIXED(flat_weight(HIDDEN)) + first * OUTPUTS + u : -1;
    if (u >= OUTPUT_BIASES) return FIXED(flat_bias(HIDDEN)) + u - OUTPUT_BIASES;
    const int out = first + (u & 7);
    int place = -1;
#pragma unroll
    for (int l = 0; l < HIDDEN; ++l)
        if (u - HIDDEN_BIASES >> 3 == l && out < width(l + 1)) place = flat_bias(l) + out;
    return place;
}

// A weight of the output layer to where every block reads it.
__device__ __forceinline__ void publish_last_weight(u8* exchange, int turn, int u, float value) {
    const int in = u / OUTPUTS, out = u % OUTPUTS;  // lane 4 out + in / 2 of the pairs, in % 2 of the pair
    const int pair = (((blockIdx.x >> 1) * OUTPUT_TILES + out / 8) * 2 + (blockIdx.x & 1)) * 32 + (out & 7) * 4 + in / 2;
    ((Bf16*)(exchange + LAST_WEIGHT_AT + turn * LAST_WEIGHT_BYTES))[2 * pair + (in & 1)] = to_element(value);
}

template <bool LOAD>
__device__ __forceinline__ bool move_few(u8* exchange) {
    bool large = false;
    for (int u = threadIdx.x; u < FEW; u += BLOCK_THREADS) {
        const int place = place_of_few(u);
        for (int s = 0; s < STATES; ++s) {
            float& v = shared<float>(FEW_AT)[s * FEW + u];
            if (LOAD) v = place < 0 ? 0.f : flat_buffer(s)[place];
            else if (place >= 0 && (u < OUTPUT_BIASES || blockIdx.x == 0)) flat_buffer(s)[place] = v;
        }
        const float value = shared<float>(FEW_AT)[u];
        if (LOAD && u < HIDDEN_BIASES && place >= 0) {
            publish_last_weight(exchange, 0, u, value);
            large |= exceeds(value, LARGE_WEIGHT);
        }
    }
    return large;
}

// What an update needs. `limit` not 0: only look whether all gradient sums stay below it.
struct Update {
    const Hyper* hyper;  // but for the scale
    float scale;
    int turn;  // of the published weights that it writes
    float limit;
};

// Gradient of the block's weights of layer L from activation L (transposed), and their update. Returns whether a new
// weight is large, or with a limit a sum is not below it.
template <int L>
__device__ __forceinline__ bool update_weights(const u8* transposed, u8* exchange, const Update& update) {
    constexpr int TURNS = turns(depth(L)), AHEAD = TILES <= 2 ? 16 / TILES : TILES <= 4 ? 2 : 1;  // blocks of inputs
    if (blockIdx.x >= groups(L + 1)) return false;
    Hyper h = *update.hyper;
    h.scale = update.scale;
    bool found = false;
    uint4 b[2][AHEAD][TILES];
    const auto load = [&](int from) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int block = warp_id() + (from + i) * WARPS;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                if (from + i < TURNS && block < depth(L))
                    b[from / AHEAD & 1][i][t] = __ldcg((const uint4*)transposed + (block * TILES + t) * 32 + lane_id());
        }
    };
    load(0);
#pragma unroll
    for (int from = 0; from < TURNS; from += AHEAD) {
        load(from + AHEAD);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int block = warp_id() + (from + i) * WARPS;
            if (from + i >= TURNS || block >= depth(L)) break;
            float4 low = zeros(), high = zeros();
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const u32* delta = shared<u32>(DELTA_AT) + (L * TILES + t) * 64 + lane_id();
                const uint4 a = make_uint4(delta[0], 0u, delta[32], 0u), v = b[from / AHEAD & 1][i][t];
                multiply(low, a, v.x, v.y);
                multiply(high, a, v.z, v.w);
            }
            float4 sum = make_float4(low.x, low.y, high.x, high.y);
            if (update.limit != 0.f) {
                found |= !(fabsf(sum.x) < update.limit && fabsf(sum.y) < update.limit && fabsf(sum.z) < update.limit &&
                           fabsf(sum.w) < update.limit);
                continue;
            }
            float4* state = shared<float4>(FIXED(state_at(L))) + block * STATES * 32 + lane_id();
            float4 v[STATES];
#pragma unroll
            for (int s = 0; s < STATES; ++s) v[s] = state[s * 32];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                States one;
#pragma unroll
                for (int s = 0; s < STATES; ++s) one.v[s] = component(v[s], e);
                one.update(h, component(sum, e));
#pragma unroll
                for (int s = 0; s < STATES; ++s) component(v[s], e) = one.v[s];
                found |= exceeds(one.v[0], LARGE_WEIGHT);
            }
#pragma unroll
            for (int s = 0; s < STATES; ++s) state[s * 32] = v[s];
            publish_weights<L>(exchange, update.turn, block, v[0]);
        }
    }
    return found;
}

// The same for the few: weights and biases of the output layer where `output`, else biases of hidden layers.
__device__ __forceinline__ bool update_few(bool output, u8* exchange, const Update& update) {
    bool found = false;
    Hyper h = *update.hyper;
    h.scale = update.scale;
    const float* error = shared<float>(OUTPUT_AT);
    for (int u = threadIdx.x; u < FEW; u += BLOCK_THREADS) {
        if (output == (u >= HIDDEN_BIASES && u < OUTPUT_BIASES) || place_of_few(u) < 0) continue;
        float sum = 0.f;
        if (u < HIDDEN_BIASES) {
            const float* own = shared<float>(OWN_AT) + u / OUTPUTS;
#pragma unroll 8
            for (int r = 0; r < ROWS; ++r) sum += own[8 * r] * error[r * OUTPUT_STRIDE + u % OUTPUTS];
        } else if (u < OUTPUT_BIASES) {
            const float* sums = shared<float>(SUMS_AT) + (u - HIDDEN_BIASES >> 3) * TILES * 8 + (u & 7);
            for (int t = 0; t < TILES; ++t) sum += sums[8 * t];
        } else {
#pragma unroll 8
            for (int r = 0; r < ROWS; ++r) sum += error[r * OUTPUT_STRIDE + u - OUTPUT_BIASES];
        }
        if (update.limit != 0.f) {
            found |= !(fabsf(sum) < update.limit);
            continue;
        }
        float* state = shared<float>(FEW_AT) + u;
        States one;
#pragma unroll
        for (int s = 0; s < STATES; ++s) one.v[s] = state[s * FEW];
        one.update(h, sum);
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[s * FEW] = one.v[s];
        if (u < HIDDEN_BIASES) {
            publish_last_weight(exchange, update.turn, u, one.v[0]);
            found |= exceeds(one.v[0], LARGE_WEIGHT);
        }
    }
    return found;
}

}  // namespace resident
