"""Streamed rows on the device, whole windows of the sample order at a time: read into pinned memory as they lie in the
files, copied as they are, and put into the order of training by the kernel's index table alone."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.data.streaming import Window
from distmlp.engine.affine import Affine
from distmlp.engine.device_memory import Arena, Ledger, pinned
from distmlp.engine.device_rows import OwnRows, RawPlace, Staging
from distmlp.engine.plan_task import Buffer

if TYPE_CHECKING:
    from distmlp.data.feed import Feed

ROOMS = 3  # windows in pinned memory: one on its way to the device, two being read


class _Room(Window):
    """A window in pinned memory."""

    def __init__(self, staging: Staging, span: int) -> None:
        super().__init__(staging.rows)
        self.staging = staging
        self.index = pinned(4 * span)[: 4 * span].view(np.uint32)


class WindowRows:
    """As many windows as a batch may touch, and one more that is copied meanwhile.

    A place on the device is written after the last launch that reads it, a pinned room after its copy has ended. The
    index table holds every place's part twice, so that windows which follow one another are one stretch of it.
    """

    def __init__(self, feed: Feed, targets: Affine, own: OwnRows, ledger: Ledger) -> None:
        self._feed, self._own, self._ledger = feed, own, ledger
        self._rows = feed.window_rows()
        rooms = [_Room(Staging(feed, self._rows, targets), self._rows) for _ in range(ROOMS)]
        self._windows = feed.windows(rooms, lambda room, first, stop: room.staging.convert(first, stop))
        self._span, self._slots = self._windows.span, _touched(own, self._windows.span) + 1
        sizes = {name: part.nbytes for name, part in rooms[0].staging.host.items()}
        buffers = [Buffer(name, self._slots * size) for name, size in sizes.items()]
        self._place = RawPlace(
            Arena([*buffers, Buffer("index", 2 * 4 * self._slots * self._span)], ledger.stream)
        )  # fmt: skip
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._used = [cupy.cuda.Event(disable_timing=True) for _ in range(self._slots)]
        for event in self._used:
            event.record(ledger.stream)
        self.about = f"rows streamed, {ROOMS * sum(sizes.values()):,} bytes of pinned memory"
        self._there: dict[int, cupy.cuda.Event] = {}  # number of a window → when it has arrived
        self._needed = range(0)

    @staticmethod
    def bytes_needed(feed: Feed, own: OwnRows, outputs: int) -> tuple[int, int]:
        """Bytes on the host and on the device."""
        rows = feed.window_rows()
        each = rows * (feed.shards.row_bytes + 4 * (outputs + 2))
        return ROOMS * each, (_touched(own, rows) + 1) * (each + 8 * rows)

    def steps_at_once(self, epoch: int, first: int, most: int) -> int:
        """How many of the next `most` batches one launch may take: those that begin in the same window."""
        bounds = self._own.bounds(first, most)
        end = (bounds[0] // self._span + 1) * self._span
        return max(1, int(np.searchsorted(bounds[:-1], end)))

    def prepare(self, epoch: int, numbers: range) -> tuple[RawPlace, NDArray]:
        """Bring the windows of batches `numbers` to the device; `first` of each batch in the index table.

        Raises DataError where the files are damaged.
        """
        bounds = self._own.bounds(numbers.start, len(numbers))
        first, stop = int(bounds[0]), int(bounds[-1])
        if first == stop:
            return self._place, np.zeros(len(numbers), np.int64)
        windows = self._windows
        self._needed = range(windows.number(epoch, first), windows.number(epoch, stop - 1) + 1)
        for number in self._needed:
            if number not in self._there:
                started = perf_counter()
                windows.get(number)
                self._feed.wait_seconds += perf_counter() - started
                self._send(number)
            self._ledger.stream.wait_event(self._there[number])
        following = self._needed.stop
        if following not in self._there:
            windows.read_on(following)
            if windows.ready(following):
                self._send(following)
                windows.read_on(following + 1)
        begin = self._needed.start % self._slots * self._span
        return self._place, begin + bounds[:-1] - first // self._span * self._span

    def _send(self, number: int) -> None:
        """Queue the copies of a window that is filled."""
        room = self._windows.get(number)
        assert isinstance(room, _Room)
        slot, count = number % self._slots, len(room.places)
        np.add(room.places, slot * self._rows, out=room.index[:count], casting="unsafe")
        self._copies.wait_event(self._used[slot])
        for name, array in room.staging.host.items():
            address = self._place.arena.address(name) + slot * array.nbytes
            self._ledger.upload(address, array, self._copies)
        for copy in (slot, slot + self._slots):
            address = self._place.arena.address("index") + 4 * copy * self._span
            self._ledger.upload(address, room.index[:count], self._copies)
        arrived = cupy.cuda.Event(disable_timing=True)
        arrived.record(self._copies)
        self._there = {n: event for n, event in self._there.items() if n % self._slots != slot}
        self._there[number] = arrived
        self._windows.drop(number, arrived)

    def launched(self) -> None:
        """The launch that reads what `prepare` gave is queued."""
        for number in self._needed:
            self._used[number % self._slots].record(self._ledger.stream)


def _touched(own: OwnRows, span: int) -> int:
    """Windows that one batch may touch, wherever it begins."""
    return (max(1, own.largest_batch) + span - 2) // span + 1
