"""The learning rate at a step. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distmlp.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, base: float, step: int, total_steps: int) -> float:
    """Learning rate of `step` (counted from 0) in a run of `total_steps`.

    Warm-up rises linearly over `warmup_steps` and reaches `base` with its last step; the schedule's own
    progress runs over what follows. `one_cycle` (Smith & Topin 2018) has its rise built in.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return base * (step + 1) / warmup
    span = max(1, total_steps - warmup)
    progress = min(1.0, (step - warmup) / span)  # 0 at the first step after warm-up, towards 1
    match schedule.name:
        case "constant":
            return base
        case "step":
            return base * schedule.factor ** ((step - warmup) // schedule.step_size)
        case "cosine":
            floor = schedule.final_fraction
            return base * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
        case "linear":
            return base * (1.0 + (schedule.final_fraction - 1.0) * progress)
        case "one_cycle":
            return base * _one_cycle(progress, schedule.peak_at, schedule.final_fraction)
    raise AssertionError(f"unknown schedule {schedule.name!r}")


def _one_cycle(progress: float, peak_at: float, final_fraction: float) -> float:
    start = 1.0 / 25.0
    if progress < peak_at:
        return start + (1.0 - start) * 0.5 * (1.0 - math.cos(math.pi * progress / peak_at))
    fall = (progress - peak_at) / (1.0 - peak_at)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * fall))


def learning_rates(schedule: ScheduleConfig, base: float, first: int, count: int, total_steps: int) -> NDArray:
    """Learning rates of steps `first` to `first + count - 1`, float64 (count,)."""
    return np.array([learning_rate(schedule, base, first + i, total_steps) for i in range(count)])
