// A strip of rows on its way through the network: up, where a warp takes its own rows through a layer, and down, where
// first the whole block sums the layer's weight gradient, then every warp takes its rows' errors to the layer below.
//
// Activations, and later errors, of the layer at hand lie in shared memory, each in the place of what it was made from; or,
// where they fit, those of all layers, errors in the place of activations.
#pragma once
#include "strips_gradients.cuh"
#include "strips_output.cuh"

namespace strips {

// Where the slope is told from the output's sign, a bit of it is kept, 32 columns of a row to a word of a thread.
__device__ __forceinline__ constexpr bool keeps_signs(int kind) { return kind == RELU || kind == LEAKY_RELU; }
constexpr int SIGN_WORDS = 2 * TILES;

__device__ __forceinline__ u32* signs_at(const Strip& strip, int plane, int piece) {
    return (u32*)(strip.kept + KEPT_FLOATS + plane) + (piece * 32 + strip.lane) * SIGN_WORDS;
}

// What a warp takes of a layer: PIECE rows from `first` on, MINE columns from `from` on, in turns.
template <int COLUMNS>
struct Turn {
    static constexpr int ACROSS = across(COLUMNS), MINE = COLUMNS / ACROSS;
    int piece;

    __device__ __forceinline__ explicit Turn(const Strip& strip) : piece(strip.warp) {}
    __device__ __forceinline__ int first() const { return piece / ACROSS * PIECE; }
    __device__ __forceinline__ int from() const { return piece % ACROSS * MINE; }
};

// Layer L + n for the warp's pieces.
template <int L>
__device__ __forceinline__ void hidden(const Strip& at_large, int n, int rows) {
    const Strip strip = at_large.here();
    constexpr int COLUMNS = padded(L + 1), KIND = activation(L), MINE = Turn<COLUMNS>::MINE, VECTORS = MINE / 4;
#pragma unroll 1
    for (Turn<COLUMNS> turn(strip); turn.first() < rows; turn.piece += WARPS) {
        const int first = turn.first(), own = turn.from() + 8 * strip.t();
        Sums<MINE> sums;
        const float* bias = strip.biases<L>(n) + own;
        strip.products_up<L>(first, turn.from(), L + n, sums);
        float* slopes = strip.kept + KEPT_FLOATS + kept_of<L + 1>(n) + (first + strip.g()) * COLUMNS + own;
        u32 signs[SIGN_WORDS];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 word = 0;
#pragma unroll
                for (int q = 0; q < MINE / 32; ++q)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        const float4 b = *(const float4*)(bias + 32 * q + 4 * upper);
                        const float4 z = sums.four(m, half, q, upper);
                        float4 slope;
                        const auto output = [&](float x, float& of_x) {
                            if (KIND == RELU) x = relu_operand(x);
                            else x = to_element(activate(KIND, x, of_x));
                            // Shifts in whether it is positive: the sign of the integer -x.
                            constexpr u32 ZERO = KIND == RELU ? HALF : 0u;
                            if (keeps_signs(KIND)) word = __funnelshift_l(ZERO - __float_as_uint(x), word, 1);
                            return x;
                        };
                        float4 y;
                        y.x = output(z.x + b.x, slope.x);
                        y.y = output(z.y + b.y, slope.y);
                        y.z = output(z.z + b.z, slope.z);
                        y.w = output(z.w + b.w, slope.w);
                        const int r = 16 * m + 8 * half, c = 32 * q + 4 * upper;
                        strip.store_row<L + 1>(n, first + r + strip.g(), c + own, y);
                        if (stores_slope(KIND)) *(float4*)(slopes + r * COLUMNS + c) = slope;
                    }
                signs[2 * m + half] = word;
            }
        if (keeps_signs(KIND)) {
            u32* at = signs_at(strip, kept_of<L + 1>(n), turn.piece);
#pragma unroll
            for (int i = 0; i < SIGN_WORDS; i += 2) *(uint2*)(at + i) = make_uint2(signs[i], signs[i + 1]);
        }
        if (KEEPS) continue;
        __syncwarp();
        uint4* keep = (uint4*)(strip.kept + kept_of<L + 1>(n) + first * COLUMNS + turn.from());
#pragma unroll 1
        for (int from = 0; from < PIECE * VECTORS; from += 128) {  // whole lines
            u32 v[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = from + 32 * k + strip.lane;
                load_vector(v[k], strip.row_address<L + 1>(n, first + i / VECTORS) + 4 * turn.from() + i % VECTORS * 16);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = from + 32 * k + strip.lane;
                keep[i / VECTORS * (COLUMNS / 4) + i % VECTORS] = make_uint4(v[k][0], v[k][1], v[k][2], v[k][3]);
            }
        }
    }
    __syncwarp();
}

// Errors at the output of layer L + n to those at its input, times the slope there.
template <int L>
__device__ __forceinline__ void errors(const Strip& at_large, int n, int rows) {
    const Strip strip = at_large.here();
    constexpr int COLUMNS = padded(L), KIND = activation(L - 1), MINE = Turn<COLUMNS>::MINE;
#pragma unroll 1
    for (Turn<COLUMNS> turn(strip); turn.first() < rows; turn.piece += WARPS) {
        const int first = turn.first(), own = turn.from() + 8 * strip.t();
        u32 signs[SIGN_WORDS];
        if (keeps_signs(KIND)) {
            const u32* at = signs_at(strip, kept_of<L>(n), turn.piece);
#pragma unroll
            for (int i = 0; i < SIGN_WORDS; i += 2) {
                const uint2 pair = *(const uint2*)(at + i);
                signs[i] = pair.x, signs[i + 1] = pair.y;
            }
        }
        Sums<MINE> sums;
        strip.products_down<L>(first, turn.from(), L + n, sums);
        const float* keep = strip.kept + (stores_slope(KIND) ? KEPT_FLOATS : 0) + kept_of<L>(n) +
                            (first + strip.g()) * COLUMNS + own;
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            float4 known[2][MINE / 32][2];
            if (!keeps_signs(KIND)) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int q = 0; q < MINE / 32; ++q)
#pragma unroll
                        for (int upper = 0; upper < 2; ++upper) {
                            const int r = 16 * m + 8 * half, c = 32 * q + 4 * upper;
                            known[half][q][upper] = KEEPS && !stores_slope(KIND)
                                                        ? strip.load_row<L>(n, first + r + strip.g(), c + own)
                                                        : *(const float4*)(keep + r * COLUMNS + c);
                        }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int q = 0; q < MINE / 32; ++q)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        float4 d = sums.four(m, half, q, upper);
                        const u32 last = MINE / 4 - 1 - (8 * q + 4 * upper);  // where the first of four bits is
                        const float4 k = known[half][q][upper];
                        const auto times_slope = [&](float d, float known, int i) {
                            if (keeps_signs(KIND)) {  // NaN has come from NaN in the layer above, where it is seen
                                const float below = KIND == RELU ? 0.f : d * LEAKY_SLOPE;
                                return rounded_operand(signs[2 * m + half] & 1u << last - i ? d : below);
                            }
                            return to_element(d * (stores_slope(KIND) ? known : slope_of_output(KIND, known)));
                        };
                        d.x = times_slope(d.x, k.x, 0);
                        d.y = times_slope(d.y, k.y, 1);
                        d.z = times_slope(d.z, k.z, 2);
                        d.w = times_slope(d.w, k.w, 3);
                        strip.store_row<L>(
                            n, first + 16 * m + 8 * half + strip.g(), 32 * q + 4 * upper + own, d);
                    }
        }
    }
}

// Waits for the weights of layer `l` and asks for what is next, if it has a place of its own.
__device__ __forceinline__ void begin_layer(const Strip& strip, int l) {
    if (l > 0 && ALL_WEIGHTS) {
        if (STRIP_ACROSS > 1) __syncthreads();
        return;
    }
    copy_wait<0>();
    __syncthreads();
    if (ALL_WEIGHTS || WEIGHT_COPIES == 1 || l + 1 == LAYERS) return;
    strip.ask_weights(l + 1);
    copy_commit();
}

// From layer L up to the loss. The first weights have been asked for.
template <int L>
__device__ __forceinline__ void forward(const Strip& strip, const Raw& raw, int rows, Totals& totals) {
    if constexpr (L + 1 < LAYERS) {
        constexpr int RUN = run_up(L);
#pragma unroll 1
        for (int n = 0; n < RUN; ++n) {
            begin_layer(strip, L + n);
            hidden<L>(strip, n, rows);
            if (ALL_WEIGHTS || WEIGHT_COPIES > 1) continue;
            __syncthreads();
            strip.ask_weights(L + n + 1);
            copy_commit();
        }
        forward<L + RUN>(strip, raw, rows, totals);
    } else {
        begin_layer(strip, L);
        output(strip, raw, rows, totals);
    }
}

// From layer L down. The block has synchronised behind the errors at its output.
template <int L>
__device__ __forceinline__ void backward(const Strip& strip, int rows, bool more, Limit& limit) {
    constexpr int RUN = run_down(L), LOW = L - RUN + 1;
#pragma unroll 1
    for (int n = RUN - 1; n >= 0; --n) {
        sum_gradient<LOW>(strip, n, rows, more, limit);
        copy_wait<0>();
        __syncthreads();
        if constexpr (LOW > 0) {
            if (n > 0) begin_stages<LOW>(strip, n - 1, rows);
            else begin_stages<LOW - 1>(strip, 0, rows);
            errors<LOW>(strip, n, rows);
            __syncthreads();
            // Of the way up the last weights are still there, or the last two.
            const int wanted = LOW + n - WEIGHT_COPIES;
            if (!ALL_WEIGHTS && wanted > 0 && wanted < LAYERS - WEIGHT_COPIES) {
                strip.ask_weights(wanted);
                copy_commit();
            }
        }
    }
    if constexpr (LOW > 0) backward<LOW - 1>(strip, rows, more, limit);
}

}  // namespace strips
