// Whole training steps of a narrow network in one cooperative launch: weights, activations and errors of a tile of
// rows live in shared memory, a block takes its tiles through all layers without waiting for any other block.
//
//   per tile      forward, loss, backward in registers (narrow_chain.cuh); weight gradients on top of those of the
//                 block's other tiles, in registers (narrow_sums.cuh)
//   per step      partial sums out; every block adds up some parameters' over all blocks in their order, updates them
//                 and sends them to all blocks (narrow_exchange.cuh)
//
// No sum depends on the order in which blocks run. The ranks of one host add theirs to it parameter by parameter
// (NARROW_PEERS). Clipping and LAMB, which need a norm first, and gradients that other ranks are to add to between two
// launches go through the flat gradient buffer and update.cuh instead.
#include "narrow_ranks.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(SHARED_BYTES == NARROW_SHARED_BYTES, "plan_narrow.py and narrow_shape.cuh agree");

// The column of ones beside every activation whose layer's bias gradient is summed with its weight's.
template <int L>
__device__ __forceinline__ void write_ones() {
    if constexpr (L < LAYERS) {
        if constexpr (out_major(L)) {
            for (int i = threadIdx.x; i < TILE; i += BLOCK_THREADS) {  // row i
                const int block = (i >> 3) * FIXED(activation_columns(L)) + FIXED(columns(L));
                *(uint4*)(dynamic_shared + FIXED(activation_at(L)) + block * BLOCK_BYTES + (i & 7) * 16) =
                    make_uint4(0x3f80u, 0u, 0u, 0u);
            }
        }
        write_ones<L + 1>();
    }
}

// A block's way through its tiles. The inputs of the tile to come are already in shared memory, `rows` its rows.
struct Tiles {
    const Raw& raw;
    Chain chain;
    int group, warp, lane;
    RowPair rows;

    __device__ __forceinline__ explicit Tiles(const Raw& raw_) : raw(raw_) {
        warp = threadIdx.x >> 5;
        lane = threadIdx.x & 31;
        group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
        chain = {shared_address(dynamic_shared), (const float*)(dynamic_shared + SCALES_AT), 2 * warp};
    }
    __device__ __forceinline__ bool works() const { return CHAINS == GROUPS || group < CHAINS; }
    __device__ __forceinline__ int first_row(int tile) const { return tile * TILE + 16 * warp; }

    // The block's first tile of a step, without anything to hide the loads behind.
    __device__ __forceinline__ void stage(const StepInfo& info) {
        if (!works()) return;
        const int at = first_row(blockIdx.x);
        rows.pick(raw, info, at + (lane >> 2));
        rows.load(raw);
        Chain::Inputs inputs;
        chain.load_inputs(raw, rows, inputs);
        chain.store_inputs(raw, info, rows, at, inputs);
    }

    // All tiles of a step, then the partial sums. What follows a step's last tile is the first of `following`.
    __device__ __forceinline__ void run(
        const StepInfo& info, const StepInfo& following, const Buffers& buffers, int s, u32 number) {
        const int tiles = (info.rows + TILE - 1) / TILE;
        float* partial = buffers.partials_of(s) + (i64)blockIdx.x * PARTIAL_STRIDE;
        Totals totals = {};
        Limit limit = {false};
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const bool more = tile + (int)gridDim.x < tiles;
            const StepInfo next_info = more ? info : following;
            const int next_at = first_row(more ? tile + gridDim.x : blockIdx.x);
            RowPair next;
            Chain::Inputs inputs;
            if (works()) {
                Chain::Targets targets;
                chain.load_targets(raw, rows, targets);
                next.pick(raw, next_info, next_at + (lane >> 2));
                u32 a[2 * columns(0)];
                chain.read_inputs(a);
                if ((lane & 3) == 0) totals.weight += rows.weight[0] + rows.weight[1];
                chain.forward<0>(a, raw, rows, next, inputs, targets, totals);
                publish_operands();
                next.load(raw);
            }
            __syncthreads();
            add_tile<0>(group, sums, chain.shared);
            __syncthreads();
            if (works()) {
                rows = next;
                chain.store_inputs(raw, next_info, rows, next_at, inputs);
            }
        }
        settle(sums);
        write_sums<0>(group, sums, partial, limit);
        finish_sums(
            totals, (float*)(dynamic_shared + EXCHANGE_AT), partial, buffers.tallies(s, 0) + blockIdx.x,
            buffers.tallies(s, 1) + blockIdx.x, number, limit);
    }
};

// The sum over the warps of what they have added up of this thread's parameter.
__device__ __forceinline__ float sum_of_warps(const float* scratch) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += scratch[w * WARP_SUMS + threadIdx.x];
    return sum;
}

// f(place, gradient summed over `count` producers) for this block's chunks; threads 0 to 127. `own` is the place in the
// first of them; `before(place)` is called ahead of the loads of the others, `totals` filled in before the first f.
// `join(chunk, sum)` is called before, where this thread owns a parameter, and then once `agree(totals)` by all threads.
template <class Before, class Join, class Agree, class F>
__device__ __forceinline__ void for_each_sum(
    const Buffers& buffers, int s, u32 number, int count, const Place& own, StepTotals& totals, const Before& before,
    const Join& join, const Agree& agree, const F& f) {
    float* scratch = (float*)(dynamic_shared + EXCHANGE_AT);
    float* mine = scratch + (threadIdx.x >> 5) * WARP_SUMS;
    const float* partials = buffers.partials_of(s);
    __syncthreads();  // `scratch` has been read
    await_producers(buffers, s, number, count, mine + CHUNK);
    if (blockIdx.x < CHUNKS) sum_chunk(partials, count, blockIdx.x, mine);
    __syncthreads();
    totals = collect_totals(scratch);
    for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x) {
        Place place = own;
        if (chunk != blockIdx.x) {
            place.flat = -1;
            if (threadIdx.x < CHUNK) place = locate(chunk, threadIdx.x);
            if (place.flat >= 0) before(place);
            __syncthreads();
            sum_chunk(partials, count, chunk, mine);
            __syncthreads();
        }
        float sum = 0.f;
        if (place.flat >= 0) sum = join(chunk, sum_of_warps(scratch));
        if (chunk == blockIdx.x) agree(totals);
        if (place.flat >= 0) f(place, sum);
    }
    if (blockIdx.x >= CHUNKS) agree(totals);
}

__device__ __forceinline__ void load_weights(const u8* image) {
    load_image(image, dynamic_shared);
    publish_operands();
    __syncthreads();
}

// What changes from step to step (see set_hyper), by two threads that own no parameter: the powers take as long as
// the weights need to arrive.
__device__ __forceinline__ void set_next_hyper(Hyper& h, float rate, u64 step) {
    if (threadIdx.x == CHUNK) {
        h.rate = rate;
        if (OPTIMIZER >= ADAM) h.correction1 = (float)(1. / (1. - power(ENGINE.beta1, step)));
    }
    if (threadIdx.x == CHUNK + 64 && OPTIMIZER >= ADAM)
        h.correction2 = (float)(1. / sqrt(1. - power(ENGINE.beta2, step)));
}

// Sums, update and publication of step `s`. `publication`: number of the next one. Returns whether there was one.
__device__ __forceinline__ bool update_directly(
    int s, u32 number, const StepInfo& info, int count, float next_rate, const Place& own, const Buffers& buffers,
    u32 publication, Hyper (&hyper)[2], Progress& progress) {
    Parameter parameter = {};
    if (own.flat >= 0) parameter.load(own.flat);
    const float* scratch = (const float*)(dynamic_shared + EXCHANGE_AT);
    Sums ranks(number);
    StepTotals totals;
    bool all = true;
    u8* image = buffers.image(publication);
    for_each_sum(
        buffers, s, number, count, own, totals, [&](const Place& other) { parameter.load(other.flat); },
        [&](int chunk, float sum) { return ranks.sum(chunk, sum); },
        [&](StepTotals& totals) { all = ranks.agree(totals, scratch, info.rows); },
        [&](const Place& place, float sum) {
            if (!all || totals.bad || totals.weight == 0.f) return;
            Hyper h = hyper[s & 1];
            h.scale = 1.f / totals.weight;
            parameter.value = update_rule(h, parameter.value, sum, parameter.first, parameter.second);
            publish(image, place, parameter.value);
            parameter.mean = average(h.ema_decay, parameter.mean, parameter.value);
            parameter.store(place.flat);
        });
    const bool update = all && !totals.bad && totals.weight != 0.f;
    if (!all) {  // the host will say why
        progress.frozen = true;
    } else if (totals.bad) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    }
    if (update) ++progress.step;
    set_next_hyper(hyper[s + 1 & 1], next_rate, progress.step + 1);
    if (blockIdx.x == 0 && threadIdx.x == CHUNK + 96)
        ENGINE.results[s] = StepResult{
            ranks.loss(scratch), totals.weight,
            !all ? NOT_RUN : !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
    return update;
}

// The sums to the flat gradient, the tally behind it.
__device__ __forceinline__ void reduce_to_gradient(
    int s, u32 number, const StepInfo& info, int count, const Place& own, const Buffers& buffers) {
    StepTotals totals;
    for_each_sum(
        buffers, s, number, count, own, totals, [](const Place&) {}, [](int, float sum) { return sum; },
        [](StepTotals&) {}, [&](const Place& place, float sum) { ENGINE.gradient[place.flat] = sum; });
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const double loss = collect_loss((float*)(dynamic_shared + EXCHANGE_AT));
        float* tally = ENGINE.gradient + ENGINE.size;
        for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
        tally[TALLY_LOSS] = totals.bad ? __int_as_float(0x7fc00000) : (float)loss;
        tally[TALLY_WEIGHT] = totals.weight;
        tally[TALLY_ROWS] = (float)info.rows;
        ENGINE.results[s] = StepResult{loss, totals.weight, DONE};
    }
}

}  // namespace narrow

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(narrow::BLOCK_THREADS, 1) narrow_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, u8* image) {
    using namespace narrow;
    const Raw raw = {inputs, targets, labels, weights, index};
    const Buffers buffers = {partials, image};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    Progress progress = {control.step, control.skipped, control.frozen != 0};

#if !NARROW_DIRECT
    if (apply_first && !progress.frozen) {
        apply_gradient(begin - 1, barrier, progress);
        barrier.wait();
    }
#endif
    __shared__ Hyper hyper[2];
    Sums::begin();
    write_ones<0>();
    load_scales((float*)(dynamic_shared + SCALES_AT));
    clear_exchange(buffers);
    u32 publication = 0, loaded = 0;  // publications so far, and the last that this block has loaded
    publish_all(buffers.image(publication));
    Place own = {0, 0, 0, -1, 0};
    if (threadIdx.x < CHUNK && blockIdx.x < CHUNKS) own = locate(blockIdx.x, threadIdx.x);
    Tiles tiles(raw);
    const StepInfo none = {0.f, 0, 0};
    if (begin < end) {
        if (threadIdx.x < 2) set_hyper(hyper[threadIdx.x], ENGINE.steps[begin].rate, 1.f, progress.step + 1);
        __syncthreads();  // the scales
        tiles.stage(ENGINE.steps[begin]);
    }
    barrier.wait();
    load_weights(buffers.image(publication));
    const auto step_info = [&](int s) { return s < end ? ENGINE.steps[s] : none; };
    // Read a step before they are needed; with other ranks registers are short for that: NVRTC 13.0 serialises products.
    constexpr bool READ_AHEAD = !NARROW_PEERS;
    StepInfo info, following = step_info(begin), after = step_info(begin + 1);
    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        info = following;
        following = READ_AHEAD ? after : step_info(s + 1);
        if (READ_AHEAD) after = step_info(s + 2);
        const int count = producers(info.rows);
        const u32 number = s - begin + 1;
#if NARROW_DIRECT
        u8* next_image = buffers.image(publication + 2);
        if (own.flat >= 0) clear(next_image, own);
        if (gridDim.x < CHUNKS) for_each_own([&](const Place& place) { clear(next_image, place); });
#else
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        if (blockIdx.x < count) {
            tiles.run(info, following, buffers, s, number);
        } else {
            __syncthreads();
            if (threadIdx.x == 0) __threadfence();  // as in the release of a tally
            if (blockIdx.x < producers(following.rows)) tiles.stage(following);
        }
#if NARROW_DIRECT
        const bool updated =
            update_directly(s, number, info, count, following.rate, own, buffers, publication + 1, hyper, progress);
        if (updated) ++publication;
        if (blockIdx.x < producers(following.rows) && loaded != publication) {
            load_weights(buffers.image(publication));
            loaded = publication;
        }
        // Where nobody waits for some blocks they must not fall behind: without tiles or parameters, or with nothing
        // published.
        if (!updated || (gridDim.x > CHUNKS && count < gridDim.x)) barrier.wait();
#else
        reduce_to_gradient(s, number, info, count, own, buffers);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_gradient(s, barrier, progress);
            barrier.wait();
            publish_all(buffers.image(0));
            barrier.wait();
            load_weights(buffers.image(0));
        }
#endif
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
