"""Checks that need the values: class labels, probabilities and sample weights, before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distmlp.data.layout import Layout
from distmlp.data.reader import RowReader
from distmlp.data.rows import Rows
from distmlp.errors import DataError

PIECE_BYTES = 16 << 20
LARGEST_CLASSES = 1 << 24
LARGEST = {"binary_cross_entropy": 1.0, "softmax_cross_entropy": math.inf}  # targets: probabilities, also of many draws
HUGE = 1e18  # its square overflows float32: named as a suspect when no value is NaN or infinite

Range = tuple[Any, Any]  # smallest and largest finite value, None where there is none
Found = dict[tuple[str, str], Range | str]  # (path, role) → the range of its values, or why they cannot be read


class Table(Protocol):
    """What is asked here of `shards.Shards`."""

    @property
    def files(self) -> tuple[dict[str, Layout], ...]: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def starts(self) -> NDArray: ...
    @property
    def rows(self) -> int: ...
    @property
    def labels(self) -> bool: ...
    @property
    def loss(self) -> str: ...
    @property
    def weight_dtype(self) -> np.dtype | None: ...
    def locate(self, rows: NDArray) -> str: ...


def scan(shards: Table, rank: int, ranks: int) -> Found:
    """Ranges of labels, probabilities and weights in this rank's share of the rows: even, whatever the files."""
    roles = ["targets"] if shards.labels or shards.loss in LARGEST else []
    roles += ["sample_weights"] if shards.weight_dtype is not None else []
    found: Found = {}
    low, high = shards.rows * rank // ranks, shards.rows * (rank + 1) // ranks
    for number, file in enumerate(shards.files):
        base, end = int(shards.starts[number]), int(shards.starts[number + 1])
        first, last = max(low, base) - base, min(high, end) - base
        for role in roles if first < last else ():
            layout = file[role]
            try:
                found[layout.path, role] = _range(layout, first, last)
            except DataError as error:
                found[layout.path, role] = str(error).removeprefix(f"{layout.path}, ")
    return found


def _range(layout: Layout, first: int, last: int) -> Range:
    total: Range = (None, None)
    for piece in _pieces(layout, first, last):
        values = piece[np.isfinite(piece)] if piece.dtype.kind == "f" else piece
        if values.size:
            total = _wider(total, (values.min().item(), values.max().item()))
    return total


def _pieces(layout: Layout, first: int, last: int) -> Iterator[NDArray]:
    reader = RowReader()
    step = max(1, PIECE_BYTES // max(1, layout.row_bytes))
    for start in range(first, last, step):
        piece = np.empty((min(step, last - start), layout.width), layout.native)
        reader.read(layout, start, start + len(piece), piece)
        yield piece


def _wider(a: Range, b: Range) -> Range:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    return min(a[0], b[0]), max(a[1], b[1])


def judge(shards: Table, parts: Iterable[Found], layers: Sequence[int]) -> tuple[dict[str, str], Range]:
    """Path → what is wrong with its values, out of the findings of all ranks; and the range of the class labels."""
    problems: dict[str, str] = {}
    ranges: dict[tuple[str, str], Range] = {}
    for part in parts:
        for key, found in part.items():
            if isinstance(found, str):
                problems.setdefault(key[0], found)
            else:
                ranges[key] = _wider(ranges.get(key, (None, None)), found)
    labels: Range = (None, None)
    layouts = {(path, role): file[role] for path, file in zip(shards.paths, shards.files, strict=True) for role in file}
    for (path, role), (low, high) in ranges.items():
        layout = layouts[path, role]
        if role == "sample_weights":
            text = _outside(layout, low, high, math.inf, "sample weights must not be below 0")
        elif shards.labels:
            text = _labels(layout, low, high, layers)
            labels = _wider(labels, (None, None) if text else (low, high))
        else:
            limit = LARGEST[shards.loss]
            allowed = "not be below 0" if limit == math.inf else f"be between 0 and {limit:g}"
            text = _outside(layout, low, high, limit, f"targets of {shards.loss} must {allowed}")
        if text:
            problems.setdefault(path, text)
    return problems, labels


def _labels(layout: Layout, low: Any, high: Any, layers: Sequence[int]) -> str:
    shown = "without a finite value" if low is None else f"from {low} to {high}"
    found = f"dataset `{layout.name}`: class labels {shown}"
    if layout.dtype.kind == "f":
        return (
            f"{found} stored as {layout.native}; expected integers 0 to C - 1: store them as an integer type "
            "(`distmlp data convert --labels`), or choose another loss for numbers"
        )
    classes = layers[-1] if layers else LARGEST_CLASSES
    if low >= 0 and high < classes:
        return ""
    expected = f"0 to {classes - 1} for the {classes} outputs of the network" if layers else "0 to C - 1"
    if not layers and high >= LARGEST_CLASSES:
        expected += f", of {LARGEST_CLASSES:,} classes at most"
    hint = "; labels that begin with 1 must be shifted" if low == 1 and high == classes else ""
    return f"{found}; expected {expected}{hint}"


def _outside(layout: Layout, low: Any, high: Any, limit: float, rule: str) -> str:
    if low is None or (low >= 0 and high <= limit):
        return ""
    return f"dataset `{layout.name}`: values from {low:g} to {high:g}; {rule}"


def blame(shards: Table, numbers: NDArray, rows: Rows) -> str | None:
    """Where `rows`, with these global `numbers`, hold NaN, infinity or numbers too large for float32 arithmetic.

    "file rows 3, 7: inputs hold nan", or None when every value is ordinary.
    """
    found, what = unfit(rows)
    return f"{shards.locate(numbers[found])}: {what}" if what else None


def unfit(rows: Rows) -> tuple[NDArray, str]:
    """Which rows (bool) hold NaN or infinity, or else numbers too large for float32 arithmetic, in the first of the
    arrays that does; and what it holds, "" when every value is ordinary."""
    names = ("inputs", "targets", "sample weights")
    for suspicious, what in ((_not_finite, "NaN or infinite values"), (_huge, f"values beyond {HUGE:g}")):
        for name, array in zip(names, rows.parts, strict=False):
            found = np.asarray(suspicious(array.reshape(len(array), -1)).any(axis=1))
            if found.any():
                return found, f"{name} hold {what}"
    return np.zeros(len(rows), bool), ""


def _not_finite(array: NDArray) -> NDArray:
    if array.dtype.kind != "f":
        return np.zeros(array.shape, bool)
    with np.errstate(over="ignore"):
        return ~np.isfinite(array.astype(np.float32, copy=False))


def _huge(array: NDArray) -> NDArray:
    return np.abs(array.astype(np.float64)) > HUGE
