"""The arithmetic of scaling studies: timed blocks, speed-up, efficiency, where the time goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Block:
    """Some steps between two log points, and the seconds they took. `None`: not recorded."""

    steps: int
    seconds: float  # wall time of the loop
    communication_seconds: float | None
    wait_seconds: float | None  # for data
    other_seconds: float | None  # outside the engine: logging, bookkeeping


def time_blocks(lines: Sequence[Mapping[str, Any]], steps: int) -> list[Block]:
    """Blocks of `steps` steps from the lines of a `metrics.jsonl`, in order.

    Lines at multiples of `steps` are the bounds (those of epoch ends lie within a block). The time is the wall
    clock's; where a validation lies within, that of the training stretches alone. Bounds between which the
    clock did not run on (a resumed run starts it anew) make no block.
    """
    blocks, start = [], -1
    for end, line in enumerate(lines):
        if line["step"] % steps:
            continue
        if start >= 0 and line["step"] > lines[start]["step"] and line["seconds"] > lines[start]["seconds"]:
            blocks.append(_block(lines[start], lines[start + 1 : end + 1]))
        start = end
    return blocks


def _block(first: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Block:
    wall = lines[-1]["seconds"] - first["seconds"]
    trained = _total(lines, "train_seconds")
    validated = any("validation_loss" in line for line in (first, *lines[:-1]))
    seconds = trained if validated and trained is not None else wall
    return Block(
        lines[-1]["step"] - first["step"],
        seconds,
        _total(lines, "communication_seconds"),
        _total(lines, "data_wait_seconds"),
        None if trained is None else max(0.0, seconds - trained),
    )


def _total(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return float(sum(line[key] for line in lines)) if all(key in line for line in lines) else None


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
