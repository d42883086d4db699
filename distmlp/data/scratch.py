"""Rows of compressed files, decoded once into a file of a local disk: shuffled reading comes back to every chunk as
often as it has blocks, and decodes it each time where decoded chunks do not all stay in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterator
from typing import IO

from numpy.typing import NDArray

from distmlp.data.direct import OneFile
from distmlp.data.pool import Pool
from distmlp.data.row_memory import read_open
from distmlp.data.rows import Rows
from distmlp.data.shards import ROLES, Found, Shards
from distmlp.errors import DataError, SystemUnfitError

PIECE_BYTES = 16 << 20  # decoded at a time by a thread


def helps(shards: Shards) -> bool:
    """Whether a part of some rows cannot be read without decoding more."""
    layouts = (layout for file in shards.files for layout in file.values())
    return any(layout.kind == "chunked" and not layout.chunks_are_rows for layout in layouts)


class Scratch:
    """A rank's own `rows` (global), contiguous by part: inputs, targets, weights.

    The file has no name, so that it is gone with the process whatever ends it. Raises SystemUnfitError where it does
    not fit `folder`, DataError where the shards are damaged.
    """

    def __init__(self, shards: Shards, rows: range, folder: str, pool: Pool) -> None:
        self._folder, self._first = folder, rows.start
        sizes = [part.nbytes for part in shards.empty(1).parts]  # of a row
        self.size_bytes = len(rows) * sum(sizes)
        self._file = self._open()
        self._rows = OneFile(self._file.fileno(), rows, sizes)
        tasks = [pool.submit(self._unpack, shards, start, stop) for start, stop in _pieces(shards, rows)]
        for task in tasks:
            task.settle()
        for task in tasks:
            task.result()

    def _open(self) -> IO[bytes]:
        try:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (kept open)
            os.posix_fallocate(file.fileno(), 0, max(1, self.size_bytes))
        except OSError as error:
            free = ""
            if os.path.isdir(self._folder):
                state = os.statvfs(self._folder)
                free = f", {state.f_bavail * state.f_frsize:,} are free"
            raise SystemUnfitError(
                f"data.scratch = {self._folder}: {self.size_bytes:,} bytes of this rank's rows do not go there: "
                f"{(error.strerror or str(error)).lower()}{free}; give a folder on a disk with room, or leave it empty"
            ) from None
        return file

    def _unpack(self, shards: Shards, start: int, stop: int) -> None:
        rows = shards.read(start, stop)
        for part, size, begin in zip(rows.parts, self._rows.sizes, self._rows.starts, strict=True):
            view, offset = part.reshape(-1).data.cast("B"), begin + (start - self._first) * size
            while view:
                try:
                    done = os.pwrite(self._file.fileno(), view, offset)
                except OSError as error:
                    raise SystemUnfitError(f"data.scratch = {self._folder}: {error.strerror or error}") from None
                view, offset = view[done:], offset + done

    def find(self, runs: NDArray, roles: Container[str] = ROLES) -> list[Found]:
        """As `Shards.find`."""
        parts = {role: self._rows.find(runs, k) for k, role in enumerate(ROLES[: len(self._rows.sizes)])}
        return [{role: reads[k] for role, reads in parts.items() if role in roles} for k in range(len(runs))]

    def read_found(self, found: Found, out: Rows) -> bool:
        """As `Shards.read_found`."""
        return read_open(found, out)

    def read_runs(self, runs: NDArray, out: Rows, roles: Container[str] = ROLES, *, found: Found | None = None) -> None:
        """As `Shards.read_runs`."""
        if not self.read_found(self.find(runs[None], roles)[0] if found is None else found, out):
            raise DataError(f"data.scratch = {self._folder}: decoded rows cannot be read back; check that disk")

    def close(self) -> None:
        """Give the room back."""
        self._file.close()


def _pieces(shards: Shards, rows: range) -> Iterator[tuple[int, int]]:
    """`rows` in pieces that end where chunks end, so that none is decoded twice but at the ends of `rows`."""
    for number, file in enumerate(shards.files):
        base, end = int(shards.starts[number]), int(shards.starts[number + 1])
        chunk = max([layout.chunk[0] for layout in file.values() if layout.kind == "chunked"], default=1)
        step = max(1, PIECE_BYTES // max(1, shards.row_bytes) // chunk) * chunk
        for start in range(base, end, step):
            first, last = max(start, rows.start), min(start + step, end, rows.stop)
            if first < last:
                yield first, last
