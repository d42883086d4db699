"""Training rows on the device: all of them, uploaded once, or a few steps' worth at a time through pinned buffers."""

from __future__ import annotations

from collections import deque
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.engine import compile as compiler
from distmlp.engine import layout
from distmlp.engine.affine import Affine
from distmlp.engine.device_memory import Arena, Ledger, pinned
from distmlp.engine.module import Module
from distmlp.engine.plan_task import Buffer
from distmlp.order import Order

if TYPE_CHECKING:
    from distmlp.data.feed import Feed
    from distmlp.data.pool import Task
    from distmlp.data.shards import Rows

PIECE_BYTES = 64 << 20  # of streamed rows that one launch takes
READ_BYTES = 16 << 20  # of resident rows that one thread reads at a time
INDEX_ROWS = 1 << 32  # the index table counts in uint32


class OwnRows:
    """Which positions of an epoch are this rank's. Pure; `order.cuh` holds the same formulas."""

    def __init__(self, order: Order, streams: range) -> None:
        self.order, self.streams = order, streams
        self.count = len(order.owned_rows(streams))
        self.bounds = lru_cache(maxsize=64)(self._bounds)  # asked for several times a launch, the same every epoch

    def _bounds(self, first: int, count: int) -> NDArray:
        """Own rows before each of batches `first` to `first + count`, int64 (count + 1,): batch i has those between."""
        positions = np.minimum(np.arange(first, first + count + 1) * self.order.batch, self.order.rows)
        full, partial = np.divmod(positions, self.order.streams)
        return full * len(self.streams) + np.clip(partial - self.streams.start, 0, len(self.streams))

    @property
    def largest_batch(self) -> int:
        full, partial = divmod(min(self.order.batch, self.order.rows), self.order.streams)
        return full * len(self.streams) + min(len(self.streams), partial)


class HostParts:
    """Rows as the kernels take them: inputs raw, targets standardized float32 or labels int32, weights float32."""

    def __init__(self, rows: Rows, targets: Affine) -> None:
        inputs = np.ascontiguousarray(rows.inputs)
        self.inputs = inputs if inputs.dtype.kind in "buif" and inputs.dtype.itemsize <= 8 else inputs.astype("f4")
        self.labels = np.ascontiguousarray(rows.targets, np.int32) if rows.targets.ndim == 1 else None
        self.targets = None
        if self.labels is None:
            self.targets = targets.apply(rows.targets, np.empty(rows.targets.shape, np.float32))
        self.weights = None if rows.weights is None else np.ascontiguousarray(rows.weights, np.float32).reshape(-1)

    def items(self) -> list[tuple[str, NDArray]]:
        parts = {"inputs": self.inputs, "targets": self.targets, "labels": self.labels, "weights": self.weights}
        return [(name, part) for name, part in parts.items() if part is not None]


class Staging:
    """Pinned room for `count` rows of a feed as the kernels take them. What needs no conversion is read into it."""

    def __init__(self, feed: Feed, count: int, targets: Affine) -> None:
        formats = HostParts(feed.shards.empty(0), targets).items()
        self.host: dict[str, NDArray] = {name: pinned_array(count, part) for name, part in formats}
        raw = feed.shards.empty(0)
        others = [np.empty((count, *part.shape[1:]), part.dtype) for part in raw.parts[1:]]
        names = ["labels" if raw.targets.ndim == 1 else "targets", "weights"]
        self._asis = {"inputs"}  # read where they are sent from
        for place, (name, part) in enumerate(zip(names, others, strict=False)):
            sent = self.host.get(name)
            plain = name != "targets" or targets.identity
            if sent is not None and plain and sent.dtype == part.dtype and sent.shape == part.shape:
                others[place] = sent
                self._asis.add(name)
        self.rows = type(raw)(self.host["inputs"], *others)
        self._targets = targets

    def convert(self, first: int, stop: int) -> None:
        """Rows `first` to `stop - 1` of `rows` have been read: the rest of them, as the kernels take it."""
        if self._asis == self.host.keys():
            return
        parts = HostParts(self.rows.map(lambda array: array[first:stop]), self._targets)
        for name, part in parts.items():
            if name not in self._asis:
                self.host[name][first:stop] = part


def pinned_array(count: int, like: NDArray) -> NDArray:
    """Page-locked (count, …) for rows such as those of `like`."""
    size = count * int(np.prod(like.shape[1:], dtype=np.int64)) * like.dtype.itemsize
    return pinned(size)[:size].view(like.dtype).reshape(count, *like.shape[1:])


def raw_type(sample: Rows) -> str:
    """Kind and bytes of the inputs as they go to the device, such as "f4"."""
    return layout.RAW_TYPES[layout.raw_type(HostParts(sample, Affine(None, np.float32)).inputs.dtype)]


class RawPlace:
    """Addresses of raw rows on the device, as the arguments of `train_steps`."""

    NAMES = ("inputs", "targets", "labels", "weights", "index")

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.arguments = tuple(np.uint64(arena.address(name)) for name in self.NAMES)


class ResidentRows:
    """All own rows and the index table of one epoch. Files are read piece by piece: no host holds all of them."""

    def __init__(self, feed: Feed, targets: Affine, own: OwnRows, ledger: Ledger, capability: int) -> None:
        self._own, self._epoch, self._ledger = own, -1, ledger
        self._ends_epoch = False
        if hasattr(feed, "read_own"):
            parts = HostParts(feed.shards.empty(1), targets).items()
            buffers = [Buffer(name, own.count * part.nbytes) for name, part in parts]
        else:  # rows that are in memory anyway
            parts = HostParts(feed.resident(), targets).items()
            buffers = [Buffer(name, part.nbytes) for name, part in parts]
        self.place = RawPlace(Arena([*buffers, Buffer("index", 4 * own.count)], ledger.stream))
        if hasattr(feed, "read_own"):
            self._read(feed, targets)
        else:
            for name, part in parts:
                ledger.upload(self.place.arena.address(name), part)
        size = own.count * (4 + sum(part[:1].nbytes for _, part in parts))
        self.about = f"rows on the GPU: {size:,} bytes, {cupy.cuda.runtime.memGetInfo()[0]:,} stay free"
        module = Module(compiler.cubin("order.cu", {}, capability), ledger)
        self._fill_index = module.kernel("fill_index", max(1, min(1024, -(-own.count // 256))), 256)

    def _read(self, feed: Feed, targets: Affine) -> None:
        """All rows by way of a few pinned pieces, each read by one thread while others are copied."""
        rows = max(1, min(self._own.count, READ_BYTES // max(1, feed.shards.row_bytes)))
        pieces = [Staging(feed, rows, targets) for _ in range(min(feed.threads + 2, -(-self._own.count // rows)))]
        starts = list(range(0, self._own.count, rows))
        under_way: deque[tuple[int, Task]] = deque()
        copied = [cupy.cuda.Event(disable_timing=True) for _ in pieces]
        for number in range(len(starts) + len(pieces)):
            turn = number % len(pieces)
            if len(under_way) == len(pieces) or (number >= len(starts) and under_way):
                first, task = under_way.popleft()
                task.result()
                piece = pieces[first // rows % len(pieces)]
                count = min(rows, self._own.count - first)
                for name, array in piece.host.items():
                    address = self.place.arena.address(name) + first * array[:1].nbytes
                    self._ledger.upload(address, array[:count])
                copied[first // rows % len(pieces)].record(self._ledger.stream)
            if number < len(starts):
                if number >= len(pieces):
                    copied[turn].synchronize()
                count, piece = min(rows, self._own.count - starts[number]), pieces[turn]
                part = piece.rows.map(lambda array, count=count: array[:count])
                under_way.append(
                    (starts[number], feed.read_own(starts[number], part, partial(piece.convert, 0, count)))
                )
        self._ledger.stream.synchronize()  # before the pinned pieces go

    def steps_at_once(self, epoch: int, first: int, most: int) -> int:
        """How many of the next `most` batches one launch may take."""
        return most

    @staticmethod
    def bytes_needed(feed: Feed, own: OwnRows, outputs: int) -> int:
        """Bytes of all own rows on the device; rather too many."""
        return feed.resident_bytes() + 4 * (2 + outputs) * own.count + (1 << 20)

    def prepare(self, epoch: int, numbers: range) -> tuple[RawPlace, NDArray]:
        """Where the rows of batches `numbers` are; `first` of each in the index table."""
        if epoch != self._epoch:
            self._fill(epoch)
        self._ends_epoch = numbers.stop == self._own.order.batches_per_epoch
        return self.place, self._own.bounds(numbers.start, len(numbers))[:-1]

    def _fill(self, epoch: int) -> None:
        """The index table of `epoch`, behind whatever is queued."""
        order, streams = self._own.order, self._own.streams
        if order.shuffle or self._epoch < 0:
            self._fill_index(
                np.int64(order.rows), np.uint64(order.seed), np.int32(order.streams), np.int32(order.shuffle),
                np.int32(streams.start), np.int32(len(streams)), np.uint32(epoch & 0xFFFFFFFF),
                np.int64(self._own.count), np.uint64(self.place.arena.address("index")),
            )  # fmt: skip
        self._epoch = epoch

    def meanwhile(self) -> None:
        """While the launch runs: the next epoch's table, so that its first launch need not wait for one."""
        if self._ends_epoch:
            self._fill(self._epoch + 1)
            self._ends_epoch = False

    def launched(self) -> None:
        """The launch that reads what `prepare` gave is queued."""


class StreamedRows:
    """Two places on the device with a pinned buffer each: one is filled while the other is computed with.

    A pinned buffer is written again only after its copy has ended, a place only after the launch that reads it.
    """

    about = "rows streamed batch by batch"

    def __init__(self, feed: Feed, sample: Rows, targets: Affine, own: OwnRows, ledger: Ledger) -> None:
        self._feed, self._targets, self._own, self._ledger = feed, targets, own, ledger
        parts = HostParts(sample, targets)
        self._formats = {name: (part.shape[1:], part.dtype) for name, part in parts.items()}
        row_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._formats.values())
        batch = max(1, own.largest_batch)
        self.steps_per_launch = max(1, min(64, PIECE_BYTES // (batch * row_bytes)))
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._slots = [_Slot(self._formats, batch * self.steps_per_launch, ledger.stream) for _ in range(2)]
        self._turn = 0

    def steps_at_once(self, epoch: int, first: int, most: int) -> int:
        """How many of the next `most` batches one launch may take."""
        return min(most, self.steps_per_launch)

    def prepare(self, epoch: int, numbers: range) -> tuple[RawPlace, NDArray]:
        """Read batches `numbers` and send them on their way; `first` of each counts from the start of the place.

        Raises DataError where the files are damaged.
        """
        slot = self._slots[self._turn]
        slot.copied.synchronize()
        firsts, filled = [], 0
        for number in numbers:
            parts = HostParts(self._feed.batch(epoch, number), self._targets)
            firsts.append(filled)
            count = len(parts.inputs)
            for name, part in parts.items():
                slot.host[name][filled : filled + count] = part
            filled += count
        self._copies.wait_event(slot.used)
        for name, array in slot.host.items():
            self._ledger.upload(slot.place.arena.address(name), array[:filled], self._copies)
        slot.copied.record(self._copies)
        self._ledger.stream.wait_event(slot.copied)
        return slot.place, np.array(firsts)

    def meanwhile(self) -> None:
        """While the launch runs."""

    def launched(self) -> None:
        """The launch that reads what `prepare` gave is queued."""
        self._slots[self._turn].used.record(self._ledger.stream)
        self._turn ^= 1


class _Slot:
    def __init__(
        self, formats: dict[str, tuple[tuple[int, ...], np.dtype]], rows: int, stream: cupy.cuda.Stream
    ) -> None:
        self.host = {}
        for name, (shape, dtype) in formats.items():
            self.host[name] = pinned_array(rows, np.empty((0, *shape), dtype))
        self.place = RawPlace(Arena([Buffer(name, array.nbytes) for name, array in self.host.items()], stream))
        self.copied, self.used = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
        self.copied.record(stream)
        self.used.record(stream)


def fits_device(needed: int) -> bool:
    """Whether `needed` bytes leave a tenth of the free device memory to others."""
    return needed <= 0.9 * cupy.cuda.runtime.memGetInfo()[0]
