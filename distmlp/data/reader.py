"""Rows of one dataset of one file, read with plain system calls from the place its `Layout` names.

Threads read at the same time: a read holds neither the interpreter nor any lock of the HDF5 library, except
to decode chunks whose filters only that library knows.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distmlp.data import aio
from distmlp.data.decode import DamagedChunk, decode, room
from distmlp.data.direct import Direct
from distmlp.data.layout import Layout
from distmlp.data.openfiles import OpenFiles
from distmlp.errors import DataError

PIECE_BYTES = 256 << 20  # of one read call


class RowReader:
    """Reads rows of any number of datasets; safe to share between threads.

    `cache_bytes` bounds what is kept of decoded chunks that a read used only in part.
    """

    def __init__(self, cache_bytes: int = 64 << 20) -> None:
        self._files = OpenFiles()
        self._cache = _ChunkCache(cache_bytes)

    def read(self, layout: Layout, start: int, stop: int, out: NDArray) -> None:
        """Rows `start` to `stop - 1` into `out` (rows, width) of any numeric dtype.

        Raises DataError naming file, dataset and rows.
        """
        try:
            if layout.checksums is None:
                self._read(layout, start, stop, out)
            else:
                self._read_verified(layout, start, stop, out)
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "; raise the limit: ulimit -n 4096" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise DataError(f"{layout.where(start, stop)}: cannot be read: {reason.lower()}{hint}") from None
        except MemoryError:
            raise DataError(f"{layout.where(start, stop)}: not enough memory to read them") from None

    def read_runs(self, layout: Layout, runs: NDArray, out: NDArray) -> None:
        """Stretches of rows, first row and rows each (runs, 2), one after the other into `out`. Raises as `read`."""
        direct = layout.checksums is None and out.dtype == layout.dtype and out.flags.c_contiguous and out.size
        spans = layout.spans(runs) if direct else None
        if spans is not None and self._fill_spans(layout.path, spans, out):
            return
        done = 0
        for first, count in runs.tolist():
            self.read(layout, first, first + count, out[done : done + count])
            done += count

    def _fill_spans(self, path: str, spans: NDArray, out: NDArray) -> bool:
        """Offset and bytes in a file, one after the other, into `out`; False where that does not work at once.

        Next to nothing is done beside the system calls: the interpreter is what reader threads wait for.
        """
        try:
            file = self._files.get(path)
            return aio.read_spans(file.handle, spans, out)
        except OSError:
            return False

    def read_direct(self, reads: Sequence[tuple[Direct, NDArray]]) -> bool:
        """The stretches of each, one after the other, into its array; False where that does not work at once, for
        whatever reason."""
        if not all(out.flags.c_contiguous and out.size for _, out in reads):
            return False
        held, wanted = [], []  # files are not to be closed meanwhile
        try:
            for read, out in reads:
                handles: NDArray | int = read.handle
                if read.handle < 0:
                    files = [self._files.get(path) for path in read.paths]
                    held += files
                    handles = np.array([file.handle for file in files])[read.place]
                wanted.append((handles, read.spans, out))
            return aio.read_all(wanted)
        except OSError:
            return False

    def _read(self, layout: Layout, start: int, stop: int, out: NDArray) -> None:
        if layout.kind == "chunked":
            self._read_chunked(layout, start, stop, out.reshape((stop - start, *layout.shape[1:])))
        elif layout.plain:
            self._read_plain(layout, start, stop, out)
        elif layout.kind == "inline":
            out[...] = np.frombuffer(layout.inline, layout.dtype).reshape(layout.rows, layout.width)[start:stop]
        else:
            out[...] = np.frombuffer(layout.fill, layout.dtype)[0]

    def _read_plain(self, layout: Layout, start: int, stop: int, out: NDArray) -> None:
        self._read_raw(layout, layout.offset + start * layout.row_bytes, out, start, stop)

    def _read_raw(self, layout: Layout, offset: int, out: NDArray, start: int, stop: int) -> None:
        """Rows that lie together at `offset` into `out`, straight where its type and order allow."""
        direct = out.dtype == layout.dtype and out.flags.c_contiguous
        raw = out if direct else np.empty(out.shape, layout.dtype)
        if not self._fill(layout.path, offset, raw.data.cast("B") if raw.size else memoryview(b"")):
            raise DataError(
                f"{layout.where(start, stop)}: the file ends before them; it was cut off after it was checked"
            )
        if not direct:
            out[...] = raw

    def _fill(self, path: str, offset: int, view: memoryview) -> bool:
        file = self._files.get(path)
        done = 0
        while done < len(view):
            count = os.preadv(file.handle, [view[done : done + PIECE_BYTES]], offset + done)
            if count == 0:
                return False
            done += count
        return True

    def _read_chunked(self, layout: Layout, start: int, stop: int, out: NDArray) -> None:
        rows = layout.chunk[0]
        grid = layout.grid
        for row in range(start // rows, -(-stop // rows)):
            first, last = max(start, row * rows), min(stop, (row + 1) * rows)
            if layout.chunks_are_rows:
                self._read_rows_of_chunk(layout, row, first, last, out[first - start : last - start])
                continue
            whole = first == row * rows and last == min(layout.rows, (row + 1) * rows)
            for rest in itertools.product(*map(range, grid[1:])):
                chunk = self._chunk(layout, (row, *rest), keep=not whole)
                places = [slice(k * step, min(size, (k + 1) * step)) for k, step, size in
                          zip(rest, layout.chunk[1:], layout.shape[1:], strict=True)]  # fmt: skip
                inside = [slice(0, place.stop - place.start) for place in places]
                out[(slice(first - start, last - start), *places)] = chunk[
                    (slice(first - row * rows, last - row * rows), *inside)
                ]

    def _read_rows_of_chunk(self, layout: Layout, row: int, first: int, last: int, out: NDArray) -> None:
        """A part of an unfiltered chunk without the rest of it."""
        assert layout.chunks is not None
        where = layout.where(first, last)
        offset, size = int(layout.chunks[row]["offset"]), int(layout.chunks[row]["size"])
        if offset < 0:
            out[...] = np.frombuffer(layout.fill, layout.dtype)[0]
            return
        if size != layout.chunk_bytes:
            raise DataError(f"{where}: the chunk is damaged: {size} bytes, expected {layout.chunk_bytes}")
        self._read_raw(layout, offset + (first - row * layout.chunk[0]) * layout.row_bytes, out, first, last)

    def _chunk(self, layout: Layout, cell: tuple[int, ...], keep: bool) -> NDArray:
        number = int(np.ravel_multi_index(cell, layout.grid))
        key = (layout.path, layout.name, number)
        chunk = self._cache.get(key)
        if chunk is None:
            chunk = self._decoded(layout, cell, number, keep)
            if keep:
                self._cache.put(key, chunk)
        return chunk

    def _decoded(self, layout: Layout, cell: tuple[int, ...], number: int, lasting: bool) -> NDArray:
        assert layout.chunks is not None
        offset, size, mask = (int(value) for value in layout.chunks[number])
        if offset < 0:
            return np.broadcast_to(np.frombuffer(layout.fill, layout.dtype)[0], layout.chunk)
        first = cell[0] * layout.chunk[0]
        where = layout.where(first, min(layout.rows, first + layout.chunk[0]))
        stored = room("stored", size)
        if not self._fill(layout.path, offset, stored.data if size else memoryview(b"")):
            raise DataError(f"{where}: the file ends before them; it was cut off after it was checked")
        try:
            return decode(layout, stored, mask, lasting)
        except DamagedChunk as damage:
            raise DataError(f"{where}: the chunk is damaged: {damage}; copy or make the file again") from None

    def _read_verified(self, layout: Layout, start: int, stop: int, out: NDArray) -> None:
        """Read whole checksum blocks around the rows, in bounded pieces, and compare."""
        assert layout.checksums is not None
        step = layout.checksum_rows
        for block in range(start // step, -(-stop // step)):
            low, high = block * step, min(layout.rows, (block + 1) * step)
            raw = np.empty((high - low, layout.width), layout.dtype)
            self._read(layout, low, high, raw)
            if zlib.crc32(raw.data.cast("B")) != int(layout.checksums[block]):
                raise DataError(
                    f"{layout.where(low, high)}: the checksum does not match: the values were damaged after "
                    "the file was written; copy or make the file again"
                )
            first, last = max(start, low), min(stop, high)
            out[first - start : last - start] = raw[first - low : last - low]


class _ChunkCache:
    """Decoded chunks, the least recently used dropped first; bounded in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._chunks: OrderedDict[tuple[str, str, int], NDArray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str, int]) -> NDArray | None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
            return chunk

    def put(self, key: tuple[str, str, int], chunk: NDArray) -> None:
        with self._lock:
            if key in self._chunks or chunk.nbytes > self._limit:
                return
            self._chunks[key] = chunk
            self._held += chunk.nbytes
            while self._held > self._limit:
                self._held -= self._chunks.popitem(last=False)[1].nbytes
