"""The rows of every batch, in the sample order, from memory or from the files as they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distmlp.data.advice import advice
from distmlp.data.batches import Singles, WindowBatches, read_rows
from distmlp.data.held import Held, narrow_roles
from distmlp.data.lanes import Lanes
from distmlp.data.memory import available_bytes
from distmlp.data.pool import Pool, Task, reader_threads
from distmlp.data.resident import Resident, load
from distmlp.data.rows import Rows
from distmlp.data.scratch import Scratch, helps
from distmlp.data.shards import Shards
from distmlp.data.streaming import Source, Window, Windows, room_rows
from distmlp.data.values import blame
from distmlp.errors import ConfigError, SystemUnfitError
from distmlp.order import Order, owned_streams

if TYPE_CHECKING:
    from distmlp.comm.world import World

RESIDENT_SHARE = 0.5  # of the free memory of a rank
HELD_SHARE, HELD_BYTES = 0.05, 1 << 30  # of it, and at most, for narrow columns while the others are streamed
CHUNK_SHARE = 0.25  # of it for decoded chunks while streaming


class _Source(Protocol):
    def batch(self, epoch: int, indices: range) -> Rows: ...


class Feed:
    """This rank's rows of every global batch of `order`.

    `residence`: "host" keeps all own rows in memory, "stream" reads them as they are needed, "auto" decides
    by the free memory (`free_bytes`, of this rank); "device" means that the engine holds the rows (`resident`) and is
    like "auto" here.
    `scratch`: a folder for decoded rows of compressed files that are streamed, see `Scratch`; "": none.
    Nothing is read before the first call that needs rows. Not to be shared between threads.
    """

    def __init__(
        self, shards: Shards, order: Order, world: World, residence: str = "auto", readers: int = 0, scratch: str = ""
    ) -> None:
        if order.streams < world.size:
            raise ConfigError(
                f"data.streams = {order.streams}: fewer than the {world.size} ranks; give every rank a stream at least"
            )
        self.shards, self.order = shards, order
        self.streams = owned_streams(order.streams, world.size, world.rank)
        self.wait_seconds = 0.0
        self._lanes = Lanes(order, self.streams)
        self._pool = Pool(reader_threads(readers, world.local_size))
        self.free_bytes = available_bytes() // max(1, world.local_size)
        self._source: _Source | None = None
        self._scratch_folder = scratch
        self._scratch: Scratch | None = None
        self.residence = "host" if residence == "host" or self._fits(residence) else "stream"
        if residence == "host" and self.resident_bytes() > self.free_bytes:
            raise SystemUnfitError(
                f'data.residence = "host": rank {world.rank} on {world.host} needs {self.resident_bytes():,} bytes, '
                f'but {self.free_bytes:,} are free for it; use "auto" or "stream", more hosts, or more memory'
            )

    def _fits(self, residence: str) -> bool:
        return residence != "stream" and self.resident_bytes() <= RESIDENT_SHARE * self.free_bytes

    def resident_bytes(self) -> int:
        """Bytes that all own rows take, in their stored dtypes."""
        return self._lanes.count * self.shards.row_bytes

    def batch(self, epoch: int, number: int) -> Rows:
        """This rank's rows of global batch `number` of `epoch`, in position order; there may be none.

        The arrays hold until the next call: they may be views of a buffer. Raises DataError naming file,
        dataset and rows where the files turn out to be damaged.
        """
        indices = self._lanes.of_batch(number)
        if not len(indices):
            return self.shards.empty(0)
        start = time.perf_counter()
        if self._source is None:
            self._source = self._open()
        rows = self._source.batch(epoch, indices)
        if not isinstance(self._source, Resident):
            self.wait_seconds += time.perf_counter() - start
        return rows

    def _open(self, windows: bool = False) -> _Source:
        if self.residence == "host":
            start = time.perf_counter()
            source = Resident(self.shards, self._lanes, self._pool, windows)
            self.wait_seconds += time.perf_counter() - start
            return source
        fits = WindowBatches.memory_bytes(self.shards, self._lanes) <= RESIDENT_SHARE * self.free_bytes
        if not fits:
            self.shards.keep_chunks(int(CHUNK_SHARE * self.free_bytes))
            return Singles(self.shards, self._lanes, self._pool)
        return WindowBatches(self._files(), self.shards, self._lanes, self._pool)

    def _files(self) -> Source:
        """What windows are read from: the files, or what they were decoded into; narrow columns from memory."""
        self.shards.keep_chunks(int(CHUNK_SHARE * self.free_bytes))
        rows = self.order.owned_rows(self.streams)
        if self._scratch_folder and helps(self.shards) and self._scratch is None:
            self._scratch = Scratch(self.shards, rows, self._scratch_folder, self._pool)
        source = self._scratch or self.shards
        roles = narrow_roles(self.shards, len(rows), min(HELD_BYTES, int(HELD_SHARE * self.free_bytes)))
        return Held(source, self.shards, rows, roles, self._pool) if roles else source

    def room_rows(self) -> int:
        """Rows of the arrays of one window, for `windows`."""
        return room_rows(self._lanes, self.shards.row_bytes)

    def windows(
        self, rooms: Sequence[Window], convert: Callable[[Any, int, int], object], places: bool = True
    ) -> Windows:
        """Own rows window by window, for an engine that picks the rows of a batch itself. See `Windows`."""
        if self.residence == "host" and self._source is None:
            self._source = self._open(windows=True)
        source = self._source if isinstance(self._source, Resident) else self._files()
        return Windows(source, self._lanes, self._pool, rooms, convert, places)

    def fits_memory(self, size_bytes: int) -> bool:
        """Whether buffers of that size leave enough memory to others."""
        return size_bytes <= RESIDENT_SHARE * self.free_bytes

    def read_own(self, first: int, out: Rows, then: Callable[[], object]) -> Task:
        """Start to read own rows from number `first` on, in storage order, into `out`; `then()` in that thread."""
        row = self.order.owned_rows(self.streams).start + first

        def read() -> None:
            self.shards.read_into(row, row + len(out), out)
            then()

        return self._pool.submit(read)

    @property
    def threads(self) -> int:
        """Reader threads."""
        return self._pool.threads

    def advice(self) -> list[str]:
        """What may be wrong with the data: labels that do not count from 0, layouts that do not suit streaming."""
        lowest = self.shards.lowest_label
        told = [f"data: the lowest class label is {lowest}, so that no row is of class 0"] if lowest else []
        return told + self._layouts()

    def _layouts(self) -> list[str]:
        """What slows this rank's reading down and how to mend it."""
        if self.residence != "stream" or (self._scratch_folder and helps(self.shards)):
            return []
        found = {text.split(";")[0]: text for file in self.shards.files if (text := advice(file["inputs"]))}
        return [f"data: {text}" for text in found.values()]

    def resident(self) -> Rows:
        """All own rows in storage order, for an upload to a device. Raises DataError."""
        if isinstance(self._source, Resident):
            return self._source.rows
        return load(self.shards, self.order.owned_rows(self.streams), self._pool)

    def blame(self, epoch: int, number: int) -> str | None:
        """Where this rank's rows of a batch hold NaN, infinity or numbers too large for float32 arithmetic.

        "file rows 3, 7: inputs hold nan", or None when every value is ordinary.
        """
        indices = self._lanes.of_batch(number)
        if not len(indices):
            return None
        place = self._lanes.rows(epoch, indices)
        rows = self.shards.empty(len(place))
        read_rows(self.shards, place, rows)
        return blame(self.shards, place, rows)

    def close(self) -> None:
        """Stop reading ahead and let the threads end."""
        if isinstance(self._source, WindowBatches | Singles):
            self._source.close()
        self._source = None
        self._pool.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
