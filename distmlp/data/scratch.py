"""Rows of compressed files, decoded once into a file of a local disk: shuffled reading comes back to every chunk as
often as it has blocks, and decodes it each time where decoded chunks do not all stay in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterator, Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from distmlp.data import aio
from distmlp.data.pool import Pool
from distmlp.data.rows import Rows
from distmlp.data.shards import ROLES, Shards
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
        self._sizes = [part.nbytes for part in shards.empty(1).parts]  # of a row
        self._starts = [len(rows) * sum(self._sizes[:k]) for k in range(len(self._sizes))]
        self.size_bytes = len(rows) * sum(self._sizes)
        self._file = self._open()
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
        for part, size, begin in zip(rows.parts, self._sizes, self._starts, strict=True):
            view, offset = part.reshape(-1).data.cast("B"), begin + (start - self._first) * size
            while view:
                try:
                    done = os.pwrite(self._file.fileno(), view, offset)
                except OSError as error:
                    raise SystemUnfitError(f"data.scratch = {self._folder}: {error.strerror or error}") from None
                view, offset = view[done:], offset + done

    def find(self, runs: NDArray, roles: Container[str] = ROLES) -> Sequence[None]:
        """As `Shards.find`: nothing is to be found."""
        return [None] * len(runs)

    def read_runs(self, runs: NDArray, out: Rows, roles: Container[str] = ROLES, *, found: None = None) -> None:
        """As `Shards.read_runs`."""
        firsts, counts = runs.T
        for role, part, size, begin in zip(ROLES, out.parts, self._sizes, self._starts, strict=False):
            if role not in roles:
                continue
            spans = np.stack((begin + (firsts - self._first) * size, counts * size), axis=1)
            try:
                whole = aio.read_spans(self._file.fileno(), spans, part)
            except OSError:
                whole = False
            if not whole:
                raise DataError(f"data.scratch = {self._folder}: decoded {role} cannot be read back; check that disk")

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
