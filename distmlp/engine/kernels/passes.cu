// Whole training steps of a narrow network whose weight gradients do not fit the registers of one block all at once, in
// one cooperative launch. A block has all weights in shared memory and takes its rows through the network several
// times: a pass sums the gradients of some layers, the upmost first, and leaves the errors below them to the next one.
//
//   per tile      up, loss, down in registers (passes_chain.cuh); weight gradients of the pass, in registers
//   per pass      partial sums out
//   per step      every block adds up some parameters' over all blocks in their order and updates them; a barrier; new
//                 weights in by bulk copies
//
// No sum depends on the order in which blocks run. Only for Hopper.
#include "passes_chain.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(PASSES_BYTES == NARROW_SHARED_BYTES, "plan_passes.py and passes_shape.cuh agree");
static_assert(WARPS == 8 && CHAINS == 2, "two warpgroups, 64 rows of a tile each");

// What a thread knows all through a launch. The phases below are functions with the registers to themselves: inlined
// into one another they would spill, and `ptxas` would serialise the products.
struct Block {
    Raw raw;
    Walk walk;

    __device__ __forceinline__ static int first_row(int tile) { return tile * TILE + 16 * (threadIdx.x >> 5); }
};

__device__ __forceinline__ void prefetch_targets(const Raw& raw, const RowPair& rows) {
    if (LABELS || (threadIdx.x & 3)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (rows.there[half]) asm volatile("prefetch.global.L2 [%0];" ::"l"(raw.targets + rows.row[half] * OUTPUTS));
}

// The block's first tile of a step, without anything to hide the loads behind.
__device__ __noinline__ void stage(const Block& block, int s) {
    const StepInfo info = ENGINE.steps[s];
    const int at = Block::first_row(blockIdx.x);
    RowPair rows;
    rows.pick(block.raw, info, at + ((threadIdx.x & 31) >> 2));
    rows.load(block.raw);
    Chain::Inputs inputs;
    block.walk.load_inputs(block.raw, rows, inputs);
    block.walk.store_inputs(block.raw, info, rows, at, inputs);
    block.walk.remember(rows);
    prefetch_targets(block.raw, rows);
}

// The upmost pass, which has the loss. Returns whether a sum is bad, as all passes do.
__device__ __forceinline__ bool top_pass(const Block& block, int s, float* partial) {
    const Walk walk = block.walk;
    const Raw& raw = block.raw;
    const StepInfo info = ENGINE.steps[s];
    const int tiles = (info.rows + TILE - 1) / TILE, lane = threadIdx.x & 31;
    write_ones<0>();
    Limit limit = {false};
    float sums[pass_sums(0)];
#pragma unroll
    for (int i = 0; i < FIXED(pass_sums(0)); ++i) sums[i] = 0.f;
    int turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
        u32 a[2 * columns(0)];
        walk.read_inputs(a);
        uint4* kept = walk.kept_tile(turn);
        if constexpr (pass_from(0) > 0) walk.keep<columns(0) / 2>(walk.inputs_of<pass_from(0)>(kept), a);
        Totals totals = {};
        walk.forward<0, 0>(a, Top{raw, totals, kept});
        publish_operands();
        const int next_at = Block::first_row(tile + gridDim.x);
        RowPair next;
        next.pick(raw, info, next_at + (lane >> 2));
        sum_over_warp(
            totals, (float*)(dynamic_shared + TALLY_AT) + (threadIdx.x >> 5) * TALLY_FLOATS, limit, turn > 0);
        Chain::Inputs inputs;
        walk.load_inputs(raw, next, inputs);
        next.load(raw);
        __syncthreads();
        add_pass_tile<0, 0>(walk.group, sums, walk.shared);
        __syncthreads();
        walk.store_inputs(raw, info, next, next_at, inputs);
        walk.remember(next);
        prefetch_targets(raw, next);
    }
    write_pass<0>(walk.group, sums, partial, limit);
    return limit.bad;
}

template <int P>
__device__ __forceinline__ bool lower_pass(const Block& block, int turns, float* partial) {
    constexpr int LOW = pass(P).low, HIGH = pass(P).high;
    const Walk walk = block.walk;
    write_ones<P>();
    float sums[pass_sums(P)];
#pragma unroll
    for (int i = 0; i < FIXED(pass_sums(P)); ++i) sums[i] = 0.f;
    u32 a[2 * columns(LOW)], dz[2 * columns(HIGH)];  // of the tile to come
    const auto fetch = [&](int turn) {
        uint4* kept = walk.kept_tile(turn);
        walk.fetch<columns(LOW) / 2>(walk.inputs_of<P>(kept), a);
        walk.fetch<columns(HIGH) / 2>(walk.errors_of(kept), dz);
    };
    fetch(0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const Lower<P> lower{dz, walk.kept_tile(turn)};
        walk.store_fragments<columns(LOW), activation_columns(LOW)>(walk.input_fragment<P, LOW>(), a);
        if constexpr (keeps_slope(P)) {
            u32 slope[2 * columns(LOW)];
            walk.fetch<columns(LOW) / 2>(walk.slopes_of<P>(lower.kept), slope);
            walk.store_fragments<columns(LOW), columns(LOW)>(walk.error_fragment<P, LOW>(), slope);
        }
        if constexpr (HIGH > LOW + 1)
            walk.forward<P, LOW>(a, lower);
        else
            walk.turn<P>(dz, lower);
        publish_operands();
        if (turn + 1 < turns) fetch(turn + 1);
        __syncthreads();
        add_pass_tile<P, 0>(walk.group, sums, walk.shared);
        __syncthreads();
    }
    Limit limit = {false};
    write_pass<P>(walk.group, sums, partial, limit);
    return limit.bad;
}
template <int P>
__device__ __forceinline__ bool lower_passes(const Block& block, int turns, float* partial) {
    if constexpr (P < PASSES) {
        const bool bad = lower_pass<P>(block, turns, partial);
        return lower_passes<P + 1>(block, turns, partial) || bad;
    }
    return false;
}

// The weights on their way to shared memory, a barrier a layer; thread 0. Biases come with the first.
template <int L = 0>
__device__ __forceinline__ void ask_weights(const u8* image, u32 shared, u32 weights_there) {
    if constexpr (L < LAYERS) {
        constexpr int BIASES = L == 0 ? IMAGE_BYTES - bias_at(0) : 0, BYTES = weight_bytes(L);
        if (L == 0) fence_async();
        barrier_expect(weights_there + 8 * L, BYTES + BIASES);
        bulk_load(shared + FIXED(weight_at(L)), image + FIXED(weight_at(L)), BYTES, weights_there + 8 * L);
        if (L == 0) bulk_load(shared + FIXED(bias_at(0)), image + FIXED(bias_at(0)), BIASES, weights_there);
        ask_weights<L + 1>(image, shared, weights_there);
    }
}

constexpr int AT_ONCE = 4, SHARES = WARPS / AT_ONCE, PER_THREAD = AT_ONCE * CHUNK / BLOCK_THREADS;

// A thread's parameters of a turn, on their way while sums are waited for.
struct Own {
    Place place[PER_THREAD];
    Parameter parameter[PER_THREAD];

    __device__ __forceinline__ void load(int turn) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int own = blockIdx.x + (AT_ONCE * turn + (threadIdx.x >> 7) + BLOCK_THREADS / CHUNK * i) * gridDim.x;
            place[i].flat = -1;
            if (own < CHUNKS) place[i] = locate(own, threadIdx.x & 127);
            if (NARROW_DIRECT && place[i].flat >= 0) parameter[i].load(place[i].flat);
        }
    }
};

// f(place, parameter, gradient summed over `count` producers) for this block's chunks, four at a time.
template <class F>
__device__ __forceinline__ void for_each_sum(
    const Buffers& buffers, int s, u32 number, int count, StepTotals& totals, const F& f) {
    float* scratch = (float*)(dynamic_shared + SCRATCH_AT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* mine = scratch + warp * WARP_SUMS;
    const float* partials = buffers.partials_of(0);
    Own own;
    own.load(0);
    __syncthreads();  // `scratch` has been read
    await_producers(buffers, s, number, count, mine + CHUNK);
    __syncthreads();
    totals = collect_totals(scratch);
    for (int turn = 0; blockIdx.x + AT_ONCE * turn * gridDim.x < CHUNKS; ++turn) {
        if (turn > 0) own.load(turn);
        const int chunk = blockIdx.x + (AT_ONCE * turn + warp % AT_ONCE) * gridDim.x;
        if (chunk < CHUNKS) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
            const float* source = partials + chunk * CHUNK + 4 * lane;
            for (int p = warp / AT_ONCE; p < count; p += 17 * SHARES) {  // seventeen loads in flight
                uint4 x[17];
#pragma unroll
                for (int i = 0; i < 17; ++i)
                    x[i] = p + SHARES * i < count ? load_fresh(source + (i64)(p + SHARES * i) * PARTIAL_STRIDE)
                                                  : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < 17; ++i) {
                    sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
                    sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
                }
            }
            *(float4*)(mine + 4 * lane) = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int quarter = (threadIdx.x >> 7) + BLOCK_THREADS / CHUNK * i, element = threadIdx.x & 127;
            if (own.place[i].flat < 0) continue;
            float sum = 0.f;
#pragma unroll
            for (int share = 0; share < SHARES; ++share)
                sum += scratch[(AT_ONCE * share + quarter) * WARP_SUMS + element];
            f(own.place[i], own.parameter[i], sum);
        }
        __syncthreads();
    }
}

// Sums, update and publication of step `s`; a barrier must follow.
__device__ __noinline__ void update_directly(
    int s, u32 number, int count, Buffers buffers, const Hyper& hyper, Progress& progress) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, [&](const Place& place, Parameter& parameter, float sum) {
        if (totals.bad || totals.weight == 0.f) return;
        Hyper h = hyper;
        h.scale = 1.f / totals.weight;
        parameter.value = update_rule(h, parameter.value, sum, parameter.first, parameter.second);
        publish(buffers.image(0), place, parameter.value);
        parameter.mean = average(h.ema_decay, parameter.mean, parameter.value);
        parameter.store(place.flat);
    });
    if (threadIdx.x == 0) {
        if (totals.bad) {
            if (ENGINE.stop_on_nonfinite) progress.frozen = true;
            else ++progress.skipped;
        } else if (totals.weight != 0.f) {
            ++progress.step;
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ENGINE.results[s] = StepResult{
            collect_loss((float*)(dynamic_shared + SCRATCH_AT)), totals.weight,
            !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
}

// What changes from step to step (see set_hyper), by two threads: the powers take long.
__device__ __forceinline__ void set_next_hyper(Hyper& h, float rate, u64 step) {
    if (threadIdx.x == 32) {
        h.rate = rate;
        if (OPTIMIZER >= ADAM) h.correction1 = (float)(1. / (1. - power(ENGINE.beta1, step)));
    }
    if (threadIdx.x == 64 && OPTIMIZER >= ADAM)
        h.correction2 = (float)(1. / sqrt(1. - power(ENGINE.beta2, step)));
}

// The sums to the flat gradient, the tally behind it.
__device__ __noinline__ void reduce_to_gradient(int s, u32 number, int rows, int count, Buffers buffers) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, [&](const Place& place, Parameter&, float sum) {
        ENGINE.gradient[place.flat] = sum;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const double loss = collect_loss((float*)(dynamic_shared + SCRATCH_AT));
        float* tally = ENGINE.gradient + ENGINE.size;
        for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
        tally[TALLY_LOSS] = totals.bad ? __int_as_float(0x7fc00000) : (float)loss;
        tally[TALLY_WEIGHT] = totals.weight;
        tally[TALLY_ROWS] = (float)rows;
        ENGINE.results[s] = StepResult{loss, totals.weight, DONE};
    }
}

// The update from the flat gradient, where every thread counts for itself.
__device__ __forceinline__ void apply_later(int s, GridBarrier& barrier, Progress& shared) {
    Progress progress = shared;
    apply_gradient(s, barrier, progress);
    __syncthreads();
    if (threadIdx.x == 0) shared = progress;
    __syncthreads();
}

}  // namespace narrow

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(narrow::BLOCK_THREADS, 1) passes_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, u8* image, uint4* kept) {
    using namespace narrow;
    const Buffers buffers = {partials, image};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    __shared__ Progress progress;  // each thread leaves it as all others do, between the same barriers
    if (threadIdx.x == 0) progress = {control.step, control.skipped, control.frozen != 0};
    __syncthreads();
#if !NARROW_DIRECT
    if (apply_first && !progress.frozen) {
        apply_later(begin - 1, barrier, progress);
        barrier.wait();
    }
#endif
    __shared__ Hyper hyper;
    __shared__ u64 weights_there[LAYERS];
    Block block;
    block.raw = {inputs, targets, labels, weights, index};
    Walk& walk = block.walk;
    walk.group = threadIdx.x >> 7;
    walk.shared = (u32)__cvta_generic_to_shared(dynamic_shared);
    walk.scales = (const float*)(dynamic_shared + PASS_SCALES_AT);
    walk.row_block = 2 * (threadIdx.x >> 5);
    walk.weights_there = (u32)__cvta_generic_to_shared(weights_there);
    walk.phase = 1;
    walk.kept = kept + (i64)blockIdx.x * NARROW_TURNS * KEPT_VECTORS * BLOCK_THREADS + threadIdx.x;
    if (threadIdx.x == 0) {
        for (int l = 0; l < LAYERS; ++l) barrier_init(walk.weights_there + 8 * l, 1);
        fence_async();
    }
    write_ones<-1>();
    load_scales((float*)(dynamic_shared + PASS_SCALES_AT));
    if (threadIdx.x < 4) buffers.tallies(threadIdx.x >> 1, threadIdx.x & 1)[blockIdx.x] = 0;
    publish_all(image);
    __syncthreads();  // the scales
    if (begin < end) {
        if (threadIdx.x == CHUNK) set_hyper(hyper, ENGINE.steps[begin].rate, 1.f, progress.step + 1);
        if (blockIdx.x < producers(ENGINE.steps[begin].rows)) stage(block, begin);
    }
    fence_async();
    barrier.wait();
    if (threadIdx.x == 0 && begin < end && !progress.frozen) ask_weights(image, walk.shared, walk.weights_there);
    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        walk.phase ^= 1;
        const u32 number = s - begin + 1;
        const int rows = ENGINE.steps[s].rows, all = (rows + TILE - 1) / TILE, count = producers(rows);
        const int turns = (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
#if !NARROW_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        if (blockIdx.x < count) {
            float* partial = buffers.partials_of(0) + (i64)blockIdx.x * PARTIAL_STRIDE;
            Limit limit;
            limit.bad = top_pass(block, s, partial);
            limit.bad |= lower_passes<1>(block, turns, partial);
            deliver<TALLY_FLOATS>(
                (const float*)(dynamic_shared + TALLY_AT), partial, buffers.tallies(s, 0) + blockIdx.x, buffers.tallies(s, 1) + blockIdx.x, number,
                limit);
        } else {
            for (int l = 0; l < LAYERS; ++l) barrier_wait(walk.weights_there + 8 * l, walk.phase);
            __syncthreads();
        }
#if NARROW_DIRECT
        update_directly(s, number, count, buffers, hyper, progress);
#else
        reduce_to_gradient(s, number, rows, count, buffers);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_later(s, barrier, progress);
            barrier.wait();
            publish_all(image);
        }
#endif
        fence_async();
        barrier.arrive();
        if (s + 1 < end) {
            set_next_hyper(hyper, ENGINE.steps[s + 1].rate, progress.step + 1);
            if (blockIdx.x < producers(ENGINE.steps[s + 1].rows)) stage(block, s + 1);
        }
        barrier.await();
        if (threadIdx.x == 0 && s + 1 < end && !progress.frozen) ask_weights(image, walk.shared, walk.weights_there);
    }
    // A block's own parameters are final, and all blocks have read the counters long ago.
    if (!ENGINE.deferred) copy_weights();
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < sizeof(control.flags) / 4; i += BLOCK_THREADS) ((u32*)control.flags)[i] = 0;
        if (threadIdx.x == 0) {
            control.step = progress.step;
            control.skipped = progress.skipped;
            control.frozen = progress.frozen;
        }
    }
}
