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
#include "passes_sums.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(PASSES_BYTES == NARROW_SHARED_BYTES, "plan_passes.py and passes_shape.cuh agree");
static_assert(WARPS == 8 && CHAINS == 2, "two warpgroups, 64 rows of a tile each");

constexpr bool PLAIN = RAW_TYPE == RAW_F32;

// What a thread knows all through a launch. The phases below are functions with the registers to themselves: inlined
// into one another they would spill, and `ptxas` would serialise the products.
struct Block {
    Raw raw;
    Walk walk;

    __device__ __forceinline__ static int first_row(int tile) { return tile * TILE + 16 * (threadIdx.x >> 5); }
};

__device__ __forceinline__ void prefetch_targets(const Raw& raw, const RowPair& rows) {  // no branch
    if (LABELS) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p prefetch.global.L2 [%0]; }" ::"l"(
                         raw.targets + rows.row[half] * OUTPUTS),
                     "r"((int)(rows.there[half] && (threadIdx.x & 3) == 0))
                     : "memory");
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

// Which of its tiles a block takes through pass P at `turn`: those that the pass before had last are still in L2.
template <int P>
__device__ __forceinline__ int tile_at(int turn, int turns) {
    return P % 2 == 1 ? turns - 1 - turn : turn;
}

// What a lower pass begins a tile with.
template <int P>
struct Left {
    u32 a[2 * columns(begins_with(P))], dz[2 * columns(pass(P).high)];

    __device__ __forceinline__ void fetch_inputs(const Walk& walk, int tile) {
        Walk::fetch<columns(begins_with(P)) / 2>(walk.inputs_of<P>(walk.kept_tile(tile)), a);
    }
    __device__ __forceinline__ void fetch_errors(const Walk& walk, int tile) {
        Walk::fetch<columns(pass(P).high) / 2>(walk.errors_of(walk.kept_tile(tile)), dz);
    }
};

template <int P>
__device__ __forceinline__ void lower_pass(const Walk& walk, int turns, float* partial, Left<P>& left, Limit& limit, u32* marks, u32 number);

// The sums of pass P out, then the next pass. Its first loads go ahead of the stores, which take long.
template <int P, int N>
__device__ __forceinline__ void go_down(const Walk& walk, int turns, float* partial, float (&sums)[N], Limit& limit, u32* marks, u32 number) {
    if constexpr (P + 1 < PASSES) {
        Left<P + 1> left;
        left.fetch_inputs(walk, tile_at<P + 1>(0, turns));
        left.fetch_errors(walk, tile_at<P + 1>(0, turns));
        write_pass<P>(walk.group, sums, partial, limit);
        lower_pass<P + 1>(walk, turns, partial, left, limit, marks, number);
    } else {
        write_pass<P>(walk.group, sums, partial, limit);
    }
}

// The upmost pass, which has the loss, and all below it. Returns whether a sum is bad.
__device__ __forceinline__ bool all_passes(const Block& block, int s, float* partial, u32* marks, u32 number) {
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
        walk.forward<0, 0>(a, Top{raw, rows, targets, totals, kept, turn == 0});
        publish_operands();
        Chain::Inputs inputs;
        walk.load_inputs(raw, next, inputs);
        next.load(raw);
        __syncthreads();
        add_pass_tile<0, 0>(walk.group, sums, walk.shared, [&] {
            if constexpr (PLAIN) {
                walk.store_plain_inputs(next, inputs);
                walk.remember(next);
                prefetch_targets(raw, next);
            }
        });
        __syncthreads();
        if constexpr (!PLAIN) {
            walk.store_inputs(raw, info, next, next_at, inputs);
            walk.remember(next);
            prefetch_targets(raw, next);
        }
    }
    Limit limit = {false};
    sum_over_warp(totals, (float*)(dynamic_shared + TALLY_AT) + (threadIdx.x >> 5) * TALLY_FLOATS, limit);
    go_down<0>(walk, turn, partial, sums, limit, marks, number);
    return limit.bad;
}

template <int P>
__device__ __forceinline__ void lower_pass(const Walk& walk, int turns, float* partial, Left<P>& left, Limit& limit, u32* marks, u32 number) {
    constexpr int LOW = pass(P).low, HIGH = pass(P).high, FROM = begins_with(P);
    write_ones<P>();
    float sums[pass_sums(P)];
#pragma unroll
    for (int i = 0; i < FIXED(pass_sums(P)); ++i) sums[i] = 0.f;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const Lower<P> lower{left.dz, walk.kept_tile(tile_at<P>(turn, turns))};
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
        const int next = tile_at<P>(turn + 1 < turns ? turn + 1 : turn, turns);
        left.fetch_inputs(walk, next);
        left.fetch_errors(walk, next);
        __syncthreads();
        add_pass_tile<P, 0>(walk.group, sums, walk.shared, [&] {
            tell_sums(marks, mark_of(number, P - 1), turn == 0 && threadIdx.x == 0);
        });
        __syncthreads();
    }
    go_down<P>(walk, turns, partial, sums, limit, marks, number);
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
    Sums::begin();
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
    u32* marks = (u32*)buffers.partials_of(1);
    if (threadIdx.x == 0) marks[blockIdx.x] = 0;
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
        const int rows = ENGINE.steps[s].rows, count = producers(rows);
#if !NARROW_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        if (blockIdx.x < count) {
            float* partial = buffers.partials_of(0) + (i64)blockIdx.x * PARTIAL_STRIDE;
            Limit limit;
            limit.bad = all_passes(block, s, partial, marks, number);
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
    Sums::finish();
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
