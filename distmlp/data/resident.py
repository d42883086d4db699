"""Training rows kept in host memory: read once, then gathered batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distmlp.data.lanes import Lanes
from distmlp.data.pool import Pool
from distmlp.data.row_memory import RowMemory, read_open
from distmlp.data.rows import Rows
from distmlp.data.shards import Found, Shards

PIECE_BYTES = 16 << 20
PLAN_ROWS = 1 << 15  # rows whose order is worked out at once


def load(shards: Shards, rows: range, pool: Pool, out: Rows | None = None) -> Rows:
    """Global `rows` in storage order, read by all threads of `pool`. Raises DataError."""
    out = shards.empty(len(rows)) if out is None else out
    step = max(1, PIECE_BYTES // max(1, shards.row_bytes))
    tasks = []
    for start in range(0, len(rows), step):
        piece = slice(start, min(start + step, len(rows)))
        part = out.map(lambda array, piece=piece: array[piece])
        tasks.append(pool.submit(shards.read_into, rows.start + piece.start, rows.start + piece.stop, part))
    for task in tasks:
        task.settle()
    for task in tasks:
        task.result()
    return out


class Resident:
    """All own rows in memory. `windows`: they are to be read window by window rather than batch by batch."""

    def __init__(self, shards: Shards, lanes: Lanes, pool: Pool, windows: bool = False) -> None:
        self._lanes = lanes
        own = lanes.order.owned_rows(lanes.streams)
        self._first = own.start
        self._memory = RowMemory(own, shards.empty(1)) if windows else None
        self.rows = load(shards, own, pool, self._memory.rows if self._memory else None)
        self._plan = (-1, range(0), np.empty(0, np.int64))  # epoch, own indices, their rows here

    def batch(self, epoch: int, indices: range) -> Rows:
        """The rows at own `indices` of `epoch`, copied."""
        planned_epoch, planned, rows = self._plan
        inside = planned.start <= indices.start and indices.stop <= planned.stop
        if planned_epoch != epoch or not inside:
            stop = min(self._lanes.count, max(indices.stop, indices.start + PLAN_ROWS))
            planned = range(indices.start, stop)
            rows = self._lanes.rows(epoch, planned) - self._first
            self._plan = (epoch, planned, rows)
        wanted = rows[indices.start - planned.start : indices.stop - planned.start]
        return self.rows.map(lambda array: array.take(wanted, axis=0))

    def find(self, runs: NDArray) -> Sequence[Found | None]:
        """As `Shards.find`."""
        return self._memory.find(runs) if self._memory else [None] * len(runs)

    def read_runs(self, runs: NDArray, out: Rows, *, found: Found | None = None) -> None:
        """As `Shards.read_runs`, from memory: one call, or one call an array, which holds the interpreter up once."""
        if found and read_open(found, out):
            return
        wanted = rows_of(runs) - self._first
        for target, source in zip(out.parts, self.rows.parts, strict=True):
            source.take(wanted, axis=0, out=target, mode="clip")  # "raise" would copy once more


def rows_of(runs: NDArray) -> NDArray:
    """All rows of stretches, first row and rows each (runs, 2)."""
    firsts, counts = runs.T
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
