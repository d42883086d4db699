// The phases of a step of the resident kernel, as a block goes through them.
#pragma once
#include "resident_output.cuh"
#include "resident_update.cuh"

namespace resident {

static_assert(PRODUCT != FMA && (PRODUCT == BF16 || RANKS == 1), "several ranks exchange bfloat16");
static_assert(SHARED_BYTES == RESIDENT_SHARED_BYTES && EXCHANGE_BYTES == RESIDENT_EXCHANGE_BYTES, "as plan_resident.py");
static_assert(OUTPUT_TILES <= 2 && HIDDEN >= 1 && ROWS <= BLOCK_THREADS && FEW <= BLOCK_THREADS && GROUP_TILES <= WARPS);


struct Steps {
    const Raw& raw;
    u8* exchange;
    GridBarrier& barrier;
    Progress& progress;
    Hyper (&hyper)[2];
    int end;
    const Place place;
    const bool computes;
    StepInfo (&infos)[8];  // of this step and the next ones, a ring
    Feed feed;
    Wanted wanted;
    Bias bias;
    bool large = false;    // a weight of this thread is, or was
    bool doubt = false;    // this thread has seen something large in this step
    bool doubt_next = false;
    u32 doubts = 0;        // thread 0: blocks that have doubted so far, of even steps and, in the upper half, of odd ones
    bool pending = false;  // the last step's update of upper layers
    u32 updates = 0;       // so far: published weights alternate with them
    int k = 0;             // steps so far: activations and flags go round with them
    float loss = 0.f, weight = 0.f, scale = 0.f;
    int reported = 0;  // steps of the table whose result is there
    StepStatus status = DONE;

    __device__ __forceinline__ Steps(
        const Raw& raw, u8* exchange, GridBarrier& barrier, Progress& progress, Hyper (&hyper)[2], StepInfo (&infos)[8], int end)
        : raw(raw), exchange(exchange), barrier(barrier), progress(progress), hyper(hyper), end(end), place(), infos(infos),
          computes(place.computes()), wanted(place.group), bias(place) {}

    __device__ __forceinline__ u32* not_finite(int step) const { return (u32*)(exchange + FLAGS_AT) + (step & 3); }
    __device__ __forceinline__ double* losses(int step) const {
        return (double*)(exchange + LOSSES_AT) + (step & 1) * LOSSES;
    }
    // Tile of (rows, features) that a warp of the group takes, and of weights whose columns are the block's.
    __device__ __forceinline__ int rows_tile(int block, int t) const { return block * TILES + place.tile(t); }

    // Words that nobody has written yet: where this block will write them.
    template <int I = 1>
    __device__ __forceinline__ void clear() {
        if constexpr (I <= HIDDEN) {
            for (int i = warp_id(); i < OWN_TILES; i += WARPS) {
                const int t = place.tile(i / (2 * COLUMN_BLOCKS)), group = 2 * place.block + i % (2 * COLUMN_BLOCKS);
                if (group >= 2 * DEPTH<I> || !computes) continue;
                for (int turn = 0; turn < RING; ++turn) {
                    const int at = turn * MATRIX_BYTES<I>;
                    store_half(exchange + FIXED(activation_at(I)) + at, group, t, pair_of(UNWRITTEN), pair_of(UNWRITTEN));
                    if (I == HIDDEN) store_half(exchange + LAST_SLOPE_AT + at, group, t, pair_of(UNWRITTEN), pair_of(UNWRITTEN));
                    if (I > 1 && I < HIDDEN) store_half(exchange + FIXED(error_at(I)) + at, group, t, pair_of(UNWRITTEN), pair_of(UNWRITTEN));
                }
            }
            clear<I + 1>();
        }
    }

    __device__ __forceinline__ const StepInfo& info(int ahead = 0) const { return infos[k + ahead & 7]; }
    __device__ __forceinline__ void begin(int s) {
        if (threadIdx.x < 4) infos[threadIdx.x] = step_info(s + threadIdx.x, end);
        __syncthreads();
        reported = s;
        wanted.pick(raw, info());
        feed.pick(raw, info());
        feed.load(raw);
        doubt_next = feed.store(exchange, 0);
        feed.pick(raw, info(1));
        feed.load(raw);
        feed.pick(raw, info(2));
    }

    // The next step's batch to its place, the loads of the one after it under way.
    __device__ __forceinline__ void feed_next() {
        forget_addresses();
#if RESIDENT_RANKS > 1
        const uint4 own_batch = feed.recall(exchange, k);
#endif
        doubt |= doubt_next;
        doubt_next = feed.store(exchange, (k + 1) % RING);
        if (PRODUCT == BF16) ask_rows();
        wanted.load(raw);
        wanted.pick(raw, info(1));
#if RESIDENT_RANKS > 1
        feed.send_recalled(k, own_batch);
#endif
    }

    // The loads of the step after the next one. With floats they begin once the operands of the products have left their
    // registers.
    __device__ __forceinline__ void ask_rows() {
        feed.load(raw);
        feed.pick(raw, info(3));
    }

    // Addresses are worked out again behind it: kept from step to step, they would take the registers of operands.
    __device__ __forceinline__ void forget_addresses() { asm volatile("" : "+l"(exchange)); }

    template <int L>
    __device__ __forceinline__ void forward() {
        forget_addresses();
        if (!computes || !place.has_columns<L + 1>()) return;
        {
            Operand<DEPTH<L>, GROUP_TILES> a;
            Operand<DEPTH<L>, COLUMN_BLOCKS> b;
            const u8* from = exchange + FIXED(activation_at(L)) + k % RING * MATRIX_BYTES<L>;
            const auto rows = [&](int block, int t) { return rows_tile(block, t); };
            if (L == 0) a.load(from, rows);
            const u8* weights = exchange + FIXED(weight_at(L));
            const auto columns = [&](int block, int n) {
                return place.block + n < DEPTH<L + 1> ? (place.block + n) * DEPTH<L> + block : -1;
            };
            if (L == 0) b.await(weights + (updates & 1) * WEIGHT_BYTES<L>, columns);
            else b.load(weights, columns);
            if (L > 0) a.await(from, rows);
            multiply_rows<DEPTH<L>>(a, b);
        }
        __syncthreads();
        for (int i = warp_id(); i < OWN_TILES; i += WARPS) {
            const int tile = place.tile(i / (2 * COLUMN_BLOCKS)), eight = i % (2 * COLUMN_BLOCKS);
            const int group = 2 * place.block + eight;
            if (group >= 2 * DEPTH<L + 1>) continue;
            float4 v = sum_shares<workers(DEPTH<L>)>(i), slope;
            const float* bias = shared<float>(FEW_AT) + L * COLUMNS + 8 * eight;
            const auto output = [&](float& z, float& of_z, int half, int c) {
                const bool inside = row_of(tile) + 8 * half < info().rows && 8 * group + c < WIDTH<L + 1>;
                of_z = 0.f;
                z = inside ? activate(activation(L), z + bias[c], of_z) : 0.f;
                if (!inside) of_z = 0.f;
                doubt |= exceeds(z, LARGE_ACTIVATION);
            };
            output(v.x, slope.x, 0, column()), output(v.y, slope.y, 0, column() + 1);
            output(v.z, slope.z, 1, column()), output(v.w, slope.w, 1, column() + 1);
            const Pair upper = pack(v.x, v.y), lower = pack(v.z, v.w);
            tell_half(exchange + FIXED(activation_at(L + 1)), MATRIX_BYTES<L + 1>, k, group, tile, upper, lower);
            if (L < HIDDEN - 1)
                shared<float4>(SLOPE_AT)[(L * OWN_TILES + i) * 32 + lane_id()] = slope;
            else if (stores_slope(activation(L)))
                tell_half(
                    exchange + LAST_SLOPE_AT, MATRIX_BYTES<L + 1>, k, group, tile, pack(slope.x, slope.y),
                    pack(slope.z, slope.w));
            __syncwarp();
            u8* turned = exchange + FIXED(activation_turned_at(L + 1)) + (k & 1) * MATRIX_BYTES<L + 1>;
#if RESIDENT_RANKS > 1
            const u32 upper_turned = transpose(upper), lower_turned = transpose(lower);
            store_half(turned, group, tile, upper_turned, lower_turned);
            send_half(k, FIXED(sent_activation_at(L + 1)), group, tile, upper_turned, lower_turned);
#else
            store_half(turned, group, tile, transpose(upper), transpose(lower));
#endif
        }
        __syncthreads();  // shares will be written again
    }
    template <int L>
    __device__ __forceinline__ void forward_above() {  // layers L and above
        if constexpr (L < HIDDEN) {
            if (L == 1) await_ready(BOTTOM_READY);
            if (L == 2) await_ready(TOP_READY);
            forward<L>();
            forward_above<L + 1>();
        }
    }

    // Outputs, loss, the error of the last hidden layer and the one below.
    __device__ __forceinline__ void output() {
        forget_addresses();
        OutputLayer layer;
        Operand<DEPTH<HIDDEN>, COLUMN_BLOCKS> below;
        const auto rows = [&](int block, int t) { return rows_tile(block, t); };
        const int turn = k % RING * MATRIX_BYTES<HIDDEN>;
        if (HIDDEN <= 2) await_ready(TOP_READY);
        layer.weights.load(exchange + FIXED(weight_at(HIDDEN)), [](int block, int) { return block; });
        if constexpr (HIDDEN > 1 && PRODUCT == BF16) load_backward<HIDDEN - 1>(below);
        layer.hidden.await(exchange + FIXED(activation_at(HIDDEN)) + turn, rows);
        copy_wait<0>();  // targets and sample weights
        layer.forward();
        const Signs signs(layer.hidden);
        if constexpr (HIDDEN > 1 && PRODUCT != BF16) load_backward<HIDDEN - 1>(below);  // for want of registers
        const int first = place.group * GROUP_ROWS;
        doubt |= output_errors(info().rows - first, shared<float>(WEIGHTS_AT) + first, loss);
        if constexpr (HIDDEN > 1) turn_weights(below);
        __syncthreads();
        if (place.block == 0) store_output_errors(exchange, k, place);
        if (stores_slope(activation(HIDDEN - 1))) {
            OutputLayer::Rows slopes;
            slopes.await(exchange + LAST_SLOPE_AT + turn, rows);
            layer.backward(exchange, k, place, slopes.v, below);
        } else if constexpr (SIGNS_DO) {
            layer.backward(exchange, k, place, signs, below);
        } else {
            layer.backward(exchange, k, place, layer.hidden.v, below);
        }
        if constexpr (HIDDEN > 1) finish_error<HIDDEN - 2>();
        if (place.block == 0) {
            const double sum = warp_sum((double)loss);
            if (lane_id() == 0) __stcg(losses(k) + place.group * WARPS + warp_id(), sum);
        }
    }

    // Weights of layer L towards the block's columns below it, to be turned.
    template <int L>
    __device__ __forceinline__ void load_backward(Operand<DEPTH<L + 1>, COLUMN_BLOCKS>& b) const {
        b.load(exchange + FIXED(weight_at(L)), [&](int block, int n) {
            return place.block + n < DEPTH<L> ? block * DEPTH<L> + place.block + n : -1;
        });
    }

    // Error of the block's outputs of layer L from the warps' shares.
    template <int L>
    __device__ __forceinline__ void finish_error() {
        __syncthreads();
        for (int i = warp_id(); i < OWN_TILES; i += WARPS) {
            const int tile = place.tile(i / (2 * COLUMN_BLOCKS)), group = 2 * place.block + i % (2 * COLUMN_BLOCKS);
            if (group >= 2 * DEPTH<L + 1>) continue;
            float4 v = sum_shares<workers(DEPTH<L + 2>)>(i);
            const float4 slope = shared<float4>(SLOPE_AT)[(L * OWN_TILES + i) * 32 + lane_id()];
            v.x *= slope.x, v.y *= slope.y, v.z *= slope.z, v.w *= slope.w;
            const Pair upper = pack(v.x, v.y), lower = pack(v.z, v.w);
            if constexpr (L > 0)
                tell_half(exchange + FIXED(error_at(L + 1)), MATRIX_BYTES<L + 1>, k, group, tile, upper, lower);
            store_error<L + 1>(exchange, k, group, tile, v, upper, lower);
        }
    }

    template <int L>
    __device__ __forceinline__ void backward() {  // from layer L, not the last hidden one, to the one below
        if constexpr (L > 0) {
            __syncthreads();  // shares will be written again
            forget_addresses();
            if (place.has_columns<L>()) {
                Operand<DEPTH<L + 1>, GROUP_TILES> a;
                Operand<DEPTH<L + 1>, COLUMN_BLOCKS> b;
                load_backward<L>(b);
                a.await(exchange + FIXED(error_at(L + 1)) + k % RING * MATRIX_BYTES<L + 1>,
                        [&](int block, int t) { return rows_tile(block, t); });
                turn_weights(b);
                multiply_rows<DEPTH<L + 1>>(a, b);
            }
            finish_error<L - 1>();
            backward<L - 1>();
        }
    }

    // The result of the last step, once nobody waits for it.
    __device__ __forceinline__ void report(int s) {
        if (s == reported) return;
        if (blockIdx.x == 0 && warp_id() == WARPS - 1) {
            double sum = 0.;
            for (int i = lane_id(); i < LOSSES; i += 32) sum += __ldcg(losses(k - 1) + i);
            sum = warp_sum(sum);
#if RESIDENT_RANKS > 1
            sum = take_outcome(k - 1, sum);
#endif
            if (lane_id() == 0) ENGINE.results[s - 1] = StepResult{sum, weight, status};
        }
        reported = s;
    }

    // Layers L to END - 1, the last one first.
    template <int L, int END>
    __device__ __forceinline__ bool update_layers(const Update& update, int scratch = 0) {
        bool found = false;
        if constexpr (L < END) {
            Gradient<L> gradient;
            gradient.stage_errors(exchange, update.step, scratch);
            gradient.ask_inputs(exchange, update.step);
#if RESIDENT_RANKS > 1
            gradient.take_errors(update.step, scratch);
#endif
            found |= update_layers<L + 1, END>(update, scratch + FIXED(staged_bytes(L)));
            found |= gradient.update(exchange, update, scratch);
        } else {
            copy_wait<0>();
            __syncthreads();
        }
        return found;
    }
    __device__ __forceinline__ bool update_all(const Update& update) {
        bool found = update_layers<0, AT_ONCE>(update);
        __syncthreads();  // nobody needs what is in the scratch memory
        found |= update_layers<AT_ONCE, LAYERS>(update);
        __syncthreads();
        bias.ask(exchange, update.step);
#if RESIDENT_RANKS > 1
        bias.take_others(update.step);
#endif
        return found | bias.update(update);
    }

    __device__ __forceinline__ Update update_of(int step, float limit = 0.f) const {
        return {&hyper[step & 1], scale, (int)(updates & 1), limit, step};
    }
    // The block's new weights can be read once all blocks have said so.
    __device__ __forceinline__ void tell_ready(Counter which) {
        __syncthreads();
        if (threadIdx.x == 0) add_release(counter(exchange, which), 1);
    }
    __device__ __forceinline__ void await_ready(Counter which) const {
        if (lane_id() == 0)
            while (load_acquire(counter(exchange, which)) < (u64)updates * BLOCKS) {
            }
        __syncwarp();
    }
    // What the last step left to do.
    __device__ __forceinline__ void catch_up() {
        if (!pending) return;
        forget_addresses();
        large |= update_layers<AT_ONCE, LAYERS>(update_of(k - 1));
        pending = false;
        tell_ready(TOP_READY);
    }

    // The grid barrier of a step. Returns whether this block doubts it.
    __device__ __forceinline__ bool arrive() {
        const bool doubted = __syncthreads_or(doubt || large);
        if (threadIdx.x == 0) add_release(counter(exchange, BARRIER + (k & 1)), doubted ? DOUBT + 1 : 1);
        doubt = false;
        return doubted;
    }
    // Returns whether any block doubts the step.
    __device__ __forceinline__ bool await() {
        bool doubted = false;
        if (threadIdx.x == 0) {
            const u64* where = counter(exchange, BARRIER + (k & 1));
            u64 seen;
            do seen = load_acquire(where);
            while ((u32)seen < (u32)(k / 2 + 1) * BLOCKS);
            const u32 shift = 16 * (k & 1), now = (u32)(seen >> 32) & 0xffffu;  // no block doubts more often in a launch
            doubted = now != (doubts >> shift & 0xffffu);
            doubts = (doubts & ~(0xffffu << shift)) | now << shift;
        }
        return __syncthreads_or(doubted);
    }

    // Constants of this step's update, by two threads: the powers take their time.
    __device__ __forceinline__ void set_hyper_of_step() {
        Hyper& h = hyper[k & 1];
        if (threadIdx.x == BLOCK_THREADS - 32) {
            h.rate = info().rate;
            if (OPTIMIZER >= ADAM) h.correction1 = (float)(1. / (1. - power(ENGINE.beta1, progress.step + 1)));
        }
        if (threadIdx.x == BLOCK_THREADS - 64 && OPTIMIZER >= ADAM)
            h.correction2 = (float)(1. / sqrt(1. - power(ENGINE.beta2, progress.step + 1)));
    }

    // Nobody could tell from magnitudes: look at all gradients, then update or not. Returns whether the step is finite.
    __device__ __forceinline__ bool decide_late();
    __device__ __forceinline__ void step(int s);

#if RESIDENT_RANKS > 1
    __device__ __forceinline__ double loss_of_rank() const {
        double sum = 0.;
        for (int i = lane_id(); i < LOSSES; i += 32) sum += __ldcg(losses(k) + i);
        return warp_sum(sum);
    }
    // What the other ranks say of the step; `weight` becomes that of all. Returns whether all are sure.
    __device__ __forceinline__ bool hear() {
        if (warp_id() == 0) hear_ranks(k, weight);
        __syncwarp();
        __syncthreads();
        weight = ranks_seen.weight;
        scale = 1.f / weight;
        return ranks_seen.doubts == 0 && weight >= 0.0625f && weight < 1e30f;
    }
#endif
};

}  // namespace resident
