"""Rows that lie in their files as they are wanted: where many stretches of them, in many files, are found at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distmlp.data.layout import Layout

MOST_CHUNKS = 1 << 20  # of a file: they are all listed


@dataclass(frozen=True)
class Direct:
    """Reads that give stretches of rows: offset and bytes (spans, 2), each in file `paths[place]`, or all of them in
    one that is open as `handle`."""

    paths: list[str]
    place: NDArray
    spans: NDArray
    handle: int = -1


class DirectRows:
    """One dataset of all files. `starts`: first global row of every file, and all rows at the end. Pure.

    `dtype`: of the array they are wanted in; others, and rows that are packed or checked, are not direct.
    """

    def __init__(self, layouts: Sequence[Layout], starts: NDArray, dtype: np.dtype) -> None:
        self._paths = [layout.path for layout in layouts]
        self._row_bytes = layouts[0].width * dtype.itemsize
        pieces = [_pieces(layout, dtype) for layout in layouts]  # rows that lie together: all of a file, or chunks
        counts = [len(offsets) for _, offsets in pieces]
        self._files = np.arange(len(layouts)).repeat(counts)
        firsts = np.concatenate([firsts for firsts, _ in pieces]) + starts[:-1].repeat(counts)
        offsets = np.concatenate([offsets for _, offsets in pieces])
        self._direct = offsets >= 0
        self._all = bool(self._direct.all())
        self._starts, self._offsets = np.append(firsts, starts[-1]), offsets - firsts * self._row_bytes

    def find(self, runs: NDArray) -> list[Direct | None]:
        """The reads for stretches of rows, first global row and rows each (windows, runs, 2), window by window;
        neighbours in one window are one read. None where a stretch of it is not direct, or is empty."""
        firsts, counts = runs.reshape(-1, 2).T
        windows = np.arange(len(runs)).repeat(runs.shape[1])
        numbers = np.searchsorted(self._starts, firsts, side="right") - 1
        if (firsts + counts > self._starts[numbers + 1]).any():
            windows, numbers, firsts, counts = self._cut(windows, numbers, firsts, counts)
        lacking = set()
        if not self._all or not counts.all():
            lacking = set(windows[~(self._direct[numbers] & (counts > 0))].tolist())
        offsets, sizes = self._offsets[numbers] + firsts * self._row_bytes, counts * self._row_bytes
        numbers = self._files[numbers]
        goes_on = (offsets[1:] == offsets[:-1] + sizes[:-1]) & (numbers[1:] == numbers[:-1])
        goes_on &= windows[1:] == windows[:-1]
        if goes_on.any():
            heads = np.flatnonzero(np.append(True, ~goes_on))
            windows, numbers, offsets = windows[heads], numbers[heads], offsets[heads]
            sizes = np.add.reduceat(sizes, heads)
        spans = np.stack((offsets, sizes), axis=1)
        every = np.arange(len(runs) + 1)
        distinct, place = np.unique(windows * len(self._paths) + numbers, return_inverse=True)  # files of a window
        files, begin = distinct % len(self._paths), np.searchsorted(distinct, every * len(self._paths))
        place -= begin[windows]
        paths = [self._paths[number] for number in files.tolist()]
        of_window = zip(pairwise(begin.tolist()), pairwise(np.searchsorted(windows, every).tolist()), strict=True)
        return [
            None if window in lacking else Direct(paths[a:b], place[c:d], spans[c:d])
            for window, ((a, b), (c, d)) in enumerate(of_window)
        ]

    def _cut(
        self, windows: NDArray, numbers: NDArray, firsts: NDArray, counts: NDArray
    ) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Stretches that go on in the next pieces, cut: window, piece, first row, rows."""
        ends = firsts + counts
        parts = np.searchsorted(self._starts, ends - 1, side="right") - numbers  # that one touches
        every = np.repeat(np.arange(len(parts)), parts)
        numbers = numbers[every] + np.arange(len(every)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = np.maximum(firsts[every], self._starts[numbers])
        rows = np.minimum(ends[every], self._starts[numbers + 1]) - begin
        some = rows > 0  # files without rows lie between
        return windows[every][some], numbers[some], begin[some], rows[some]


def _pieces(layout: Layout, dtype: np.dtype) -> tuple[NDArray, NDArray]:
    """Where rows that lie together begin: first row in the file, and byte; -1 where they are not as they are wanted."""
    usable = layout.checksums is None and layout.dtype == dtype
    if usable and layout.chunks_are_rows and layout.chunks is not None and len(layout.chunks) <= MOST_CHUNKS:
        written = (layout.chunks["offset"] >= 0) & (layout.chunks["size"] == layout.chunk_bytes)
        if len(layout.chunks) and written.all():
            return np.arange(len(layout.chunks)) * layout.chunk[0], layout.chunks["offset"].astype(np.int64)
    return np.zeros(1, np.int64), np.array([layout.offset if usable and layout.plain else -1])


class OneFile:
    """Rows from `first` on whose parts lie one after the other in a file that is open, `sizes` bytes a row each."""

    def __init__(self, handle: int, rows: range, sizes: Sequence[int]) -> None:
        self._handle, self._first = handle, rows.start
        self.sizes = tuple(sizes)
        self.starts = tuple(len(rows) * sum(sizes[:k]) for k in range(len(sizes)))

    def find(self, runs: NDArray, part: int) -> list[Direct]:
        """As `DirectRows.find`, of one part."""
        size, start = self.sizes[part], self.starts[part]
        spans = runs * size
        spans[..., 0] += start - self._first * size
        nowhere = np.empty(0, np.int64)
        return [Direct([], nowhere, of_window, self._handle) for of_window in spans]
