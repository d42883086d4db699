"""Rows in memory that is a file without a name, so that many stretches of them are copied by one system call: copied in
Python, they would keep other threads from the interpreter."""

from __future__ import annotations

import mmap
import os
from collections.abc import Container
from pathlib import Path
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from distmlp.data import aio
from distmlp.data.direct import Direct, OneFile
from distmlp.data.rows import ROLES, Rows

OVERCOMMIT, NEVER = Path("/proc/sys/vm/overcommit_memory"), "2"


class RowMemory:
    """Room for global `rows`: `rows` of this are arrays such as those of `one`, of which one row is given, or none of
    what is not kept. Ordinary memory where the system gives no such file: then nothing is found there."""

    def __init__(self, rows: range, one: Rows) -> None:
        sizes = [part.nbytes for part in one.parts]
        memory, handle = _memory(len(rows) * sum(sizes))
        self._file = OneFile(handle, rows, sizes) if handle >= 0 else None
        if handle >= 0:
            finalize(self, os.close, handle)
        parts, start = [], 0
        for size, part in zip(sizes, one.parts, strict=True):
            room = memory[start : start + size * len(rows)].view(part.dtype)
            parts.append(room.reshape(len(rows) * len(part), *part.shape[1:]))
            start += room.nbytes
        self.rows = Rows(*parts)

    def find(self, runs: NDArray, roles: Container[str] = ROLES) -> list[dict[str, Direct]]:
        """As `Shards.find`."""
        found: list[dict[str, Direct]] = [{} for _ in runs]
        for number, role in enumerate(ROLES[: len(self.rows.parts)]):
            if role in roles and self._file is not None:
                for window, reads in zip(found, self._file.find(runs, number), strict=True):
                    window[role] = reads
        return found


def read_open(found: dict[str, Direct], out: Rows) -> bool:
    """What was found in files that are open, all at once; False where that does not work."""
    try:
        return aio.read_all([(reads.handle, reads.spans, out.of(role)) for role, reads in found.items()])
    except OSError:
        return False


def _memory(size_bytes: int) -> tuple[NDArray, int]:
    """Bytes, and the handle of a file that they are, or -1."""
    try:
        if OVERCOMMIT.read_text(encoding="ascii").strip() == NEVER:  # pages that are not to be had would be a SIGBUS
            return np.empty(size_bytes, np.uint8), -1
        handle = os.memfd_create("rows")
    except (AttributeError, OSError):
        return np.empty(size_bytes, np.uint8), -1
    try:
        os.ftruncate(handle, size_bytes)
        return np.frombuffer(mmap.mmap(handle, size_bytes), np.uint8), handle
    except (OSError, ValueError):
        os.close(handle)
        return np.empty(size_bytes, np.uint8), -1
