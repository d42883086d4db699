"""Training rows read while the training goes on, in constant memory, ahead of the steps that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from distmlp.data.lanes import Lanes
from distmlp.data.pool import Pool, Task
from distmlp.data.shards import Rows, Shards
from distmlp.order import WINDOW_ROWS


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


class Windows:
    """Window by window: all own streams' rows of one window stand in memory in the order of training.

    A window's array is (place in the window, stream, …), which is position order, so a batch is a slice.
    Two windows are held: the one in use and the next, which the pool's threads fill stream by stream.
    """

    def __init__(self, shards: Shards, lanes: Lanes, pool: Pool) -> None:
        self._shards, self._lanes, self._pool = shards, lanes, pool
        order = lanes.order
        longest = max(order.stream_length(stream) for stream in (lanes.streams.start, lanes.streams.stop - 1))
        self._places = min(WINDOW_ROWS, max(1, longest))
        self._windows = max(1, -(-longest // WINDOW_ROWS))
        self._free = [shards.empty(self._places, (len(lanes.streams),)) for _ in range(2)]
        self._filling: dict[tuple[int, int], tuple[Rows, list[Task]]] = {}

    @staticmethod
    def memory_bytes(shards: Shards, lanes: Lanes) -> int:
        """Bytes that streaming by windows holds."""
        longest = lanes.order.stream_length(lanes.streams.start)
        return 2 * min(WINDOW_ROWS, longest) * len(lanes.streams) * shards.row_bytes

    def batch(self, epoch: int, indices: range) -> Rows:
        """The rows at own `indices` of `epoch`. Views that hold until the next call."""
        span = WINDOW_ROWS * len(self._lanes.streams)
        parts = []
        for window in range(indices.start // span, -(-indices.stop // span)):
            first = window * span
            begin, end = max(indices.start, first) - first, min(indices.stop, first + span) - first
            rows = self._window(epoch, window)
            part = rows.map(lambda array, begin=begin, end=end: array.reshape(-1, *array.shape[2:])[begin:end])
            parts.append(part if len(indices) <= end - begin else part.map(np.copy))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._shards.empty(0)
        return Rows(*(np.concatenate(arrays) for arrays in zip(*(part.parts for part in parts), strict=True)))

    def _window(self, epoch: int, window: int) -> Rows:
        """Window `window` of `epoch`, filled; starts to fill the one after it."""
        key, following = (epoch, window), (epoch, window + 1)
        if window + 1 == self._windows:
            following = (epoch + 1, 0)
        self._keep({key, following})
        for wanted in (key, following):
            if wanted not in self._filling:
                self._filling[wanted] = self._start(*wanted)
        rows, tasks = self._filling[key]
        for task in tasks:
            task.result()
        return rows

    def _start(self, epoch: int, window: int) -> tuple[Rows, list[Task]]:
        rows = self._free.pop()
        return rows, [
            self._pool.submit(self._fill, epoch, window, lane, rows) for lane in range(len(self._lanes.streams))
        ]

    def _keep(self, keys: set[tuple[int, int]]) -> None:
        for key in set(self._filling) - keys:
            rows, tasks = self._filling.pop(key)
            for task in tasks:
                task.cancelled = True
            for task in tasks:
                task.settle()  # nobody may write into an array that is used anew
            self._free.append(rows)

    def _fill(self, epoch: int, window: int, lane: int, out: Rows) -> None:
        order, stream = self._lanes.order, self._lanes.streams.start + lane
        if window * WINDOW_ROWS >= order.stream_length(stream):
            return
        rows, places = order.window(epoch, stream, window)
        read = self._shards.empty(len(rows))
        for begin, end in runs(rows):
            piece = read.map(lambda array, part=slice(begin, end): array[part])
            self._shards.read_into(int(rows[begin]), int(rows[begin]) + end - begin, piece)
        for target, source in zip(out.parts, read.parts, strict=True):
            target[: len(rows), lane] = source[places]

    def close(self) -> None:
        """Stop reading ahead."""
        self._keep(set())


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
