"""Rows that lie in their files as they are wanted: where many stretches of them, in many files, are found at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distmlp.data.layout import Layout


class DirectRows:
    """One dataset of all files. `starts`: first global row of every file, and all rows at the end. Pure.

    `dtype`: of the array they are wanted in; others, and rows that are packed or checked, are not direct.
    """

    def __init__(self, layouts: Sequence[Layout], starts: NDArray, dtype: np.dtype) -> None:
        self.paths = [layout.path for layout in layouts]
        direct = [layout.plain and layout.checksums is None and layout.dtype == dtype for layout in layouts]
        self._direct, self._starts = np.array(direct), starts
        self._all = bool(self._direct.all())
        self._row_bytes = layouts[0].row_bytes
        self._offsets = np.array([layout.offset for layout in layouts]) - starts[:-1] * self._row_bytes

    def spans(self, runs: NDArray) -> tuple[NDArray, NDArray] | None:
        """Of stretches of rows, first global row and rows each (runs, 2): the file, and offset and bytes in it
        (spans, 2), neighbours joined. None where one is not direct, or is empty."""
        firsts, counts = runs.T
        numbers = np.searchsorted(self._starts, firsts, side="right") - 1
        if (firsts + counts > self._starts[numbers + 1]).any():
            numbers, firsts, counts = self._cut(numbers, firsts, counts)
        if not (self._all or self._direct[numbers].all()) or not counts.all():
            return None
        offsets, sizes = self._offsets[numbers] + firsts * self._row_bytes, counts * self._row_bytes
        goes_on = (offsets[1:] == offsets[:-1] + sizes[:-1]) & (numbers[1:] == numbers[:-1])
        if goes_on.any():
            heads = np.flatnonzero(np.append(True, ~goes_on))
            numbers, offsets, sizes = numbers[heads], offsets[heads], np.add.reduceat(sizes, heads)
        return numbers, np.stack((offsets, sizes), axis=1)

    def _cut(self, numbers: NDArray, firsts: NDArray, counts: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Stretches that go on in the next files, in pieces: file, first row, rows."""
        ends = firsts + counts
        parts = np.searchsorted(self._starts, ends - 1, side="right") - numbers  # files that one touches
        every = np.repeat(np.arange(len(parts)), parts)
        numbers = numbers[every] + np.arange(len(every)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = np.maximum(firsts[every], self._starts[numbers])
        rows = np.minimum(ends[every], self._starts[numbers + 1]) - begin
        some = rows > 0  # files without rows lie between
        return numbers[some], begin[some], rows[some]
