"""Training rows read while the training goes on, in constant memory, ahead of the steps that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distmlp.data.lanes import Lanes
from distmlp.data.pool import Pool, Task
from distmlp.data.rows import Rows
from distmlp.order import BLOCK_ROWS, WINDOW_ROWS

TASK_BYTES = 24 << 20  # that a thread should read at a time
BUSY = 8  # threads that have to be: more of them wait for the interpreter rather than for narrow rows
ROOM_BYTES = 64 << 20  # of as many windows as are treated as one, where one of them has less
AHEAD = 64  # windows whose blocks are worked out at once, at little more cost than those of one
PLANS = 3  # of so many windows are kept: those being read, and the next

Share = tuple[range, int, int]  # of the tasks that read a window: streams, one part of each, of so many
Plan = dict[
    tuple[int, Share], list[tuple[NDArray, Any, int]]
]  # stretches of rows, where they are, first row in a window


class Source(Protocol):
    """Where windows come from: the files, or rows in memory."""

    def find(self, runs: NDArray) -> Sequence[Any]: ...
    def read_runs(self, runs: NDArray, out: Rows, *, found: Any = None) -> None: ...


class Copy(Protocol):
    """A copy under way, such as an event of CUDA."""

    @property
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...


class Window:
    """Room for one window of all own streams, each stream's rows in the order in which they are read; or for several
    windows that follow one another, where they are so narrow that what comes with each of them would take longer.

    `places`: which of `rows` stands at each position of the window, int64, in position order.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.places = np.empty(0, np.int64)
        self.tasks: list[Task] = []
        self.copy: Copy | None = None  # that reads these arrays, once the window is not needed here any more


class Windows:
    """Whole windows of all own streams, read ahead by the pool's threads: one read for each shuffled block.

    `rooms`: at least two of one size, to be filled in turn; how many windows of the order are one here depends on that
    size. `convert(window, first, stop)` is called by the thread that has read rows `first` to `stop - 1` of a window.
    `places`: whether to work out the order inside the windows, which are to be single ones of the order.
    """

    def __init__(
        self, source: Source, lanes: Lanes, pool: Pool, rooms: Sequence[Window],
        convert: Callable[[Any, int, int], object] = lambda window, first, stop: None, places: bool = True,
    ) -> None:  # fmt: skip
        self._source, self._lanes, self._pool, self._convert = source, lanes, pool, convert
        self._places = places
        self._plans: dict[tuple[int, int], Task] = {}
        self._single = window_rows(lanes)  # rows of the arrays of one window of the order
        self._together = len(rooms[0].rows) // self._single
        self._windows = _count(lanes)  # of the order in an epoch
        self.count = -(-self._windows // self._together)  # windows of an epoch
        self.span = self._together * WINDOW_ROWS * len(lanes.streams)  # own positions in one
        self.stride = self._single // len(lanes.streams)  # rows of a stream in the arrays of one window of the order
        self._shares = _shares(len(lanes.streams), pool.threads, len(rooms), rooms[0].rows, self._together)
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
        epoch = number // self.count
        for place, first in self.parts(number):
            plan = self._plan(epoch, place // AHEAD)
            for share in self._shares:
                window.tasks.append(self._pool.submit(self._fill, place, first, share, plan, window))

    def _keep(self, numbers: range) -> None:
        for number in [number for number in self._filling if number not in numbers]:
            window = self._filling.pop(number)
            for task in window.tasks:
                task.cancelled = True
            for task in window.tasks:
                task.settle()  # nobody may write into an array that is used anew
            self._free.append(window)

    def parts(self, number: int) -> list[tuple[int, int]]:
        """The windows of the order that window `number` is made of: their numbers in the epoch, and where in the arrays
        the rows of each begin."""
        first = number % self.count * self._together
        return [(first + k, k * self._single) for k in range(min(self._together, self._windows - first))]

    def _fill(self, place: int, begin: int, share: Share, plan: Task, window: Window) -> None:
        """Read a share of window `place` of the order, from row `begin` of the arrays on."""
        for runs, found, first in plan.result().get((place, share), ()):
            count = int(runs[:, 1].sum())
            rows = slice(begin + first, begin + first + count)
            self._source.read_runs(runs, window.rows.map(lambda array, rows=rows: array[rows]), found=found)
            self._convert(window, rows.start, rows.stop)

    def _plan(self, epoch: int, number: int) -> Task:
        """The task that works out what is read for `AHEAD` windows. That for those that follow begins, too: it is done
        before they are asked for, and before what is read for them, as tasks are taken in order."""
        last = (self._windows - 1) // AHEAD
        following = (epoch, number + 1) if number < last else (epoch + 1, 0)
        for key in ((epoch, number), following):
            if key not in self._plans:
                self._plans[key] = self._pool.submit(self._work_out, *key)
        plan = self._plans[epoch, number]
        for old in list(self._plans)[:-PLANS]:
            del self._plans[old]
        return plan

    def _work_out(self, epoch: int, number: int) -> Plan:
        """What is read for every share of `AHEAD` windows."""
        order, streams, first = self._lanes.order, self._lanes.streams, number * AHEAD
        pieces: dict[int, list[tuple[tuple[int, Share], int, NDArray]]] = {}  # those of as many runs are found together
        whole = order.windows_runs(epoch, streams, first, AHEAD)
        each = WINDOW_ROWS // BLOCK_ROWS
        for place, runs in enumerate(whole, first):
            for share in self._shares:
                lanes, part, parts = share
                low, high = each * part // parts, each * (part + 1) // parts
                runs_there = runs[lanes.start * each + low : (lanes.stop - 1) * each + high]
                start = lanes.start * self.stride + low * BLOCK_ROWS
                pieces.setdefault(len(runs_there), []).append(((place, share), start, runs_there))
        for place in range(
            first + len(whole), min(first + AHEAD, self._windows)
        ):  # an epoch's last, not the same for all
            by_lane = order.window_runs(epoch, streams, place)
            for share in self._shares:
                lanes, part, parts = share
                for lane in lanes:
                    low, high = (len(by_lane[lane]) * k // parts for k in (part, part + 1))
                    start = lane * self.stride + int(by_lane[lane][:low, 1].sum())
                    if low < high:
                        pieces.setdefault(high - low, []).append(((place, share), start, by_lane[lane][low:high]))
        plan: Plan = {}
        for alike in pieces.values():
            together = np.stack([runs for _, _, runs in alike])
            for (key, start, _), runs, found in zip(alike, together, self._source.find(together), strict=True):
                plan.setdefault(key, []).append((runs, found, start))
        return plan

    def filled(self, number: int) -> list[range]:
        """Which rows of the arrays window `number` fills: all of them, or some of every stream at an epoch's end."""
        found: list[range] = []
        for place, first in self.parts(number):
            for start, count in self._counts(place):
                if found and found[-1].stop == first + start:
                    found[-1] = range(found[-1].start, first + start + count)
                elif count:
                    found.append(range(first + start, first + start + count))
        return found

    def size(self, place: int) -> int:
        """Own rows in window `place` of the order."""
        return sum(count for _, count in self._counts(place))

    def _counts(self, place: int) -> list[tuple[int, int]]:
        """Where in the arrays of window `place` of the order its rows lie: for every stream the first and how many."""
        lengths = map(self._lanes.order.stream_length, self._lanes.streams)
        return [(lane * self.stride, max(0, min(self.stride, length - place * WINDOW_ROWS)))
                for lane, length in enumerate(lengths)]  # fmt: skip

    @property
    def waiting(self) -> bool:
        """Whether there are rooms that nothing is read into, as their copies have not ended."""
        return bool(self._free)

    def _order(self, number: int, window: Window) -> None:
        order, streams = self._lanes.order, self._lanes.streams
        epoch, place = divmod(number, self.count)
        assert self._together == 1
        places = np.full((self.stride, len(streams)), -1, np.int64)  # streams may differ in length by one row
        for lane, stream in enumerate(streams):
            own = order.window_places(epoch, stream, place)
            places[: len(own), lane] = lane * self.stride + own
        window.places = places[places >= 0]

    def close(self) -> None:
        """Stop reading ahead."""
        self._keep(range(0))


def _shares(lanes: int, threads: int, rooms: int, rows: Rows, together: int) -> list[Share]:
    """(streams, part, of so many parts of the stream) for the tasks that read a window of the order, `together` of
    which are in each of `rooms` rooms for so many `rows`.

    Few streams are shared by several threads; of narrow rows a task takes several streams, as long as the windows that
    are read at once give every thread a task: what comes with a task and does not depend on its size stays small.
    """
    parts = max(1, min(16, threads // lanes))
    if parts > 1:
        return [(range(lane, lane + 1), part, parts) for lane in range(lanes) for part in range(parts)]
    stream_bytes = sum(array.nbytes for array in rows.parts) // together // lanes
    group = max(1, min(TASK_BYTES // max(1, stream_bytes), lanes * together * (rooms - 1) // min(threads, BUSY), lanes))
    group = -(-lanes // -(-lanes // group))  # as even as can be
    return [(range(lane, min(lanes, lane + group)), 0, 1) for lane in range(0, lanes, group)]


def _count(lanes: Lanes) -> int:
    """Windows of the order in an epoch."""
    longest = max(lanes.order.stream_length(stream) for stream in (lanes.streams.start, lanes.streams.stop - 1))
    return max(1, -(-longest // WINDOW_ROWS))


def room_rows(lanes: Lanes, row_bytes: int) -> int:
    """Rows of as many windows of the order as should be treated as one."""
    single = window_rows(lanes)
    return single * max(1, min(ROOM_BYTES // max(1, single * row_bytes), _count(lanes)))


def window_rows(lanes: Lanes) -> int:
    """Rows of the arrays of one window of the order."""
    return len(lanes.streams) * max(1, min(WINDOW_ROWS, lanes.order.stream_length(lanes.streams.start)))
