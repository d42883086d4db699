"""Batches of training rows in host memory, read while the training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distmlp.data.lanes import Lanes
from distmlp.data.pool import Pool, Task
from distmlp.data.rows import Rows
from distmlp.data.shards import Shards
from distmlp.data.streaming import Source, Window, Windows, window_rows

HELD = 2  # windows in memory: the one in use and the next


class WindowBatches:
    """Batches out of windows in host memory."""

    def __init__(self, source: Source, shards: Shards, lanes: Lanes, pool: Pool) -> None:
        self._shards, self._lanes = shards, lanes
        rooms = [Window(shards.empty(window_rows(lanes))) for _ in range(HELD)]
        self._windows = Windows(source, lanes, pool, rooms)

    @staticmethod
    def memory_bytes(shards: Shards, lanes: Lanes) -> int:
        """Bytes that streaming by windows holds."""
        return HELD * window_rows(lanes) * shards.row_bytes

    def batch(self, epoch: int, indices: range) -> Rows:
        """The rows at own `indices` of `epoch`, copied."""
        span = self._windows.span
        parts = []
        for window in range(indices.start // span, -(-indices.stop // span)):
            first = window * span
            begin, end = max(indices.start, first) - first, min(indices.stop, first + span) - first
            held = self._windows.get(self._windows.number(epoch, first))
            wanted = held.places[begin:end]
            parts.append(held.rows.map(lambda array, wanted=wanted: array.take(wanted, axis=0)))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._shards.empty(0)
        return Rows(*(np.concatenate(arrays) for arrays in zip(*(part.parts for part in parts), strict=True)))

    def close(self) -> None:
        """Stop reading ahead."""
        self._windows.close()


class Singles:
    """Batch by batch, row by row: for rows so large that whole windows would not fit."""

    AHEAD = 3

    def __init__(self, shards: Shards, lanes: Lanes, pool: Pool) -> None:
        self._shards, self._lanes, self._pool = shards, lanes, pool
        self._queue: deque[tuple[tuple[int, range], Task]] = deque()

    def batch(self, epoch: int, indices: range) -> Rows:
        """The rows at own `indices` of `epoch`."""
        if not self._queue or self._queue[0][0] != (epoch, indices):
            self.close()
            self._ask(epoch, indices)
        _, task = self._queue.popleft()
        rows = task.result()
        self._read_ahead(epoch, indices)
        return rows

    def _ask(self, epoch: int, indices: range) -> None:
        self._queue.append(((epoch, indices), self._pool.submit(self._read, epoch, indices)))

    def _read(self, epoch: int, indices: range) -> Rows:
        out = self._shards.empty(len(indices))
        read_rows(self._shards, self._lanes.rows(epoch, indices), out)
        return out

    def _read_ahead(self, epoch: int, indices: range) -> None:
        last = self._queue[-1][0] if self._queue else (epoch, indices)
        while len(self._queue) < self.AHEAD:
            epoch, stop = last[0], last[1].stop
            if stop >= self._lanes.count:
                epoch, stop = epoch + 1, 0
            last = (epoch, self._lanes.of_batch(self._batch_of(stop)))
            self._ask(*last)

    def _batch_of(self, index: int) -> int:
        return int(self._lanes.positions(np.array([index]))[0]) // self._lanes.order.batch

    def close(self) -> None:
        """Stop reading ahead."""
        while self._queue:
            self._queue.popleft()[1].cancelled = True


def runs(rows: NDArray) -> Iterator[tuple[int, int]]:
    """(begin, end) index ranges of `rows` (ascending) in which rows follow one another."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    yield from zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True)


def read_rows(shards: Shards, rows: NDArray, out: Rows) -> None:
    """Any `rows` (global, in any order) into `out`, one read for each stretch of neighbours."""
    if not len(rows):
        return
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    for begin, end in runs(ascending):
        piece = shards.read(int(ascending[begin]), int(ascending[begin]) + end - begin)
        for target, source in zip(out.parts, piece.parts, strict=True):
            target[order[begin:end]] = source
