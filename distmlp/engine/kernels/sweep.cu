// Whole training steps of a network of narrow layers whose weight gradients do not fit the registers of one block, in
// one cooperative launch: a block keeps its rows (up to 512) in shared memory and sweeps over them layer by layer.
//
//   per step      its rows forward and backward (sweep_layers.cuh); the weight gradient of one layer at a time in
//                 registers, then out as partial sums; every block adds up some parameters' over all blocks in their
//                 order and updates them; all read the new weights
//
// No sum depends on the order in which blocks run. Only for Hopper.
#include "narrow_step.cuh"
#include "sweep_layers.cuh"

namespace narrow {

static_assert(PRODUCT == BF16, "operands are bfloat16");
static_assert(SWEEP_BYTES == NARROW_SHARED_BYTES, "plan_sweep.py and sweep_layers.cuh agree");

// Inputs of this warpgroup's tiles: to their places, and to be met again.
__device__ __forceinline__ void stage_inputs(const Sweep& sweep, const Raw& raw, const StepInfo& info) {
    const float* scales = (const float*)(dynamic_shared + SWEEP_SCALES_AT);
    const int t = sweep.lane & 3;
    for (int tile = sweep.group; tile < sweep.tiles; tile += GROUPS) {
        const int at = (blockIdx.x + tile * gridDim.x) * 64 + 16 * sweep.warp;
        RowPair rows;
        rows.pick(raw, info, at + (sweep.lane >> 2));
        u32 pairs[2 * columns(0)];
        if (ENGINE.raw_type == RAW_F32) {
            float2 x[2 * columns(0)];
#pragma unroll
            for (int i = 0; i < FIXED(2 * columns(0)); ++i)
                x[i] = load_columns<width(0)>(
                    (const float*)raw.inputs + rows.row[i & 1] * width(0), (i >> 1) * 8 + 2 * t);
#pragma unroll
            for (int i = 0; i < FIXED(2 * columns(0)); ++i) {
                const float2 y = scale_columns<width(0)>(x[i], (i >> 1) * 8 + 2 * t, scales, 0);
                pairs[i] = rows.there[i & 1] ? pack_pair(y.x, y.y) : 0u;
            }
            sweep.put<columns(0)>(sweep.slot(tile), pairs);
            sweep.keep<columns(0)>(sweep.kept_at(0, 0, tile), pairs);
        } else {  // element by element, so that there is one copy of the conversions
            u8* kept = sweep.kept_at(0, 0, tile);
            for (int i = sweep.lane; i < 16 * padded(0); i += 32) {
                const int r = i / padded(0), c = i % padded(0);
                const bool there = at + r < info.rows && c < width(0);
                const Element x = to_element(
                    there ? raw_column(raw.inputs, raw_row(raw, info.first + at + r), c, scales) : 0.f);
                const int where = (c >> 3) * COLUMN_BYTES + (16 * sweep.warp + r) * 16 + (c & 7) * 2;
                *(Element*)(dynamic_shared + tile * SLOT_BYTES + where) = x;
                *(Element*)(kept + where) = x;
            }
        }
    }
}

// f(place, gradient summed over `count` producers) for this block's chunks, four at a time.
template <class F>
__device__ __forceinline__ void for_each_sum(
    const Buffers& buffers, int s, u32 number, int count, StepTotals& totals, const F& f) {
    static_assert(WARPS == 16, "four chunks by four warps each");
    float* scratch = (float*)(dynamic_shared + SCRATCH_AT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* mine = scratch + warp * WARP_SUMS;
    const float* partials = buffers.partials_of(s);
    __syncthreads();  // `scratch` has been read
    await_producers(buffers, s, number, count, mine + CHUNK);
    __syncthreads();
    totals = collect_totals(scratch);
    for (int turn = 0; blockIdx.x + 4 * turn * gridDim.x < CHUNKS; ++turn) {
        const int chunk = blockIdx.x + (4 * turn + (warp & 3)) * gridDim.x;
        if (chunk < CHUNKS) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
            const float* source = partials + chunk * CHUNK + 4 * lane;
            for (int p = warp >> 2; p < count; p += 64) {  // sixteen loads in flight
                uint4 x[16];
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    x[i] = p + 4 * i < count ? load_fresh(source + (i64)(p + 4 * i) * PARTIAL_STRIDE)
                                             : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    sum.x += __uint_as_float(x[i].x), sum.y += __uint_as_float(x[i].y);
                    sum.z += __uint_as_float(x[i].z), sum.w += __uint_as_float(x[i].w);
                }
            }
            *(float4*)(mine + 4 * lane) = sum;
        }
        __syncthreads();
        const int quarter = threadIdx.x >> 7, element = threadIdx.x & 127;
        const int own = blockIdx.x + (4 * turn + quarter) * gridDim.x;
        if (own < CHUNKS) {
            const Place place = locate(own, element);
            float sum = 0.f;
#pragma unroll
            for (int share = 0; share < 4; ++share) sum += scratch[(4 * share + quarter) * WARP_SUMS + element];
            if (place.flat >= 0) f(place, sum);
        }
        __syncthreads();
    }
}

// Sums, update and publication of step `s`; a barrier must follow.
__device__ __forceinline__ void update_directly(
    int s, u32 number, int count, const Buffers& buffers, const Hyper& hyper, Progress& progress) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, [&](const Place& place, float sum) {
        if (totals.bad || totals.weight == 0.f) return;
        Parameter parameter;
        parameter.load(place.flat);
        step_parameter(parameter, place, sum, hyper, totals.weight, buffers.image(0));
    });
    count_step(progress, totals);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ENGINE.results[s] = result_of(totals, collect_loss((float*)(dynamic_shared + SCRATCH_AT)));
}

// The sums to the flat gradient, the tally behind it.
__device__ __forceinline__ void reduce_to_gradient(
    int s, u32 number, const StepInfo& info, int count, const Buffers& buffers) {
    StepTotals totals;
    for_each_sum(buffers, s, number, count, totals, [&](const Place& place, float sum) {
        ENGINE.gradient[place.flat] = sum;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0)
        leave_tally(s, totals, collect_loss((float*)(dynamic_shared + SCRATCH_AT)), info.rows);
}

}  // namespace narrow

// Steps [begin, end) of the table. `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1.
extern "C" __global__ void __launch_bounds__(narrow::BLOCK_THREADS, 1) sweep_steps(
    const void* inputs, const float* targets, const int* labels, const float* weights, const u32* index, int begin,
    int end, int apply_first, float* partials, u8* image, u8* kept) {
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
    __shared__ Hyper hyper;
    const float* scales = (const float*)(dynamic_shared + SWEEP_SCALES_AT);
    load_scales((float*)(dynamic_shared + SWEEP_SCALES_AT));
    if (threadIdx.x < 4) buffers.tallies(threadIdx.x >> 1, threadIdx.x & 1)[blockIdx.x] = 0;
    publish_all(image);
    barrier.wait();
    Sweep sweep;
    sweep.shared = shared_address(dynamic_shared);
    sweep.kept = kept + (i64)blockIdx.x * 2 * LAYERS * TILES * SLOT_BYTES;
    sweep.image = image;
    sweep.lane = threadIdx.x & 31;
    sweep.warp = threadIdx.x >> 5 & 3;
    sweep.group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    const Chain chain = {sweep.shared, scales, 0};
    for (int s = begin; s < end; ++s) {
        if (progress.frozen) {
            if (blockIdx.x == 0 && threadIdx.x == 0) ENGINE.results[s] = StepResult{0., 0.f, NOT_RUN};
            continue;
        }
        const StepInfo info = ENGINE.steps[s];
        const u32 number = s - begin + 1;
        const int all = (info.rows + 63) / 64, count = producers(info.rows);
#if !NARROW_DIRECT
        if (blockIdx.x == 0 && threadIdx.x == 0) control.flags[s + 1 & 1].gradient_not_finite = 0;
#endif
        if (blockIdx.x < count) {
            sweep.tiles = (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
            sweep.ask_weights<0>(sweep.weights_at(0));
            for (int i = threadIdx.x; i < FIXED(IMAGE_BYTES - bias_at(0)) / 4; i += BLOCK_THREADS)
                *(float*)(dynamic_shared + BIASES_AT + 4 * i) = __ldcg((const float*)(image + FIXED(bias_at(0))) + i);
            stage_inputs(sweep, raw, info);
            if (threadIdx.x == BLOCK_THREADS - 1) set_hyper(hyper, info.rate, 1.f, progress.step + 1);
            Totals totals = {};
            Limit limit = {false};
            sweep.forward<0>([&](float (&z)[4 * OUTPUT_COLUMNS], int tile, u32 (&dz)[2 * OUTPUT_COLUMNS]) {
                RowPair rows;
                rows.pick(raw, info, (blockIdx.x + tile * gridDim.x) * 64 + 16 * sweep.warp + (sweep.lane >> 2));
                rows.load(raw);
                Chain::Targets wanted;
                chain.load_targets(raw, rows, wanted);
                if ((sweep.lane & 3) == 0) totals.weight += rows.weight[0] + rows.weight[1];
                chain.output(z, raw, rows, wanted, totals, dz);
            });
            float* partial = buffers.partials_of(s) + (i64)blockIdx.x * PARTIAL_STRIDE;
            sweep.backward<LAYERS - 1>(partial, limit);
            __syncthreads();  // the stages are free
            finish_sums(
                totals, (float*)(dynamic_shared + SCRATCH_AT), partial, buffers.tallies(s, 0) + blockIdx.x,
                buffers.tallies(s, 1) + blockIdx.x, number, limit);
        } else if (threadIdx.x == 0) {
            set_hyper(hyper, info.rate, 1.f, progress.step + 1);
        }
#if NARROW_DIRECT
        update_directly(s, number, count, buffers, hyper, progress);
#else
        reduce_to_gradient(s, number, info, count, buffers);
        barrier.wait();
        if (!ENGINE.deferred) {
            apply_gradient(s, barrier, progress);
            barrier.wait();
            publish_all(image);
        }
#endif
        barrier.wait();
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
