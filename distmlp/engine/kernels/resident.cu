// Whole training steps of a small batch in one cooperative launch, for networks whose parameters and optimizer state fit
// the shared memory of all multiprocessors together: they stay there from step to step.
//
//   forward      block b computes outputs 8 b to 8 b + 7 of every hidden layer; a grid barrier behind each layer
//   output       every block does the output layer, the loss and the last hidden layer's error by itself
//   backward     errors of the block's own outputs, layer by layer, a barrier behind each but the first layer's
//   update       gradients of the block's own weights, while it waits at the barriers; those of layer 1 wait for the
//                first barrier of the next step
//
// So a step has (hidden layers) + (hidden layers - 2) barriers, or 1 or 2 where there are one or two. Whether gradients
// are finite is told from magnitudes (see `large_weight`); where these leave it open, no update comes before all
// gradients have been looked at. No sum depends on the order in which blocks run.
#include "resident_output.cuh"
#include "resident_update.cuh"

namespace resident {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(SHARED_BYTES == RESIDENT_SHARED_BYTES && EXCHANGE_BYTES == RESIDENT_EXCHANGE_BYTES, "as plan_resident.py");

struct StepFlags {
    u32 doubt, not_finite;
};

struct Steps {
    const Raw& raw;
    u8* exchange;
    GridBarrier& barrier;
    Progress& progress;
    Hyper (&hyper)[2];
    int end;
    StepInfo info, ahead[3];  // of this step and the next ones
    Feed feed;
    Wanted wanted;
    bool large = false;    // a weight of this thread is, or was
    bool pending = false;  // the last step's update of layer 1 (and, with two hidden layers, of the output layer)
    u32 updates = 0;       // so far: published weights alternate with them
    int k = 0;             // steps so far: activations alternate with them, batches and flags go round
    float loss = 0.f, weight = 0.f, scale = 0.f;
    int reported = 0;  // steps of the table whose result is there
    StepStatus status = DONE;

    __device__ __forceinline__ StepFlags* flags(int step) const { return (StepFlags*)(exchange + FLAGS_AT) + (step & 3); }
    template <int I>
    __device__ __forceinline__ u8* activation_of(int step) const {
        return exchange + FIXED(activation_at(I, 0)) + (I ? step & 1 : step % 3) * FIXED(2 * matrix_bytes(I));
    }
    template <int I>
    __device__ __forceinline__ u8* transposed_of(int step) const {
        return activation_of<I>(step) + FIXED(matrix_bytes(I));
    }
    __device__ __forceinline__ u8* last_slope() const { return exchange + LAST_SLOPE_AT + (k & 1) * matrix_bytes(HIDDEN); }

    __device__ __forceinline__ void begin(int s) {
        info = step_info(s, end);
#pragma unroll
        for (int i = 0; i < 3; ++i) ahead[i] = step_info(s + 1 + i, end);
        reported = s;
        wanted.pick(raw, info);
        feed.pick(raw, info);
        feed.load(raw);
        if (feed.store(exchange, 0)) atomicOr(&flags(0)->doubt, 1u);
        feed.pick(raw, ahead[0]);
        feed.load(raw);
        feed.pick(raw, ahead[1]);
    }

    // The next step's batch to its place, the loads of the one after it under way.
    __device__ __forceinline__ void feed_next(int s) {
        if (feed.store(exchange, (k + 1) % 3)) atomicOr(&flags(k + 1)->doubt, 1u);
        feed.load(raw);
        feed.pick(raw, ahead[2]);
        wanted.load(raw);
        wanted.pick(raw, ahead[0]);
        if (large) atomicOr(&flags(k)->doubt, 1u);
    }

    template <int L>
    __device__ __forceinline__ void forward() {
        const bool works = blockIdx.x < groups(L + 1), last = L == HIDDEN - 1;
        u32 upper = 0, lower = 0;
        {
            u32 b[turns(depth(L))][2] = {};
            if (works) load_weights<L>(b);
            if (L > 0) barrier.await();
            if (works) multiply_rows<depth(L)>(activation_of<L>(k), b);
        }
        __syncthreads();
        const int tile = warp_id();
        if (works && tile < TILES) {
            float4 v = sum_shares<workers(depth(L))>(tile), slope;
            const float* bias = shared<float>(FEW_AT) + HIDDEN_BIASES + 8 * L;
            bool found = false;
            const auto output = [&](float& z, float& of_z, int half, int c) {
                const bool inside = row_of(tile) + 8 * half < info.rows && 8 * blockIdx.x + c < width(L + 1);
                of_z = 0.f;
                z = inside ? activate(activation(L), z + bias[c], of_z) : 0.f;
                if (!inside) of_z = 0.f;
                found |= exceeds(z, LARGE_ACTIVATION);
            };
            output(v.x, slope.x, 0, column()), output(v.y, slope.y, 0, column() + 1);
            output(v.z, slope.z, 1, column()), output(v.w, slope.w, 1, column() + 1);
            if (found) atomicOr(&flags(k)->doubt, 1u);
            __syncwarp();
            upper = pack_pair(v.x, v.y), lower = pack_pair(v.z, v.w);
            store_half(activation_of<L + 1>(k), blockIdx.x, tile, upper, lower);
            if (last) {
                float* own = shared<float>(OWN_AT) + row_of(tile) * 8 + column();
                *(float2*)own = make_float2(v.x, v.y);
                *(float2*)(own + 64) = make_float2(v.z, v.w);
                if (stores_slope(activation(L)))
                    store_half(last_slope(), blockIdx.x, tile, pack_pair(slope.x, slope.y), pack_pair(slope.z, slope.w));
            } else {
                shared<float4>(SLOPE_AT)[(L * TILES + tile) * 32 + lane_id()] = slope;
            }
        }
        barrier.arrive();
        if (works && tile < TILES && !last)
            store_half(transposed_of<L + 1>(k), blockIdx.x, tile, transpose(upper), transpose(lower));
    }

    // Error of the block's outputs of layer L from the warps' shares; a barrier begins where others need it.
    template <int L>
    __device__ __forceinline__ void finish_error() {
        __syncthreads();
        const int tile = warp_id();
        if (blockIdx.x < groups(L + 1) && tile < TILES) {
            float4 v = sum_shares<workers(depth(L + 2))>(tile);
            const float4 slope = shared<float4>(SLOPE_AT)[(L * TILES + tile) * 32 + lane_id()];
            v.x *= slope.x, v.y *= slope.y, v.z *= slope.z, v.w *= slope.w;
            const u32 upper = pack_pair(v.x, v.y), lower = pack_pair(v.z, v.w);
            if (L > 0) store_half(exchange + FIXED(error_at(L)), blockIdx.x, tile, upper, lower);
            keep_delta<L>(tile, v, upper, lower);
        }
        if (L > 0) barrier.arrive();
        else __syncthreads();
    }

    template <int L>
    __device__ __forceinline__ void backward(bool sure) {  // from layer L, not the last hidden one, to the one below
        if constexpr (L > 0) {
            u32 b[turns(depth(L + 1))][2];
            load_backward_weights<L>(exchange, updates - (sure ? 1 : 0) & 1, b);
            barrier.await();
            multiply_rows<depth(L + 1)>(exchange + FIXED(error_at(L)), b);
            finish_error<L - 1>();
            if (sure && L > 1) large |= update_weights<L>(transposed_of<L>(k), exchange, this_update());
            backward<L - 1>(sure);
        }
    }

    __device__ __forceinline__ Update this_update(float limit = 0.f) const {
        return {&hyper[k & 1], scale, (int)(updates & 1), limit};
    }
    template <int L>
    __device__ __forceinline__ bool update_from(const Update& update) {  // layers L and above
        bool found = false;
        if constexpr (L < HIDDEN) {
            found |= update_weights<L>(transposed_of<L>(k), exchange, update);
            found |= update_from<L + 1>(update);
        }
        return found;
    }

    // The result of the last step, once nobody waits for it.
    __device__ __forceinline__ void report(int s) {
        if (s == reported) return;
        if (blockIdx.x == 0) {
            const double total = block_sum((double)loss);
            if (threadIdx.x == 0) ENGINE.results[s - 1] = StepResult{total, weight, status};
        }
        reported = s;
    }

    // What the last step left to do.
    __device__ __forceinline__ void catch_up() {
        if constexpr (HIDDEN > 1) {
            if (!pending) return;
            const Update update = {&hyper[k - 1 & 1], scale, (int)(updates & 1), 0.f};
            large |= update_weights<1>(transposed_of<1>(k - 1), exchange, update);
            if (HIDDEN == 2) large |= update_few(true, exchange, update);
            pending = false;
        }
    }

    // Constants of this step's update, by two threads: the powers take their time.
    __device__ __forceinline__ void set_next_hyper() {
        Hyper& h = hyper[k & 1];
        if (threadIdx.x == BLOCK_THREADS - 32) {
            h.rate = info.rate;
            if (OPTIMIZER >= ADAM) h.correction1 = (float)(1. / (1. - power(ENGINE.beta1, progress.step + 1)));
        }
        if (threadIdx.x == BLOCK_THREADS - 64 && OPTIMIZER >= ADAM)
            h.correction2 = (float)(1. / sqrt(1. - power(ENGINE.beta2, progress.step + 1)));
    }

    template <int L>
    __device__ __forceinline__ void forward_above() {  // layers L and above
        if constexpr (L < HIDDEN) {
            forward<L>();
            forward_above<L + 1>();
        }
    }

    // Nobody could tell from magnitudes: look at all gradients, then update or not. Returns whether the step is finite.
    __device__ __forceinline__ bool decide_late() {
        __syncthreads();
        const Update look = this_update(largest_sum(weight));
        bool bad = update_from<0>(look);
        bad |= update_few(true, exchange, look);
        bad |= update_few(false, exchange, look);
        if (bad) atomicOr(&flags(k)->not_finite, 1u);
        barrier.wait();
        bad = __ldcg(&flags(k)->not_finite) != 0 || !is_finite((float)block_sum((double)loss)) || !is_finite(weight);
        if (bad || weight == 0.f) return !bad;
        ++progress.step;
        ++updates;
        large |= update_from<0>(this_update());
        large |= update_few(true, exchange, this_update());
        large |= update_few(false, exchange, this_update());
        return true;
    }

    __device__ __forceinline__ void step(int s) {
        if (HIDDEN == 1) feed_next(s);
        forward<0>();
        report(s);
        catch_up();
        if (HIDDEN > 1) feed_next(s);
        forward_above<1>();
        set_next_hyper();
        const StepInfo following = step_info(s + 4, end);

        barrier.await();
        if (blockIdx.x == 0 && threadIdx.x == 0) *flags(k + 3) = StepFlags{0u, 0u};  // of the last step
        const bool doubted = __ldcg(&flags(k)->doubt) != 0;
        OutputLayer layer;
        u32 below[LAST_TURNS][2] = {};
        if constexpr (HIDDEN > 1) load_backward_weights<HIDDEN - 1>(exchange, updates & 1, below);
        layer.forward(exchange, activation_of<HIDDEN>(k), updates & 1);
        sum_outputs();
        loss = 0.f;
        bool found = output_errors(info.rows, loss);
        weight = sum_of_weights(raw, info.rows);
        found |= !(weight >= 0.0625f && weight < 1e30f);
        const bool sure = !(__syncthreads_or(found) || doubted);
        scale = 1.f / weight;
        if (sure) {
            ++progress.step;
            ++updates;
        }
        layer.backward(stores_slope(activation(HIDDEN - 1)) ? last_slope() : activation_of<HIDDEN>(k), below);
        bool finite = true;
        if constexpr (HIDDEN > 1) finish_error<HIDDEN - 2>();
        else __syncthreads();
        if (sure && HIDDEN > 2) {
            large |= update_weights<HIDDEN - 1>(transposed_of<HIDDEN - 1>(k), exchange, this_update());
            large |= update_few(true, exchange, this_update());
        }
        if constexpr (HIDDEN > 1) backward<HIDDEN - 2>(sure);
        if (sure) {
            large |= update_weights<0>(transposed_of<0>(k), exchange, this_update());
            large |= update_few(false, exchange, this_update());
            if (HIDDEN == 1) large |= update_few(true, exchange, this_update());
            pending = HIDDEN > 1;
        } else {
            finite = decide_late();
        }
        if (!finite) {
            if (ENGINE.stop_on_nonfinite) progress.frozen = true;
            else ++progress.skipped;
        }
        status = finite ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT;
        info = ahead[0], ahead[0] = ahead[1], ahead[1] = ahead[2], ahead[2] = following;
        ++k;
    }
};

}  // namespace resident

// Steps [begin, end) of the table.
extern "C" __global__ void __launch_bounds__(resident::BLOCK_THREADS, 1) resident_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int, u8* exchange) {
    using namespace resident;
    __shared__ Hyper hyper[2];
    const Raw raw = {inputs, targets, labels, weights, index};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};
    if (threadIdx.x < 2) set_hyper(hyper[threadIdx.x], 0.f, 1.f, progress.step + 1);
    if (blockIdx.x == 0 && threadIdx.x < 8) ((u32*)(exchange + FLAGS_AT))[threadIdx.x] = 0;
    barrier.wait();

    Steps steps = {raw, exchange, barrier, progress, hyper, end};
    steps.large = move_weights<true>(exchange);
    steps.large |= move_few<true>(exchange);
    steps.begin(begin);
    barrier.wait();
    for (int s = begin; s < end; ++s) {
        if (!progress.frozen) {
            steps.step(s);
            continue;
        }
        steps.report(s);
        if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        steps.reported = s + 1;
    }
    steps.report(end);
    steps.catch_up();
    __syncthreads();
    move_weights<false>(exchange);
    move_few<false>(exchange);
    if (blockIdx.x == 0 && threadIdx.x == 0) {  // all blocks have read them at the start
        control.step = progress.step;
        control.skipped = progress.skipped;
        control.frozen = progress.frozen;
    }
}
