"""Columns so narrow that they stay in memory while the others are streamed: from a disk, the targets of a block of wide
rows would cost as much as its inputs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from distmlp.data.pool import Pool
from distmlp.data.resident import PIECE_BYTES, rows_of
from distmlp.data.row_memory import RowMemory
from distmlp.data.rows import Rows
from distmlp.data.shards import ROLES, Found, Shards

NARROW = 8  # times as much memory must a whole row take


class Source(Protocol):
    """Where the other columns come from."""

    def find(self, runs: NDArray, roles: tuple[str, ...]) -> Sequence[Found]: ...
    def read_found(self, found: Found, out: Rows) -> bool: ...
    def read_runs(self, runs: NDArray, out: Rows, roles: tuple[str, ...], *, found: Found | None = None) -> None: ...


class Held:
    """Targets and weights of a rank's own `rows` (global) in memory, read once. Raises DataError.

    That memory is a file without a name where the system gives one, so that the targets of a window come with the same
    system call as its inputs: copying them would keep other threads from the interpreter.
    """

    def __init__(self, source: Source, shards: Shards, rows: range, roles: tuple[str, ...], pool: Pool) -> None:
        self._source, self._first, self._roles = source, rows.start, roles
        self._others = tuple(role for role in ROLES if role not in roles)
        one = shards.empty(1)
        kept = [part[: int(role in roles)] for role, part in zip(ROLES, one.parts, strict=False)]
        self._memory = RowMemory(rows, Rows(*kept))
        self._rows = self._memory.rows
        step = max(1, PIECE_BYTES // sum(part.nbytes for part in one.parts[1:]))
        tasks = []
        for start in range(0, len(rows), step):
            piece = self._rows.map(lambda array, start=start: array[start : start + step])
            runs = np.array([(rows.start + start, min(step, len(rows) - start))], np.int64)
            tasks.append(pool.submit(source.read_runs, runs, piece, roles))
        for task in tasks:
            task.settle()
        for task in tasks:
            task.result()

    def find(self, runs: NDArray) -> Sequence[Found]:
        """As `Shards.find`."""
        found = self._source.find(runs, self._others)
        return [reads | more for reads, more in zip(found, self._memory.find(runs, self._roles), strict=True)]

    def read_runs(self, runs: NDArray, out: Rows, *, found: Found | None = None) -> None:
        """As `Shards.read_runs`."""
        done: Container[str] = found.keys() if found and self._source.read_found(found, out) else ()
        others = tuple(role for role in self._others[: len(out.parts) - len(self._roles)] if role not in done)
        if others:
            self._source.read_runs(runs, out, others, found={})
        firsts, counts = runs.T
        same = int(counts[0]) if len(runs) and (counts == counts[0]).all() else 0
        for role, target, kept in zip(ROLES, out.parts, self._rows.parts, strict=False):
            if role in self._roles and role not in done:
                if same:
                    _copy_blocks(kept, firsts - self._first, same, target)
                else:
                    kept.take(rows_of(runs) - self._first, axis=0, out=target, mode="clip")


def _copy_blocks(kept: NDArray, firsts: NDArray, count: int, target: NDArray) -> None:
    """`count` rows of `kept` from each of `firsts` on, one after the other into `target`: a block at a time, which is
    several times as fast as row by row."""
    flat = kept.reshape(len(kept), -1)
    size = count * flat.shape[1]
    blocks = as_strided(flat, (len(flat) - count + 1, size), flat.strides, writeable=False)  # begin with every row
    target.reshape(len(firsts), size)[...] = blocks[firsts]


def narrow_roles(shards: Shards, rows: int, limit_bytes: int) -> tuple[str, ...]:
    """Those of targets and weights that are narrow beside the whole row, if `rows` rows of them fit."""
    sizes = dict(zip(ROLES, (part.nbytes for part in shards.empty(1).parts), strict=False))
    roles = [role for role in ROLES[1:] if role in sizes and NARROW * sizes[role] <= shards.row_bytes]
    return tuple(roles) if rows * sum(sizes[role] for role in roles) <= limit_bytes else ()
