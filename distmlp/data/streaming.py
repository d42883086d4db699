"""Training rows read while the training goes on, in constant memory, ahead of the steps that need them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distmlp.data.lanes import Lanes
from distmlp.data.pool import Pool, Task
from distmlp.data.rows import Rows
from distmlp.data.shards import Shards
from distmlp.order import WINDOW_ROWS

HELD = 2  # windows in memory: the one in use and the next
TASK_BYTES = 8 << 20  # that a thread should read at a time
AHEAD = 64  # windows whose blocks are worked out at once, at little more cost than those of one
_NO_PLAN = np.empty((0, 0, 2), np.int64)


class Source(Protocol):
    """Where windows come from: the files, or rows in memory."""

    def read_runs(self, runs: NDArray, out: Rows) -> None: ...


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


class Copy(Protocol):
    """A copy under way, such as an event of CUDA."""

    @property
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...


class Window:
    """Room for one window of all own streams, each stream's rows in the order in which they are read.

    `places`: which of `rows` stands at each position of the window, int64, in position order.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.places = np.empty(0, np.int64)
        self.tasks: list[Task] = []
        self.copy: Copy | None = None  # that reads these arrays, once the window is not needed here any more


class Windows:
    """Whole windows of all own streams, read ahead by the pool's threads: one read for each shuffled block.

    `rooms`: at least two, to be filled in turn. `convert(window, first, stop)` is called by the thread that has read
    rows `first` to `stop - 1` of a window. `places`: whether to work out the order inside the windows.
    """

    def __init__(
        self, source: Source, lanes: Lanes, pool: Pool, rooms: Sequence[Window],
        convert: Callable[[Any, int, int], object] = lambda window, first, stop: None, places: bool = True,
    ) -> None:  # fmt: skip
        self._source, self._lanes, self._pool, self._convert = source, lanes, pool, convert
        self._places, self._plans = places, dict[range, tuple[tuple[int, int], NDArray]]()
        order = lanes.order
        longest = max(order.stream_length(stream) for stream in (lanes.streams.start, lanes.streams.stop - 1))
        self.count = max(1, -(-longest // WINDOW_ROWS))  # windows of an epoch
        self.span = WINDOW_ROWS * len(lanes.streams)  # own positions in one
        self.stride = window_rows(lanes) // len(lanes.streams)  # rows of a stream in the arrays
        self._shares = _shares(len(lanes.streams), pool.threads, rooms)
        self._free = list(rooms)
        self._filling: dict[int, Window] = {}

    def number(self, epoch: int, index: int) -> int:
        """The running number of the window, over all epochs, that holds own position `index` of `epoch`."""
        return epoch * self.count + index // self.span

    def ask(self, number: int) -> None:
        """Window `number` comes next: begin to read it and those that follow, and no others."""
        self._keep(range(number, number + len(self._filling) + len(self._free)))
        self.read_on(number)

    def get(self, number: int) -> Window:
        """Window `number`, filled, after which those that follow are read. Raises DataError."""
        self.ask(number)
        if number not in self._filling:
            window = self._free.pop(0)
            assert window.copy is not None
            window.copy.synchronize()
            self._start(number, window)
        window = self._filling[number]
        for task in window.tasks:
            task.settle()
        for task in window.tasks:
            task.result()
        return window

    def ready(self, number: int) -> bool:
        """Whether `get` of window `number` would neither wait nor raise."""
        return number in self._filling and all(task.succeeded() for task in self._filling[number].tasks)

    def drop(self, number: int, copy: Copy) -> None:
        """Window `number` is not needed any more once `copy` has ended."""
        window = self._filling.pop(number)
        window.copy = copy
        self._free.append(window)

    def read_on(self, number: int) -> None:
        """Read window `number` and those that follow, as far as there is room now."""
        for window in [window for window in self._free if window.copy is None or window.copy.done]:
            while number in self._filling:
                number += 1
            self._free.remove(window)
            self._start(number, window)

    def _start(self, number: int, window: Window) -> None:
        self._filling[number], window.copy = window, None
        window.tasks = [self._pool.submit(self._order, number, window)] if self._places else []
        window.tasks += [self._pool.submit(self._fill, number, *share, window) for share in self._shares]

    def _keep(self, numbers: range) -> None:
        for number in [number for number in self._filling if number not in numbers]:
            window = self._filling.pop(number)
            for task in window.tasks:
                task.cancelled = True
            for task in window.tasks:
                task.settle()  # nobody may write into an array that is used anew
            self._free.append(window)

    def _fill(self, number: int, lanes: range, part: int, parts: int, window: Window) -> None:
        """Read a share of a window: some streams, or one of `parts` parts of a stream."""
        epoch, place = divmod(number, self.count)
        streams = range(self._lanes.streams.start + lanes.start, self._lanes.streams.start + lanes.stop)
        first, planned = self._plans.get(lanes, ((-1, -1), _NO_PLAN))
        if first != (epoch, place // AHEAD):
            planned = self._lanes.order.windows_runs(epoch, streams, place // AHEAD * AHEAD, AHEAD)
            self._plans[lanes] = (epoch, place // AHEAD), planned
        if place % AHEAD < len(planned):
            runs = planned[place % AHEAD]
            low, high = len(runs) * part // parts, len(runs) * (part + 1) // parts
            self._read(runs[low:high], lanes.start * self.stride + int(runs[:low, 1].sum()), window)
            return
        for lane, stream in zip(lanes, streams, strict=True):  # an epoch's last window, which may be short
            runs = self._lanes.order.window_runs(epoch, stream, place)
            low, high = len(runs) * part // parts, len(runs) * (part + 1) // parts
            self._read(runs[low:high], lane * self.stride + int(runs[:low, 1].sum()), window)

    def _read(self, runs: NDArray, first: int, window: Window) -> None:
        count = int(runs[:, 1].sum())
        if count:
            self._source.read_runs(runs, window.rows.map(lambda array: array[first : first + count]))
            self._convert(window, first, first + count)

    def filled(self, number: int) -> list[range]:
        """Which rows of the arrays window `number` fills: all of them, or some of every stream at an epoch's end."""
        left = [self._lanes.order.stream_length(stream) - number % self.count * WINDOW_ROWS
                for stream in self._lanes.streams]  # fmt: skip
        if min(left) >= self.stride:
            return [range(len(left) * self.stride)]
        return [range(lane * self.stride, lane * self.stride + min(self.stride, count))
                for lane, count in enumerate(left) if count > 0]  # fmt: skip

    @property
    def waiting(self) -> bool:
        """Whether there are rooms that nothing is read into, as their copies have not ended."""
        return bool(self._free)

    def _order(self, number: int, window: Window) -> None:
        order, streams = self._lanes.order, self._lanes.streams
        epoch, place = divmod(number, self.count)
        places = np.full((self.stride, len(streams)), -1, np.int64)  # streams may differ in length by one row
        for lane, stream in enumerate(streams):
            own = order.window_places(epoch, stream, place)
            places[: len(own), lane] = lane * self.stride + own
        window.places = places[places >= 0]

    def close(self) -> None:
        """Stop reading ahead."""
        self._keep(range(0))


def _shares(lanes: int, threads: int, rooms: Sequence[Window]) -> list[tuple[range, int, int]]:
    """(streams, part, of so many parts of the stream) for the tasks that read a window.

    Few streams are shared by several threads; of narrow rows a task takes several streams, as long as the windows that
    are read at once give every thread a task: what comes with a task and does not depend on its size stays small.
    """
    parts = max(1, min(16, threads // lanes))
    if parts > 1:
        return [(range(lane, lane + 1), part, parts) for lane in range(lanes) for part in range(parts)]
    stream_bytes = sum(array.nbytes for array in rooms[0].rows.parts) // lanes
    group = max(1, min(TASK_BYTES // max(1, stream_bytes), lanes * (len(rooms) - 1) // threads))
    group = -(-lanes // -(-lanes // group))  # as even as can be
    return [(range(lane, min(lanes, lane + group)), 0, 1) for lane in range(0, lanes, group)]


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


def window_rows(lanes: Lanes) -> int:
    """Rows of the arrays of one window."""
    return len(lanes.streams) * max(1, min(WINDOW_ROWS, lanes.order.stream_length(lanes.streams.start)))


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
