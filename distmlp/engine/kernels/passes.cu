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

// The tiles of a lower pass, behind the first one, that sums are added up beside.
constexpr int EARLY_TURNS = 2;

// Sums of other blocks' gradients that a block adds up while products of the next pass are under way: one chunk a pass.
struct Early {
    const float* partials;
    u32* told;   // (EARLY, blocks): number of the step whose sums are there
    u32 number;  // of the step
    int count;   // of producers
    float sum;   // of this thread's parameter, once it is known

    // Without a branch, as products may be under way.
    __device__ __forceinline__ void tell(int which, bool really) const {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.release.gpu.global.u32 [%0], %1; }" ::"l"(
                told + which * gridDim.x + blockIdx.x),
            "r"(number), "r"((int)really)
            : "memory");
    }
    __device__ __forceinline__ void await(int which) const {
        const int p = (threadIdx.x >> 5) + WARPS * (threadIdx.x & 31);
        if (p < count)
            while (load_acquire(told + which * gridDim.x + p) != number) {
            }
        for (int q = p + 32 * WARPS; q < count; q += 32 * WARPS)
            while (load_acquire(told + which * gridDim.x + q) != number) {
            }
        __syncwarp();
    }
    static constexpr int LOADS = (NARROW_BLOCKS + EARLY_TURNS * WARPS - 1) / (EARLY_TURNS * WARPS);  // beside a tile
    // The `part`-th of the EARLY_TURNS parts of this warp's producers.
    __device__ __forceinline__ void load(int which, int part, bool really, uint4 (&x)[LOADS]) const {
        const int warp = (threadIdx.x >> 5) + part * LOADS * WARPS;
        const float* source = here(
            partials + (i64)warp * PARTIAL_STRIDE + (blockIdx.x + which * gridDim.x) * CHUNK + 4 * (threadIdx.x & 31));
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            asm volatile(
                "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
                "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                : "=&r"(x[i].x), "=&r"(x[i].y), "=&r"(x[i].z), "=&r"(x[i].w)
                : "l"(source + (i64)i * WARPS * PARTIAL_STRIDE), "r"((int)(really && warp + i * WARPS < count))
                : "memory");
    }
    __device__ __forceinline__ static float* scratch() { return (float*)(dynamic_shared + EARLY_AT); }
    __device__ __forceinline__ static void leave(const uint4 (&x)[LOADS], bool more) {
        float4& place = *(float4*)(scratch() + 4 * threadIdx.x);
        float4 total = more ? place : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            total.x += __uint_as_float(x[i].x), total.y += __uint_as_float(x[i].y);
            total.z += __uint_as_float(x[i].z), total.w += __uint_as_float(x[i].w);
        }
        place = total;
    }
    __device__ __forceinline__ void collect(int which) {
        if (threadIdx.x >> 7 != which) return;
        sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += scratch()[w * CHUNK + (threadIdx.x & 127)];
    }
};

// What a lower pass begins a tile with.
template <int P>
struct Left {
    u32 a[2 * columns(begins_with(P))], dz[2 * columns(pass(P).high)];

    __device__ __forceinline__ void fetch(const Walk& walk, int turn) {
        uint4* kept = walk.kept_tile(turn);
        Walk::fetch<columns(begins_with(P)) / 2>(walk.inputs_of<P>(kept), a);
        Walk::fetch<columns(pass(P).high) / 2>(walk.errors_of(kept), dz);
    }
};

template <int P>
__device__ __forceinline__ void lower_pass(const Walk& walk, int turns, float* partial, Left<P>& left, Limit& limit, Early& early);

// The sums of pass P out, then the next pass. Its first loads go ahead of the stores, which take long.
template <int P, int N>
__device__ __forceinline__ void go_down(const Walk& walk, int turns, float* partial, float (&sums)[N], Limit& limit, Early& early) {
    if constexpr (P + 1 < PASSES) {
        Left<P + 1> left;
        left.fetch(walk, 0);
        write_pass<P>(walk.group, sums, partial, limit);
        CLOCK(1 + P);
        lower_pass<P + 1>(walk, turns, partial, left, limit, early);
    } else {
        write_pass<P>(walk.group, sums, partial, limit);
        CLOCK(1 + P);
    }
}

// The upmost pass, which has the loss, and all below it. Returns whether a sum is bad.
__device__ __forceinline__ bool all_passes(const Block& block, int s, float* partial, Early& early) {
    const Walk walk = block.walk;
    const Raw& raw = block.raw;
    const StepInfo info = ENGINE.steps[s];
    const int tiles = (info.rows + TILE - 1) / TILE, lane = threadIdx.x & 31;
    write_ones<0>();
    Totals totals = {};
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
        const int next_at = Block::first_row(tile + gridDim.x);
        RowPair rows, next;
        next.pick(raw, info, next_at + (lane >> 2));
        Chain::Targets targets;
        CLOCK(62);
        walk.forward<0, 0>(a, Top{raw, rows, targets, totals, kept});
        CLOCK(63);
        publish_operands();
        Chain::Inputs inputs;
        walk.load_inputs(raw, next, inputs);
        next.load(raw);
        __syncthreads();
        CLOCK(8 + 2 * turn);
        add_pass_tile<0, 0>(walk.group, sums, walk.shared, [] {});
        __syncthreads();
        CLOCK(9 + 2 * turn);
        walk.store_inputs(raw, info, next, next_at, inputs);
        walk.remember(next);
        prefetch_targets(raw, next);
    }
    Limit limit = {false};
    sum_over_warp(totals, (float*)(dynamic_shared + TALLY_AT) + (threadIdx.x >> 5) * TALLY_FLOATS, limit);
    go_down<0>(walk, turn, partial, sums, limit, early);
    return limit.bad;
}

template <int P>
__device__ __forceinline__ void lower_pass(const Walk& walk, int turns, float* partial, Left<P>& left, Limit& limit, Early& early) {
    constexpr int LOW = pass(P).low, HIGH = pass(P).high, FROM = begins_with(P);
    constexpr bool ADDS = P - 1 < EARLY;
    write_ones<P>();
    float sums[pass_sums(P)];
#pragma unroll
    for (int i = 0; i < FIXED(pass_sums(P)); ++i) sums[i] = 0.f;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const Lower<P> lower{left.dz, walk.kept_tile(turn)};
        if constexpr (FROM == LOW)
            walk.store_fragments<columns(LOW), activation_columns(LOW)>(walk.input_fragment<P, LOW>(), left.a);
        if constexpr (keeps_slope(P)) {
            u32 slope[2 * columns(LOW)];
            Walk::fetch<columns(LOW) / 2>(walk.slopes_of<P>(lower.kept), slope);
            walk.store_fragments<columns(LOW), columns(LOW)>(walk.error_fragment<P, LOW>(), slope);
        }
        if constexpr (HIGH > FROM + 1)
            walk.forward<P, FROM>(left.a, lower);
        else
            walk.turn<P>(left.dz, lower);
        publish_operands();
        if (turn + 1 < turns) left.fetch(walk, turn + 1);
        const bool adds = ADDS && turns > EARLY_TURNS && turn >= 1 && turn <= EARLY_TURNS;
        if (adds && turn == 1) early.await(P - 1);
        __syncthreads();
        CLOCK(24 + 16 * (P - 1) + 2 * turn);
        uint4 x[Early::LOADS];
        add_pass_tile<P, 0>(walk.group, sums, walk.shared, [&] {
            if constexpr (ADDS) {
                early.tell(P - 1, turn == 0 && threadIdx.x == 0);
                early.load(P - 1, turn - 1, adds, x);
            }
        });
        if (adds) early.leave(x, turn > 1);
        __syncthreads();
        if (adds && turn == EARLY_TURNS) early.collect(P - 1);
        CLOCK(25 + 16 * (P - 1) + 2 * turn);
    }
    go_down<P>(walk, turns, partial, sums, limit, early);
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

constexpr int AT_ONCE = 4, PER_THREAD = AT_ONCE * CHUNK / BLOCK_THREADS;

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

// Over producers share, share + SHARES, …
template <int SHARES>
__device__ __forceinline__ float4 sum_of_chunk(const float* source, int share, int count) {
    constexpr int LOADS = 17;  // in flight
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = share; p < count; p += LOADS * SHARES) {
        uint4 x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            x[i] = p + SHARES * i < count ? load_fresh(source + (i64)(p + SHARES * i) * PARTIAL_STRIDE)
                                          : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
            sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
        }
    }
    return sum;
}

// f(place, parameter, gradient summed over `count` producers) for this block's chunks, four at a time.
template <class F>
__device__ __forceinline__ void for_each_sum(
    const Buffers& buffers, int s, u32 number, int count, StepTotals& totals, int early, float early_sum, const F& f) {
    float* scratch = (float*)(dynamic_shared + SCRATCH_AT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* mine = scratch + warp * WARP_SUMS;
    const float* partials = buffers.partials_of(0);
    Own own;
    own.load(0);
    __syncthreads();  // `scratch` has been read
    await_producers(buffers, s, number, count, mine + CHUNK);
    __syncthreads();
    CLOCK(5);
    totals = collect_totals(scratch);
    for (int turn = 0; blockIdx.x + AT_ONCE * turn * gridDim.x < CHUNKS; ++turn) {
        if (turn > 0) own.load(turn);
        const int first = turn == 0 ? early : 0, some = AT_ONCE - first, shares = WARPS / some, share = warp / some;
        const int chunk = blockIdx.x + (AT_ONCE * turn + first + warp % some) * gridDim.x;
        if (chunk < CHUNKS && share < shares) {
            const float* source = partials + chunk * CHUNK + 4 * lane;
            const float4 sum = first == 0 ? sum_of_chunk<WARPS / AT_ONCE>(source, share, count)
                                          : sum_of_chunk<WARPS / (AT_ONCE - EARLY)>(source, share, count);
            *(float4*)(mine + 4 * lane) = sum;
        }
        __syncthreads();
        CLOCK(6);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int quarter = (threadIdx.x >> 7) + BLOCK_THREADS / CHUNK * i, element = threadIdx.x & 127;
            if (own.place[i].flat < 0) continue;
            float sum = 0.f;
            for (int k = 0; k < shares; ++k) sum += scratch[(some * k + quarter - first) * WARP_SUMS + element];
            if (quarter < first) sum = early_sum;
            f(own.place[i], own.parameter[i], sum);
        }
        __syncthreads();
    }
}

// Sums, update and publication of step `s`; a barrier must follow.
__device__ __noinline__ void update_directly(
    int s, u32 number, int count, Buffers buffers, int early, float early_sum, const Hyper& hyper, Progress& progress) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, early, early_sum, [&](const Place& place, Parameter& parameter, float sum) {
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
__device__ __noinline__ void reduce_to_gradient(
    int s, u32 number, int rows, int count, Buffers buffers, int early, float early_sum) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, early, early_sum, [&](const Place& place, Parameter&, float sum) {
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
    if (threadIdx.x < EARLY) ((u32*)buffers.partials_of(1))[threadIdx.x * gridDim.x + blockIdx.x] = 0;
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
        CLOCK(0);
        walk.phase ^= 1;
        const u32 number = s - begin + 1;
        const int rows = ENGINE.steps[s].rows, count = producers(rows);
#if !NARROW_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        Early early = {buffers.partials_of(0), (u32*)buffers.partials_of(1), number, count, 0.f};
        int added = 0;  // of this block's chunks, ahead of time
        if (blockIdx.x < count) {
            float* partial = buffers.partials_of(0) + (i64)blockIdx.x * PARTIAL_STRIDE;
            Limit limit;
            limit.bad = all_passes(block, s, partial, early);
            if (blockIdx.x + EARLY_TURNS * gridDim.x < (rows + TILE - 1) / TILE) added = EARLY;
            deliver<TALLY_FLOATS>(
                (const float*)(dynamic_shared + TALLY_AT), partial, buffers.tallies(s, 0) + blockIdx.x, buffers.tallies(s, 1) + blockIdx.x, number,
                limit);
        } else {
            for (int l = 0; l < LAYERS; ++l) barrier_wait(walk.weights_there + 8 * l, walk.phase);
            __syncthreads();
        }
        CLOCK(4);
#if NARROW_DIRECT
        update_directly(s, number, count, buffers, added, early.sum, hyper, progress);
#else
        reduce_to_gradient(s, number, rows, count, buffers, added, early.sum);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_later(s, barrier, progress);
            barrier.wait();
            publish_all(image);
        }
#endif
        CLOCK(7);
        fence_async();
        barrier.arrive();
        if (s + 1 < end) {
            set_next_hyper(hyper, ENGINE.steps[s + 1].rate, progress.step + 1);
            if (blockIdx.x < producers(ENGINE.steps[s + 1].rows)) stage(block, s + 1);
        }
        barrier.await();
        CLOCK(60);
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
