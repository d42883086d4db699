// A step of the resident kernel, made of its phases.
#pragma once
#include "resident_steps.cuh"

namespace resident {

__device__ __forceinline__ bool Steps::decide_late() {
    const Update look = update_of(k, largest_sum(weight));
    copy_wait<0>();
    __syncthreads();
    bool bad = update_all(look);
#if RESIDENT_RANKS > 1
    if (blockIdx.x == 0 && warp_id() == 0) {
        const float loss = take_outcome(k, loss_of_rank());
        bad |= lane_id() == 0 && !is_finite(loss);
    }
#else
    bad |= !is_finite((float)block_sum((double)loss));
#endif
    if (bad) atomicOr(not_finite(k), 1u);
    barrier.wait();
    bad = __ldcg(not_finite(k)) != 0 || !is_finite(weight);
    if (bad || weight == 0.f) return !bad;
    ++progress.step;
    ++updates;
    large |= update_all(update_of(k));
    tell_ready(BOTTOM_READY);
    tell_ready(TOP_READY);
    return true;
}

__device__ __forceinline__ void Steps::step(int s) {
    forward<0>();
    report(s);
    catch_up();
    feed_next();
    loss = 0.f;
    forward_above<1>();
    if (computes) {
        output();
        if constexpr (HIDDEN > 2) backward<HIDDEN - 2>();
    }
    copy_wait<0>();
#if RESIDENT_RANKS > 1
    const bool doubted = arrive();
    weight = sum_of_weights(raw, info().rows);
    if (threadIdx.x == 32) tell_ranks(k, weight, doubted);
#else
    arrive();
#endif
    if (threadIdx.x == BLOCK_THREADS - 96) infos[k + 4 & 7] = step_info(s + 4, end);
    set_hyper_of_step();
#if RESIDENT_RANKS == 1
    weight = sum_of_weights(raw, info().rows);
    scale = 1.f / weight;
#endif
    Gradient<0> bottom;
    Gradient<AT_ONCE - 1> top;
    bottom.ask_inputs(exchange, k);
    if (PRODUCT != BF16) ask_rows();
#if RESIDENT_RANKS > 1
    clear_sent(k);
    const bool unsure = await();
    if (blockIdx.x == 0 && warp_id() == WARPS - 1) send_outcome(k, loss_of_rank());
    forget_addresses();
    if (blockIdx.x == 0 && threadIdx.x == 0) *not_finite(k + 3) = 0u;  // of the last step
    bottom.stage_errors(exchange, k, 0);
    if (AT_ONCE > 1) {
        top.ask_inputs(exchange, k);
        top.stage_errors(exchange, k, FIXED(staged_bytes(0)));
    }
    bias.ask(exchange, k);
    {
        Gradient<0>::Errors errors;
        typename Gradient<AT_ONCE - 1>::Errors errors_above;
        look_until([&] {
            bottom.look_at_errors(k, errors);
            if (AT_ONCE > 1) top.look_at_errors(k, errors_above);
            bias.look_at_others(k);
            return all_written(errors) && (AT_ONCE == 1 || all_written(errors_above)) && all_written(bias.others);
        });
        bottom.stage(errors, 0);
        if (AT_ONCE > 1) top.stage(errors_above, FIXED(staged_bytes(0)));
        __syncwarp();
    }
    bool finite = true;
    // Where a rank is lost, it goes on.
    const bool sure = ((hear() && !unsure) | ranks_seen.any_lost()) || !ranks_seen.meet(barrier);
    if (!sure && ranks_seen.doubts & FAILED) {
        copy_wait<0>();
        progress.frozen = true;
        status = NOT_RUN;
        ++k;
        return;
    }
    if (sure) {
        ++progress.step;
#else
    const bool sure = !await() && weight >= 0.0625f && weight < 1e30f;
    forget_addresses();
    if (blockIdx.x == 0 && threadIdx.x == 0) *not_finite(k + 3) = 0u;  // of the last step
    bool finite = true;
    if (sure) {
        bottom.stage_errors(exchange, k, 0);
        bias.ask(exchange, k);
        if (AT_ONCE > 1) {
            top.stage_errors(exchange, k, FIXED(staged_bytes(0)));
            top.ask_inputs(exchange, k);
        }
        ++progress.step;
#endif
        ++updates;
        bias.update(update_of(k));
        copy_wait<0>();
        __syncthreads();
        large |= bottom.update(exchange, update_of(k), 0);
        if (AT_ONCE > 1) large |= top.update(exchange, update_of(k), FIXED(staged_bytes(0)));
        tell_ready(BOTTOM_READY);
        pending = true;
    } else {
        finite = decide_late();
    }
    if (!finite) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    }
    status = finite ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT;
    ++k;
}

}  // namespace resident
