"""The arithmetic of scaling studies: block times, speed-up, efficiency, where the time goes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Measured:
    """One measured point. Times are microseconds a step; `None`: not measured apart."""

    mode: str  # "weak" or "strong"
    ranks: int
    batch: int  # global
    step_us: float
    communication_us: float | None = None
    data_wait_us: float | None = None
    other_us: float | None = None

    @property
    def samples_per_second(self) -> float:
        return self.batch * 1e6 / self.step_us

    @property
    def rows_per_rank(self) -> int:
        """Rows of the rank that has most: it sets the pace."""
        return -(-self.batch // self.ranks)


def block_times(steps: Sequence[int], seconds: Sequence[float], warmup_steps: int) -> NDArray:
    """Microseconds a step of every block between two log lines, those that begin in the warm-up left out.

    `steps` and `seconds` are the counters of the lines, in order. Float64; pairs in which a counter did not
    grow (a resumed run starts its clock anew) are no blocks.
    """
    step, second = np.asarray(steps, np.float64), np.asarray(seconds, np.float64)
    done, took, start = np.diff(step), np.diff(second), step[:-1]
    good = (done > 0) & (took > 0) & (start >= warmup_steps)
    return took[good] * 1e6 / done[good]


def speedup(point: Measured, baseline: Measured) -> float:
    """Samples per second relative to the one-rank run."""
    return point.samples_per_second / baseline.samples_per_second


def efficiency(point: Measured, baseline: Measured) -> float:
    """Speed-up per rank; 1 is ideal. For a weak sweep this is the ratio of the step times."""
    return speedup(point, baseline) * baseline.ranks / point.ranks


def time_split(point: Measured) -> dict[str, float | None]:
    """Microseconds of a step by cause; they add up to the step. A cause not measured apart is `None`."""
    known = (point.communication_us or 0.0) + (point.data_wait_us or 0.0) + (point.other_us or 0.0)
    return {
        "compute": max(0.0, point.step_us - known),
        "communication": point.communication_us,
        "data_wait": point.data_wait_us,
        "other": point.other_us,
    }


def derived_communication_us(point: Measured, points: Sequence[Measured]) -> float | None:
    """What a step costs beyond one rank's step over as many rows: communication where it cannot be timed apart.

    `None` when no one-rank point has the same rows a rank.
    """
    for other in points:
        if other.ranks == 1 and other.rows_per_rank == point.rows_per_rank:
            return max(0.0, point.step_us - other.step_us)
    return None


def all_reduce_volume(ranks: int) -> float:
    """What a rank sends in an all-reduce, as a multiple of the buffer: 2 (n - 1) / n."""
    return 2.0 * (ranks - 1) / ranks


def bus_bandwidth(ranks: int, size_bytes: int, us: float) -> float:
    """Bytes per second that each rank's link carried in an all-reduce, comparable with the link's own rate."""
    return all_reduce_volume(ranks) * size_bytes * 1e6 / us


def relative_error(predicted: float, measured: float) -> float:
    """(predicted - measured) / measured."""
    return (predicted - measured) / measured
