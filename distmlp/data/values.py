"""Checks that need the values: class labels, probabilities and sample weights, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distmlp.data.reader import RowReader
from distmlp.errors import DataError

if TYPE_CHECKING:
    from distmlp.data.layout import Layout
    from distmlp.data.shards import Shards

PIECE_BYTES = 16 << 20
LARGEST_CLASSES = 1 << 24


def check_values(shards: Shards, rank: int, ranks: int, layers: Sequence[int]) -> tuple[dict[str, str], int]:
    """Path → what is wrong with labels, targets or weights in this rank's share of the rows; the largest label.

    The rows are shared out evenly, whatever the files. A piece that cannot be read is a problem too.
    """
    problems: dict[str, str] = {}
    largest = -1
    low, high = shards.rows * rank // ranks, shards.rows * (rank + 1) // ranks
    for number, file in enumerate(shards.files):
        base, end = int(shards.starts[number]), int(shards.starts[number + 1])
        first, last = max(low, base) - base, min(high, end) - base
        if first >= last:
            continue
        try:
            text, found = "", -1
            if shards.labels:
                text, found = _check_labels(file["targets"], first, last, layers)
            elif shards.loss == "binary_cross_entropy":
                text = _check_range(file["targets"], first, last, 0.0, 1.0, "targets of binary_cross_entropy")
            if not text and "sample_weights" in file:
                text = _check_range(file["sample_weights"], first, last, 0.0, float("inf"), "sample weights")
            largest = max(largest, found)
        except DataError as error:
            text = str(error).removeprefix(f"{file['inputs'].path}, ")
        if text:
            problems[file["inputs"].path] = text
    return problems, largest


def _pieces(layout: Layout, first: int, last: int) -> Iterator[NDArray]:
    reader = RowReader()
    step = max(1, PIECE_BYTES // max(1, layout.row_bytes))
    for start in range(first, last, step):
        piece = np.empty((min(step, last - start), layout.width), layout.native)
        reader.read(layout, start, start + len(piece), piece)
        yield piece


def _check_labels(layout: Layout, first: int, last: int, layers: Sequence[int]) -> tuple[str, int]:
    ranges = [(piece.min(), piece.max()) for piece in _pieces(layout, first, last)]
    smallest, largest = min(low for low, _ in ranges), max(high for _, high in ranges)
    found = f"dataset `{layout.name}`: class labels from {smallest} to {largest}"
    if layout.dtype.kind == "f":
        return (
            f"{found} stored as {layout.dtype}; expected integers 0 to C - 1: store them as an integer type, or choose "
            "another loss for numbers"
        ), -1
    classes = layers[-1] if layers else LARGEST_CLASSES
    if smallest < 0 or largest >= classes:
        expected = f"0 to {classes - 1}, as model.layers ends with {classes}" if layers else "0 to C - 1"
        hint = "; labels that begin with 1 must be shifted" if smallest == 1 and largest == classes else ""
        return f"{found}; expected {expected}{hint}", -1
    return "", int(largest)


def _check_range(layout: Layout, first: int, last: int, low: float, high: float, what: str) -> str:
    smallest, largest = np.inf, -np.inf
    for piece in _pieces(layout, first, last):
        finite = piece[np.isfinite(piece)] if piece.dtype.kind == "f" else piece
        if finite.size:
            smallest, largest = min(smallest, finite.min()), max(largest, finite.max())
    if smallest < low or largest > high:
        limit = f"between {low:g} and {high:g}" if np.isfinite(high) else f"not below {low:g}"
        return f"dataset `{layout.name}`: values from {smallest:g} to {largest:g}; {what} must be {limit}"
    return ""
