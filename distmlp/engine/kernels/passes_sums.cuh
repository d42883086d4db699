// Sums over blocks, pass by pass, and what is done with them: the update, or the flat gradient.
#pragma once
#include "narrow_ranks.cuh"
#include "narrow_step.cuh"
#include "passes_chain.cuh"

namespace narrow {

// How far a block is: the sums of pass `p` of step `number` are there. No branch, as products may be under way.
__device__ __forceinline__ u32 mark_of(u32 number, int p) { return number * PASSES + p; }
__device__ __forceinline__ void tell_sums(u32* marks, u32 mark, bool really) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.release.gpu.global.u32 [%0], %1; }" ::"l"(marks + blockIdx.x),
        "r"(mark), "r"((int)really)
        : "memory");
}
// Until all producers are as far. Every thread waits for some of them.
__device__ __forceinline__ void await_sums(const u32* marks, u32 mark, int count) {
    for (int p = threadIdx.x; p < count; p += BLOCK_THREADS)
        while ((int)(load_acquire(marks + p) - mark) < 0) {
        }
    __syncthreads();
}

constexpr int AT_ONCE = BLOCK_THREADS / CHUNK;  // chunks

// A thread's parameter of a turn, on its way while sums are waited for.
struct Own {
    Place place;
    Parameter parameter;

    __device__ __forceinline__ void load(int turn) {
        const int own = blockIdx.x + (AT_ONCE * turn + (threadIdx.x >> 7)) * gridDim.x;
        place.flat = -1;
        if (own < CHUNKS) place = locate(own, threadIdx.x & 127);
        if (NARROW_DIRECT && place.flat >= 0) parameter.load(place.flat);
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
            x[i] = p + SHARES * i < count ? load_last(source + (i64)(p + SHARES * i) * PARTIAL_STRIDE)
                                          : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
            sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
        }
    }
    return sum;
}

// This thread's element of the block's chunks of `turn`, summed over `count` producers.
__device__ __forceinline__ float sum_of_turn(const float* partials, int turn, int count) {
    float* scratch = (float*)(dynamic_shared + SCRATCH_AT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x + AT_ONCE * turn * gridDim.x;
    const int chunks = first + gridDim.x < CHUNKS ? AT_ONCE : 1, mine = threadIdx.x >> 7;
    const float* source = partials + first * CHUNK + 4 * lane;
    float4 part;
    if (chunks == AT_ONCE)
        part = sum_of_chunk<WARPS / AT_ONCE>(source + warp % AT_ONCE * gridDim.x * CHUNK, warp / AT_ONCE, count);
    else
        part = sum_of_chunk<WARPS>(source, warp, count);
    *(float4*)(scratch + warp * WARP_SUMS + 4 * lane) = part;
    __syncthreads();
    float sum = 0.f;
    for (int w = mine; w < WARPS; w += chunks) sum += scratch[w * WARP_SUMS + (threadIdx.x & 127)];
    return sum;
}

// The pass that the first `chunks` chunks are complete with.
template <int P = 0>
__device__ __forceinline__ int complete_with(int chunks) {
    if constexpr (P < PASSES - 1) return FIXED(pass_chunks(P)) >= chunks ? P : complete_with<P + 1>(chunks);
    return PASSES - 1;
}

// f(place, parameter, gradient summed over `count` producers) for this block's chunks. The first ones are added up before
// all blocks have gone through their last pass. `ranks` joins them and the totals; returned: whether all could take part.
template <class Ranks, class F>
__device__ __forceinline__ bool for_each_sum(
    const Buffers& buffers, int s, u32 number, int count, StepTotals& totals, Ranks& ranks, const F& f) {
    float* scratch = (float*)(dynamic_shared + SCRATCH_AT);
    const float* partials = buffers.partials_of(0);
    Own own;
    own.load(0);
    __syncthreads();  // `scratch` has been read
    const int p = complete_with(AT_ONCE * gridDim.x);
    const auto at = [](int turn) {
        return (blockIdx.x + (AT_ONCE * turn + (threadIdx.x >> 7)) * gridDim.x) * CHUNK + (threadIdx.x & 127);
    };
    float sum;
    if (p < PASSES - 1) {
        await_sums((const u32*)buffers.partials_of(1), mark_of(number, p), count);
        sum = sum_of_turn(partials, 0, count);
        if (own.place.flat >= 0) ranks.send(at(0), sum);
    }
    await_producers(buffers, s, number, count, scratch + (threadIdx.x >> 5) * WARP_SUMS + CHUNK);
    __syncthreads();
    totals = collect_totals(scratch);
    if (p == PASSES - 1) {
        sum = sum_of_turn(partials, 0, count);
        if (own.place.flat >= 0) ranks.send(at(0), sum);
    }
    const bool all = ranks.agree(totals, scratch, NARROW_PEERS ? ENGINE.steps[s].rows : 0);
    for (int turn = 0;;) {
        if (own.place.flat >= 0) f(own.place, own.parameter, all, ranks.take(at(turn), sum));
        if (blockIdx.x + AT_ONCE * ++turn * gridDim.x >= CHUNKS) break;
        own.load(turn);
        __syncthreads();  // `scratch` has been read
        sum = sum_of_turn(partials, turn, count);
        if (own.place.flat >= 0) ranks.send(at(turn), sum);
    }
    __syncthreads();
    return all;
}

// Sums, update and publication of step `s`; a barrier must follow.
__device__ __noinline__ void update_directly(
    int s, u32 number, int count, Buffers buffers, const Hyper& hyper, Progress& progress) {
    StepTotals totals;
    Sums ranks(number);
    const auto update = [&](const Place& place, Parameter& parameter, bool all, float sum) {
        if (!all || totals.bad || totals.weight == 0.f) return;
        step_parameter(parameter, place, sum, hyper, totals.weight, buffers.image(0));
    };
    const bool all = for_each_sum(buffers, s, number, count, totals, ranks, update);
    if (threadIdx.x == 0) count_step(progress, totals, all);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ENGINE.results[s] = result_of(totals, ranks.loss((float*)(dynamic_shared + SCRATCH_AT)), all);
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
    int s, u32 number, int rows, int count, Buffers buffers) {
    StepTotals totals;
    OwnSums alone(number);
    for_each_sum(buffers, s, number, count, totals, alone, [&](const Place& place, Parameter&, bool, float sum) {
        ENGINE.gradient[place.flat] = sum;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0)
        leave_tally(s, totals, collect_loss((float*)(dynamic_shared + SCRATCH_AT)), rows);
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
