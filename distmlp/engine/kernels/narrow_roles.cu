// The steps of narrow.cu with roles for warpgroups (narrow_roles.cuh) and sums that say themselves when they are there
// (narrow_tags.cuh): for networks whose weight gradients fit the registers of one warpgroup, on Hopper, updated directly.
//
//   chains      tiles; then this block's share of the sums over all blocks, update and publication; new weights in
//   last group  weight gradients of the chains' tiles, sent out layer by layer while the last tiles go on
#ifdef PROFILE
#define PROFILE_STEP (s % 8 == 6)
#endif
#include "narrow_roles.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(SHARED_BYTES == NARROW_SHARED_BYTES, "plan_narrow.py and narrow_shape.cuh agree");
static_assert(GROUPS == CHAINS + 1, "one warpgroup sums");

enum NamedBarrier { EVERYBODY, OF_WORKERS, FINISHED, OF_SUMMERS };
__device__ __forceinline__ void sync_workers() { sync_some(OF_WORKERS, WORKERS); }

// The column of ones beside every activation whose layer's bias gradient is summed with its weight's.
template <int L>
__device__ __forceinline__ void write_ones() {
    if constexpr (L < LAYERS) {
        if constexpr (out_major(L)) {
            for (int i = threadIdx.x; i < CHAINS * TILE; i += BLOCK_THREADS) {  // row i % TILE of a chain's tile
                const int block = (i % TILE >> 3) * FIXED(activation_stride(L)) + FIXED(columns(L));
                const int at = TILES_AT + i / TILE * TILE_BYTES + FIXED(activation_at(L));
                *(uint4*)(dynamic_shared + at + block * BLOCK_BYTES + (i & 7) * 16) = make_uint4(0x3f80u, 0u, 0u, 0u);
            }
        }
        write_ones<L + 1>();
    }
}

// Tally and output biases of a warp's rows to shared memory, where the summing warpgroup finds them.
__device__ __forceinline__ void hand_over(Totals& totals, float* scratch) {
    const int lane = threadIdx.x & 31;
    float* mine = scratch + (threadIdx.x >> 5) * WARP_SUMS + TALLY_AT;
    if (CHAIN_SUMS_BIAS) {
#pragma unroll
        for (int i = 0; i < BIAS_SUMS; ++i) {
#pragma unroll
            for (int mask = 4; mask < 32; mask <<= 1) totals.bias[i] += __shfl_xor_sync(~0u, totals.bias[i], mask);
            if (lane < 4) mine[4 + (i >> 1) * 8 + 2 * lane + (i & 1)] = totals.bias[i];
        }
    }
    const float loss = warp_sum(totals.loss), weight = warp_sum(totals.weight);
    if (lane == 0) mine[0] = loss, mine[1] = weight;
    arrive_some(FINISHED, BLOCK_THREADS);
}
// Output biases and the tally of the block, over the chains' warps in their order; by the summing warpgroup.
__device__ __forceinline__ void send_tally(const Buffers& buffers, u32 turn, float* partial, Tagged& out) {
    constexpr int BIASES = CHAIN_SUMS_BIAS ? padded(LAYERS) : 0;
    static_assert(BIASES <= 32, "one warp adds up the output biases");
    const float* scratch = (const float*)(dynamic_shared + EXCHANGE_AT) + TALLY_AT;
    const int lane = threadIdx.x & 31;
    sync_some(FINISHED, BLOCK_THREADS);
    float bias = 0.f, loss = 0.f, weight = 0.f;
#pragma unroll
    for (int w = 0; w < WORK_WARPS; ++w) {
        if (lane < BIASES) bias += scratch[w * WARP_SUMS + 4 + lane];
        loss += scratch[w * WARP_SUMS];
        weight += scratch[w * WARP_SUMS + 1];
    }
    if (lane < OUTPUTS) out.pass(bias);
    out.pass(loss), out.pass(weight);
    if ((threadIdx.x >> 5 & 3) == 0 && lane < BIASES)
        out.store(partial + FIXED(WEIGHT_CHUNKS * CHUNK + bias_slot(LAYERS - 1)) + lane, bias);
    const bool bad = any_of_some(OF_SUMMERS, 128, out.bad());
    if (threadIdx.x == WORKERS) {
        store_tally(buffers.tallies(turn, 0) + blockIdx.x, tagged(loss, turn + 1, bad));
        store_tally(buffers.tallies(turn, 1) + blockIdx.x, tagged(weight, turn + 1, bad));
    }
}

// Where a block stands, in shared memory: of this step, and of the next while some may still read this step's.
struct Standing {
    u64 step;
    u32 skipped;
    int frozen, updated;  // by the step before
};

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

// Sums, update and publication of step `s`, by the workers. Returns whether there was one.
__device__ __forceinline__ bool update_directly(
    int s, u32 turn, float next_rate, const Place& own, const Buffers& buffers, u32 publication, Hyper (&hyper)[2],
    const Standing& before, Standing& standing) {
    float* scratch = (float*)(dynamic_shared + EXCHANGE_AT);
    float* mine = scratch + (threadIdx.x >> 5) * WARP_SUMS;
    const float* partials = buffers.partials_of(turn);
    u8* image = buffers.image(publication);
    Parameter parameter = {};
    if (own.flat >= 0) parameter.load(own.flat);
    const auto tallies = [&] {
        if (threadIdx.x < CHUNK) __threadfence();  // between clearing an image and publishing the one before it
        gather_tallies(buffers, turn, mine + CHUNK);
    };
    if (blockIdx.x < CHUNKS)
        sum_tagged(partials, tag_of(turn), blockIdx.x, mine, tallies);
    else
        tallies();
    if (threadIdx.x == 0) MARK(3)
    sync_workers();
    if (threadIdx.x == 0) MARK(4)
    const StepTotals totals = collect_totals(scratch);
    const bool update = !totals.bad && totals.weight != 0.f;
    for (int chunk = blockIdx.x; chunk < CHUNKS; chunk += gridDim.x) {
        Place place = own;
        if (chunk != blockIdx.x) {
            place.flat = -1;
            if (threadIdx.x < CHUNK) place = locate(chunk, threadIdx.x);
            if (place.flat >= 0) parameter.load(place.flat);
            sync_workers();
            sum_tagged(partials, tag_of(turn), chunk, mine, [] {});
            sync_workers();
        }
        if (place.flat >= 0 && update) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WORK_WARPS; ++w) sum += scratch[w * WARP_SUMS + threadIdx.x];
            Hyper h = hyper[s & 1];
            h.scale = 1.f / totals.weight;
            parameter.value = update_rule(h, parameter.value, sum, parameter.first, parameter.second);
            publish(image, place, parameter.value);
            parameter.mean = average(h.ema_decay, parameter.mean, parameter.value);
            parameter.store(place.flat);
        }
    }
    if (threadIdx.x == 0) MARK(5)
    set_next_hyper(hyper[s + 1 & 1], next_rate, before.step + update + 1);
    if (threadIdx.x == CHUNK + 32)
        standing = {
            before.step + update, before.skipped + (totals.bad && !ENGINE.stop_on_nonfinite),
            totals.bad && ENGINE.stop_on_nonfinite, update};
    if (blockIdx.x == 0 && threadIdx.x == CHUNK + 96)
        ENGINE.results[s] = StepResult{
            collect_loss(scratch), totals.weight,
            !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
    return update;
}

// What the host says of a step, on its way to shared memory; by one thread.
__device__ __forceinline__ void ask_info(StepInfo& info, int s, int end) {
    if (s < end)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(&info)), "l"(ENGINE.steps + s)
                     : "memory");
    else
        info = {0.f, 0, 0};
}
__device__ __forceinline__ void await_info() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Blocks that nobody waits for must not fall behind: those without rows or parameters, or all with nothing published.
__device__ __forceinline__ bool meets(bool updated) { return !updated || gridDim.x > (PRODUCERS > CHUNKS ? PRODUCERS : CHUNKS); }

}  // namespace narrow

// Steps [begin, end) of the table.
extern "C" __global__ void __launch_bounds__(narrow::BLOCK_THREADS, 1) narrow_role_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, u8* images) {
    using namespace narrow;
    const Raw raw = {inputs, targets, labels, weights, index};
    const Buffers buffers = {partials, images};
    Control& control = *ENGINE.control;
    GridBarrier barrier(&control.barrier);
    u32 turn = *turn_of(buffers);
    __shared__ Hyper hyper[2];
    __shared__ Standing standings[2];
    __shared__ __align__(16) StepInfo infos[4];  // a step finds its own, the next and the one after next, on its way
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    open_gates();
    write_ones<0>();
    load_scales((float*)(dynamic_shared + SCALES_AT));
    for_each_own([&](const Place& place) {
        for (int i = 1; i < IMAGES; ++i) clear(buffers.image(i), place);
    });
    publish_all(buffers.image(0));
    if (threadIdx.x < 2 && begin < end) {
        set_hyper(hyper[threadIdx.x], ENGINE.steps[begin].rate, 1.f, control.step + 1);
        infos[begin + threadIdx.x & 3] =
            begin + (int)threadIdx.x < end ? ENGINE.steps[begin + threadIdx.x] : StepInfo{0.f, 0, 0};
    }
    if (threadIdx.x == 0) standings[begin & 1] = {control.step, control.skipped, control.frozen != 0, 0};
    publish_operands();
    barrier.wait();

    if (group == CHAINS) {
#if NARROW_SUM_REGISTERS
        take_registers<NARROW_SUM_REGISTERS>();
#endif
        SumRole role;
        role.tile = shared_address(dynamic_shared) + TILES_AT;
        role.turns = 0;
#pragma unroll 1
        for (int s = begin; s < end && !standings[s & 1].frozen; ++s, ++turn) {
            if (blockIdx.x < PRODUCERS) {
                float* partial = buffers.partials_of(turn) + (i64)blockIdx.x * PARTIAL_STRIDE;
                Tagged out(tag_of(turn));
                MARK(10)
                role.run(infos[s & 3].rows, partial, out);
                MARK(11)
                send_tally(buffers, turn, partial, out);
                MARK(12)
            }
            __syncthreads();
            MARK(13)
            if (meets(standings[s + 1 & 1].updated)) barrier.wait();
        }
        return;
    }
#if NARROW_CHAIN_REGISTERS
    give_registers<NARROW_CHAIN_REGISTERS>();
#endif
    u32 publication = 0;
    Place own = {0, 0, 0, -1, 0};
    if (threadIdx.x < CHUNK && blockIdx.x < CHUNKS) own = locate(blockIdx.x, threadIdx.x);
    ChainRole role(raw, group);
    if (begin < end) role.stage(infos[begin & 3]);
    load_image(buffers.image(0), dynamic_shared);
    publish_operands();
    sync_workers();
    int s = begin;
#pragma unroll 1
    for (; s < end && !standings[s & 1].frozen; ++s, ++turn) {
        if (threadIdx.x == CHUNK + 32) ask_info(infos[s + 2 & 3], s + 2, end);
        u8* next_image = buffers.image(publication + 2);
        if (own.flat >= 0) clear(next_image, own);
        if (gridDim.x < CHUNKS) for_each_own([&](const Place& place) { clear(next_image, place); });
        if (blockIdx.x < PRODUCERS) {
            Totals totals = {};
            MARK(20 + 10 * group)
            role.run(infos[s & 3], infos[s + 1 & 3], totals);
            MARK(21 + 10 * group)
            hand_over(totals, (float*)(dynamic_shared + EXCHANGE_AT));
        }
        const bool updated = update_directly(
            s, turn, infos[s + 1 & 3].rate, own, buffers, publication + 1, hyper, standings[s & 1],
            standings[s + 1 & 1]);
        publication += updated;
        if (updated && blockIdx.x < PRODUCERS && s + 1 < end) {
            load_image(buffers.image(publication), dynamic_shared);
            publish_operands();
        }
        if (threadIdx.x == CHUNK + 32) await_info();
        if (threadIdx.x == 0) MARK(6)
        __syncthreads();
        if (threadIdx.x == 0) MARK(7)
        if (meets(updated)) barrier.wait();
    }
    const Standing& last = standings[s & 1];
    // A block's own parameters are final, and all blocks have read the counters long ago.
    copy_weights();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        for (; s < end; ++s) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
        control.step = last.step;
        control.skipped = last.skipped;
        control.frozen = last.frozen;
        *turn_of(buffers) = turn;
    }
}
