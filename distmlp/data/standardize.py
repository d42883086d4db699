"""Mean and deviation of the training set, by a parallel pass that gives the same bits at any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distmlp.data.pool import Pool, reader_threads
from distmlp.standardization import Standardization

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.data.shards import Shards

SEGMENTS = 256  # at most; cut by the number of rows alone, so that no sum depends on the ranks
SEGMENT_ROWS = 4096
PIECE_BYTES = 4 << 20
REGRESSION = ("mse", "mae", "huber")

Moments = tuple[NDArray, NDArray, NDArray]  # count, mean, sum of squared deviations: float64 (columns,)


def measure(shards: Shards, world: World, which: str, readers: int = 0) -> Standardization:
    """Population mean and deviation of every column of the inputs, and with "both" of regression targets.

    Values that are not finite are not counted; a constant column has deviation 1. Collective. `which`:
    "none", "inputs", "both". Raises DataError on all ranks alike where rows cannot be read.
    """
    if which == "none":
        return Standardization()
    both = which == "both" and shards.loss in REGRESSION
    pool = Pool(reader_threads(readers, world.local_size))
    try:
        mine = world.agree(lambda: _own_segments(shards, world.rank, world.size, both, pool), "measuring the data")
    finally:
        pool.close()
    segments: dict[int, list[Moments]] = {}
    for part in world.all_gather(mine):
        segments.update(part)
    sides: list[tuple[NDArray, NDArray] | None] = [None, None]
    for side in range(1 + both):
        total = segments[0][side]
        for number in range(1, len(segments)):
            total = merge(total, segments[number][side])
        sides[side] = _deviation(total)
    return Standardization(*sides)


def _own_segments(shards: Shards, rank: int, ranks: int, both: bool, pool: Pool) -> dict[int, list[Moments]]:
    count = max(1, min(SEGMENTS, -(-shards.rows // SEGMENT_ROWS)))
    bounds = [shards.rows * k // count for k in range(count + 1)]
    own = range(count * rank // ranks, count * (rank + 1) // ranks)
    tasks = {k: pool.submit(_segment, shards, bounds[k], bounds[k + 1], both) for k in own}
    for task in tasks.values():
        task.settle()
    return {k: task.result() for k, task in tasks.items()}


def _segment(shards: Shards, start: int, stop: int, both: bool) -> list[Moments]:
    step = max(1, PIECE_BYTES // max(1, 8 * (shards.features + shards.outputs)))
    total: list[Moments] = []
    for first in range(start, stop, step):
        rows = shards.read(first, min(first + step, stop))
        sides = (rows.inputs, rows.targets) if both else (rows.inputs,)
        piece = [moments(side) for side in sides]
        total = [merge(a, b) for a, b in zip(total, piece, strict=True)] if total else piece
    return total


def moments(values: NDArray) -> Moments:
    """Count, mean and sum of squared deviations of the finite values of every column; two passes, float64."""
    values = values.astype(np.float64)  # (rows, columns)
    finite = np.isfinite(values)
    if finite.all():
        count = np.full(values.shape[1], float(len(values)))
    else:
        count = finite.sum(axis=0, dtype=np.float64)
        values[~finite] = 0.0
    mean = values.sum(axis=0) / np.maximum(count, 1.0)
    values -= mean
    if not finite.all():
        values[~finite] = 0.0
    return count, mean, np.einsum("rc,rc->c", values, values)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of two sets together (Chan, Golub & LeVeque 1979)."""
    count = a[0] + b[0]
    safe = np.maximum(count, 1.0)
    gap = b[1] - a[1]
    return count, a[1] + gap * (b[0] / safe), a[2] + b[2] + gap * gap * (a[0] * b[0] / safe)


def _deviation(total: Moments) -> tuple[NDArray, NDArray]:
    """Mean and deviation; 1 for columns whose variance is no more than rounding (as in scikit-learn)."""
    count, mean, squares = total
    variance = squares / np.maximum(count, 1.0)
    tiny = np.finfo(np.float64).eps
    constant = variance <= count * tiny * variance + (count * mean * tiny) ** 2
    return mean, np.where(constant, 1.0, np.sqrt(variance))
