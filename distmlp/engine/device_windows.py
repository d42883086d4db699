"""Streamed rows on the device, whole windows of the sample order at a time: read into pinned memory as they lie in the
files, copied as they are, and put into the order of training by the kernel's index table alone."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import TYPE_CHECKING

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.data.streaming import Window
from distmlp.engine import compile as compiler
from distmlp.engine.affine import Affine
from distmlp.engine.device_memory import Arena, Ledger
from distmlp.engine.device_rows import OwnRows, RawPlace, Staging
from distmlp.engine.module import Module
from distmlp.engine.plan_task import Buffer

if TYPE_CHECKING:
    from distmlp.data.feed import Feed

ROOMS = 3, 16  # windows in pinned memory, least and most: one on its way to the device, the others being read
ROOM_BYTES = 256 << 20  # of pinned memory, where that is enough for the least
LAUNCH_BYTES, LAUNCH_WINDOWS = 128 << 20, 8  # that one launch takes at most, but one window at least
POLL_SECONDS = 1e-4  # how often to look for a window to send while a launch runs


class _Room(Window):
    """A window in pinned memory."""

    def __init__(self, staging: Staging) -> None:
        super().__init__(staging.rows)
        self.staging = staging


class WindowRows:
    """As many windows as one launch may touch, and those of the next, which are copied meanwhile.

    A place on the device is written after the last launch that reads it, a pinned room after its copy has ended. The
    index table holds every place's part twice, so that windows which follow one another are one stretch of it.
    """

    def __init__(self, feed: Feed, targets: Affine, own: OwnRows, ledger: Ledger, capability: int) -> None:
        self._feed, self._own, self._ledger = feed, own, ledger
        self._rows = feed.room_rows()
        count, self._at_once, self._slots = _counts(feed, own)
        rooms = [_Room(Staging(feed, self._rows, targets)) for _ in range(count)]
        self._windows = feed.windows(rooms, lambda room, first, stop: room.staging.convert(first, stop), places=False)
        self._span = self._windows.span
        sizes = {name: part.nbytes for name, part in rooms[0].staging.host.items()}
        # For rows beyond a batch the targets of row 0 are loaded, and not used: something must have been written there.
        buffers = [Buffer(name, self._slots * size, zeroed=name == "targets") for name, size in sizes.items()]
        self._place = RawPlace(
            Arena([*buffers, Buffer("index", 2 * 4 * self._slots * self._span)], ledger.stream)
        )  # fmt: skip
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._used = [cupy.cuda.Event(disable_timing=True) for _ in range(self._slots)]
        for event in self._used:
            event.record(ledger.stream)
        free = cupy.cuda.runtime.memGetInfo()[0]
        where = "in host memory" if feed.residence == "host" else "streamed"
        self.about = (
            f"rows {where}: all of them are {feed.resident_bytes():,} bytes, {free:,} are free on the GPU, "
            f"{feed.free_bytes:,} on the host; {count * sum(sizes.values()):,} bytes of pinned memory"
        )
        self._there: dict[int, cupy.cuda.Event] = {}  # number of a window → when it has arrived
        self._ordered: set[int] = set()  # of those the ones with an index table
        self._needed = range(0)
        module = Module(compiler.cubin("order.cu", {}, capability), ledger)
        self._fill_window = module.kernel("fill_window", max(1, min(1024, -(-self._rows // 128))), 128)

    @staticmethod
    def bytes_needed(feed: Feed, own: OwnRows, outputs: int) -> tuple[int, int]:
        """Bytes on the host and on the device."""
        rows = feed.room_rows()
        each = rows * (feed.shards.row_bytes + 4 * (outputs + 2))
        rooms, _, slots = _counts(feed, own)
        return rooms * each, slots * (each + 8 * rows)

    def steps_at_once(self, epoch: int, first: int, most: int) -> int:
        """How many of the next `most` batches one launch may take: those that begin in the next window, or in the next
        few where these are there already."""
        bounds = self._own.bounds(first, most)
        window = self._windows.number(epoch, int(bounds[0]))
        there = next((k for k in range(1, self._at_once) if window + k not in self._there), self._at_once)
        end = (bounds[0] // self._span + there) * self._span
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
            self._bring(number)
            self._ledger.stream.wait_event(self._there[number])
            if number not in self._ordered:
                self._order(number)
        begin = self._needed.start % self._slots * self._span
        return self._place, begin + bounds[:-1] - first // self._span * self._span

    def _bring(self, number: int) -> None:
        """Have a window on the device. Waiting counts from when the GPU has nothing else to do."""
        if number not in self._there:
            self._windows.ask(number)
        while not self._ledger.stream.done and not (number in self._there and self._there[number].done):
            if number not in self._there:
                self._windows.read_on(number)
                if self._windows.ready(number):
                    self._send(number)
                    continue
            sleep(POLL_SECONDS)
        started = perf_counter()
        if number not in self._there:
            self._windows.get(number)
            self._send(number)
        self._there[number].synchronize()  # here and not on the device alone, so that all waiting is counted
        self._feed.wait_seconds += perf_counter() - started

    def launched(self) -> None:
        """The launch that reads what `prepare` gave is queued."""
        for number in self._needed:
            self._used[number % self._slots].record(self._ledger.stream)
        self._send_ahead()

    def meanwhile(self) -> None:
        """Send the windows that follow as soon as they are read, until the launch has ended."""
        while not self._ledger.stream.done and self._send_ahead():
            sleep(POLL_SECONDS)

    def _send_ahead(self) -> bool:
        """Send what has been read of the windows that there is a place for; whether more is to be done later."""
        following = range(self._needed.stop, self._needed.start + self._slots)
        for number in following:
            if number not in self._there:
                self._windows.read_on(number)
                if not self._windows.ready(number):
                    return True
                self._send(number)
        self._windows.read_on(following.stop)
        return self._windows.waiting

    def _send(self, number: int) -> None:
        """Queue the copies of a window that is filled."""
        room, slot = self._windows.get(number), number % self._slots
        assert isinstance(room, _Room)
        self._copies.wait_event(self._used[slot])
        for name, array in room.staging.host.items():
            start, each = self._place.arena.address(name) + slot * array.nbytes, array[:1].nbytes
            for rows in self._windows.filled(number):
                self._ledger.upload(start + rows.start * each, array[rows.start : rows.stop], self._copies)
        arrived = cupy.cuda.Event(disable_timing=True)
        arrived.record(self._copies)
        self._there = {n: event for n, event in self._there.items() if n % self._slots != slot}
        self._there[number] = arrived
        self._ordered &= self._there.keys()
        self._windows.drop(number, arrived)

    def _order(self, number: int) -> None:
        """Queue the making of the index table of a window; full windows of the order fill as many rows as positions."""
        order, streams, windows = self._own.order, self._own.streams, self._windows
        slot, index, epoch = number % self._slots, self._place.arena.address("index"), number // windows.count
        for place, first in windows.parts(number):
            at = 4 * (slot * self._span + first)
            self._fill_window(
                np.int64(order.rows), np.uint64(order.seed), np.int32(order.streams), np.int32(order.shuffle),
                np.int32(streams.start), np.int32(len(streams)), np.uint32(epoch & 0xFFFFFFFF), np.int64(place),
                np.int64(windows.size(place)), np.int64(windows.stride), np.int64(slot * self._rows + first),
                np.uint64(index + at), np.uint64(index + at + 4 * self._slots * self._span),
            )  # fmt: skip
        self._ordered.add(number)


def _counts(feed: Feed, own: OwnRows) -> tuple[int, int, int]:
    """Windows in pinned memory, windows that one launch takes at most, windows on the device."""
    window_bytes = feed.room_rows() * max(1, feed.shards.row_bytes)
    rooms = max(ROOMS[0], min(ROOMS[1], ROOM_BYTES // window_bytes))
    at_once = max(1, min(LAUNCH_WINDOWS, LAUNCH_BYTES // window_bytes))
    touched = (max(1, own.largest_batch) + feed.room_rows() - 2) // feed.room_rows() + 1  # by one batch, at worst
    return rooms, at_once, touched - 1 + 2 * at_once
