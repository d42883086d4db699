// How a step ends where a grid barrier follows: one parameter's update, what is counted and told, the flat gradient's tally.
#pragma once
#include "narrow_exchange.cuh"

namespace narrow {

// By its gradient summed over rows of weight `weight`.
__device__ __forceinline__ void step_parameter(
    Parameter& parameter, const Place& place, float sum, const Hyper& hyper, float weight, u8* image) {
    Hyper h = hyper;
    h.scale = 1.f / weight;
    parameter.value = update_rule(h, parameter.value, sum, parameter.first, parameter.second);
    publish(image, place, parameter.value);
    parameter.mean = average(h.ema_decay, parameter.mean, parameter.value);
    parameter.store(place.flat);
}

// `all`: every rank took part, else the host will say why.
__device__ __forceinline__ void count_step(Progress& progress, const StepTotals& totals, bool all = true) {
    if (!all) {
        progress.frozen = true;
    } else if (totals.bad) {
        if (ENGINE.stop_on_nonfinite) progress.frozen = true;
        else ++progress.skipped;
    } else if (totals.weight != 0.f) {
        ++progress.step;
    }
}
__device__ __forceinline__ StepResult result_of(const StepTotals& totals, double loss, bool all = true) {
    return {
        loss, totals.weight, !all ? NOT_RUN : !totals.bad ? DONE : ENGINE.stop_on_nonfinite ? NOT_FINITE : LEFT_OUT};
}

// The tally behind the flat gradient, by one thread.
__device__ __forceinline__ void leave_tally(int s, const StepTotals& totals, double loss, int rows) {
    float* tally = ENGINE.gradient + ENGINE.size;
    for (int i = 0; i < TALLY; ++i) tally[i] = 0.f;
    tally[TALLY_LOSS] = totals.bad ? __int_as_float(0x7fc00000) : (float)loss;
    tally[TALLY_WEIGHT] = totals.weight;
    tally[TALLY_ROWS] = (float)rows;
    ENGINE.results[s] = StepResult{loss, totals.weight, DONE};
}

}  // namespace narrow
