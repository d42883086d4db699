"""The rows of all shards as one table: every file checked before the first step, then read by global row."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from distmlp.data.columns import differ
from distmlp.data.direct import Direct, DirectRows
from distmlp.data.inspection import Inspected, inspect_files
from distmlp.data.layout import Layout
from distmlp.data.reader import RowReader
from distmlp.data.rows import ROLES, Rows
from distmlp.data.sources import expand
from distmlp.data.values import judge, scan
from distmlp.errors import DataError

if TYPE_CHECKING:
    from distmlp.comm.world import World

SHOWN_PROBLEMS = 20
Found = dict[str, Direct]  # by role


class Names(Protocol):
    """What `Shards.open` reads of `config.DataConfig`: the dataset names, "" for one that is not wanted."""

    @property
    def inputs(self) -> str: ...
    @property
    def targets(self) -> str: ...
    @property
    def sample_weights(self) -> str: ...


class Shards:
    """All rows of some HDF5 files, in the order of their sorted paths.

    `rows`; `features`; `outputs`: width of the targets, for labels the number of classes (the network's
    output width where it is known, else the largest label + 1); `labels`: whether targets are class
    labels; `loss`; `input_dtype`, `target_dtype`, `weight_dtype` (None without weights): of what `read`
    gives; `lowest_label`: None without labels; `paths`; `starts`: first global row of every file, and `rows` at
    the end.
    """

    def __init__(self, files: Sequence[dict[str, Layout]], *, labels: bool, classes: int, loss: str) -> None:
        self.files = tuple(files)
        self.paths = tuple(file["inputs"].path for file in files)
        self.starts = np.cumsum([0] + [file["inputs"].rows for file in files])
        self._bounds: list[int] = self.starts.tolist()
        self.rows = self._bounds[-1]
        self.labels, self.loss = labels, loss
        self.lowest_label: int | None = None
        first = self.files[0]
        self.features = first["inputs"].width
        self.input_dtype = _common_dtype(files, "inputs")
        self.outputs = classes if labels else first["targets"].width if "targets" in first else 0
        self.target_dtype = _common_dtype(files, "targets") if "targets" in first else np.dtype(np.float32)
        if labels and self.target_dtype.kind == "f":  # int64 beside uint64
            self.target_dtype = np.dtype(np.int64)
        self.weight_dtype = _common_dtype(files, "sample_weights") if "sample_weights" in first else None
        self._reader = RowReader()
        kinds = (self.input_dtype, self.target_dtype, self.weight_dtype)
        self._direct = {
            role: DirectRows([file[role] for file in files], self.starts, kind)
            for role, kind in zip(ROLES, kinds, strict=True)
            if kind and role in first
        }

    @classmethod
    def open(
        cls,
        names: Names,
        world: World,
        *,
        patterns: str | Sequence[str] = (),
        loss: str = "",
        layers: Sequence[int] = (),
    ) -> Shards:
        """Find the files, check all of them, split over the ranks, and agree on what they hold. Collective.

        `patterns` defaults to `names.train`. With `loss` or `names.targets` empty there are no targets
        (prediction). `layers`: all widths of the network where they are known. Raises DataError naming
        every bad file at once, on all ranks alike (AgreedError).
        """
        wanted = patterns or getattr(names, "train", ())
        paths = world.broadcast(world.agree(lambda: expand(wanted) if world.rank == 0 else (), "finding the data"))
        datasets = {role: getattr(names, role) for role in ROLES if getattr(names, role)}
        if not loss:
            datasets.pop("targets", None)
        mine = paths[world.rank :: world.size]
        inspected: list[Inspected] = [None] * len(paths)  # type: ignore[list-item]
        answers = world.all_gather(world.agree(lambda: inspect_files(mine, datasets), "checking the data"))
        for rank, answer in enumerate(answers):
            inspected[rank :: world.size] = answer
        problems = {item.path: item.problem for item in inspected if item.problem}
        problems |= check_shapes([item.layouts for item in inspected if not item.problem], loss, layers)
        good = [item.layouts for item in inspected if item.path not in problems]
        shards = None
        if good:  # their values are looked at even where other files are bad: all is told at once
            labels = loss == "softmax_cross_entropy" and good[0]["targets"].width == 1
            shards = cls(good, labels=labels, classes=0, loss=loss)
            found = world.all_gather(scan(shards, world.rank, world.size))
            values, (shards.lowest_label, highest) = judge(shards, found, layers)
            problems |= values
        world.agree(lambda: _refuse(problems, len(paths)), "checking the data")
        assert shards is not None
        world.agree(lambda: _visible(good) if world.local_rank == 0 else None, "checking the data")
        if shards.labels:
            shards.outputs = layers[-1] if layers else (highest or 0) + 1
        return shards

    def keep_chunks(self, limit_bytes: int) -> None:
        """Keep up to `limit_bytes` of decoded chunks: shuffled reading comes back to them."""
        self._reader = RowReader(limit_bytes)

    def read(self, start: int, stop: int) -> Rows:
        """Global rows `start` to `stop - 1`. Raises DataError naming file, dataset and rows."""
        rows = self.empty(stop - start)
        self.read_into(start, stop, rows)
        return rows

    def empty(self, count: int) -> Rows:
        """Uninitialised arrays for `count` rows."""
        return Rows(
            np.empty((count, self.features), self.input_dtype),
            np.empty(count if self.labels else (count, self.outputs), self.target_dtype),
            None if self.weight_dtype is None else np.empty(count, self.weight_dtype),
        )

    def read_into(self, start: int, stop: int, out: Rows) -> None:
        """Global rows `start` to `stop - 1` into arrays made by `empty`."""
        number = bisect_right(self._bounds, start) - 1
        if not start < stop <= self._bounds[number + 1]:
            self.read_runs(np.array([(start, stop - start)], np.int64), out)
            return
        runs = np.array([(start - self._bounds[number], stop - start)], np.int64)
        for role, layout in self.files[number].items():
            self._reader.read_runs(layout, runs, out.of(role).reshape(stop - start, layout.width))

    def find(self, runs: NDArray, roles: Container[str] = ROLES) -> list[Found]:
        """What `read_runs` needs to know of stretches of rows (windows, runs, 2), window by window."""
        found: list[Found] = [{} for _ in runs]
        for role, table in self._direct.items():
            for window, reads in zip(found, table.find(runs) if role in roles else (), strict=False):
                if reads is not None:
                    window[role] = reads
        return found

    def read_found(self, found: Found, out: Rows) -> bool:
        """What `find` tells, all at once; False where that does not work."""
        return self._reader.read_direct([(reads, out.of(role)) for role, reads in found.items()])

    def read_runs(self, runs: NDArray, out: Rows, roles: Container[str] = ROLES, *, found: Found | None = None) -> None:
        """Stretches of rows, first global row and rows each (runs, 2), one after the other into `out`, which `empty`
        has made; of the arrays of `roles` alone. `found`: what `find` tells of them. Raises DataError."""
        if found is None:
            found = self.find(runs[None], roles)[0]
        done_at_once = found.keys() if found and self.read_found(found, out) else ()
        for role, array in zip(ROLES, (out.inputs, out.targets, out.weights), strict=True):
            if array is None or role not in self.files[0] or role not in roles or role in done_at_once:
                continue
            flat, done = array.reshape(len(array), self.files[0][role].width), 0
            for number, count, pieces in self._by_file(runs):
                self._reader.read_runs(self.files[number][role], pieces, flat[done : done + count])
                done += count

    def _by_file(self, runs: NDArray) -> list[tuple[int, int, NDArray]]:
        """(file, rows, stretches in it), one after the other."""
        runs = runs[runs[:, 1] > 0]
        firsts, counts = runs.T
        numbers = np.searchsorted(self.starts, firsts, side="right") - 1
        if (firsts + counts > self.starts[numbers + 1]).any():
            numbers, firsts, counts = np.array([piece for run in runs.tolist() for piece in self._pieces(*run)]).T
        else:
            firsts = firsts - self.starts[numbers]
        pieces = np.stack((firsts, counts), axis=1)
        breaks = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        return [
            (int(numbers[begin]), int(counts[begin:end].sum()), pieces[begin:end])
            for begin, end in zip([0, *breaks], [*breaks, len(pieces)], strict=True)
            if begin < end
        ]

    def _pieces(self, row: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(file, first row in it, rows) of `count` global rows from `row` on."""
        number = bisect_right(self._bounds, row) - 1
        while count:
            part = min(count, self._bounds[number + 1] - row)
            if part:
                yield number, row - self._bounds[number], part
            row, count, number = row + part, count - part, number + 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory: inputs, targets and weight."""
        return sum(part.nbytes for part in self.empty(1).parts)

    def locate(self, rows: NDArray | Sequence[int]) -> str:
        """Where global rows lie, for messages: "file.h5 rows 3, 7; other.h5 row 0" (rows counted per file)."""
        rows = np.unique(np.asarray(rows, np.int64))
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        parts = []
        for number in np.unique(numbers):
            local = rows[numbers == number] - self.starts[number]
            shown = ", ".join(map(str, local[:10])) + (f" and {len(local) - 10} more" if len(local) > 10 else "")
            parts.append(f"{self.paths[number]} row{'s' if len(local) > 1 else ''} {shown}")
        return "; ".join(parts)


def check_shapes(files: Sequence[dict[str, Layout]], loss: str, layers: Sequence[int]) -> dict[str, str]:
    """Path → what is wrong with the shapes of a file, by itself or beside the others and the network."""
    problems: dict[str, str] = {}
    widths: dict[str, tuple[int, str]] = {}
    columns: dict[str, Layout] = {}
    for file in files:
        text = _shape_problem(file, loss, layers)
        for role in ("inputs", "targets"):
            if not text and role in file:
                layout = file[role]
                width, path = widths.setdefault(role, (layout.width, layout.path))
                if layout.width != width:
                    text = f"dataset `{layout.name}` has rows of {layout.width} numbers, but {path} has {width}"
                elif layout.columns:
                    first = columns.setdefault(role, layout)
                    other = differ(layout.columns, first.columns, first.path)
                    text = f"dataset `{layout.name}` {other}" if other else ""
        if text:
            problems[file["inputs"].path] = text
    if files and not problems and not sum(file["inputs"].rows for file in files):
        problems[files[0]["inputs"].path] = "there is not one row in all the files"
    return problems


def _shape_problem(file: dict[str, Layout], loss: str, layers: Sequence[int]) -> str:
    inputs, targets, weights = (file.get(role) for role in ROLES)
    assert inputs is not None
    if inputs.width == 0:
        return f"dataset `{inputs.name}` {inputs.shape} has rows without numbers"
    for other in (targets, weights):
        if other is not None and other.rows != inputs.rows:
            turned = len(inputs.shape) == 2 and inputs.shape[1] in (other.rows, *other.shape[1:2])
            hint = f"; `{inputs.name}` {inputs.shape} looks transposed: it must be rows × features" if turned else ""
            return (
                f"`{inputs.name}` has {inputs.rows} rows, but `{other.name}` has {other.rows}; expected as many{hint}"
            )
    if layers and inputs.width != layers[0]:
        return (
            f"dataset `{inputs.name}` {inputs.shape} has {inputs.width} numbers a row, but the network takes "
            f"{layers[0]} (first of model.layers, or the width of the training set)"
        )
    if weights is not None and weights.width != 1:
        return f"dataset `{weights.name}` {weights.shape}: expected one weight a row"
    if targets is None:
        return ""
    if targets.width == 0:
        return f"dataset `{targets.name}` {targets.shape} has rows without numbers"
    labels = loss == "softmax_cross_entropy" and targets.width == 1
    if layers and not labels and targets.width != layers[-1]:
        return (
            f"dataset `{targets.name}` {targets.shape} has {targets.width} numbers a row, but the network gives "
            f"{layers[-1]} (last of model.layers, or the width of the training set)"
        )
    return ""


def _common_dtype(files: Sequence[dict[str, Layout]], role: str) -> np.dtype:
    return np.result_type(*{file[role].native for file in files})


def _refuse(problems: dict[str, str], files: int) -> None:
    if not problems:
        return
    lines = [f"{path}: {text}" for path, text in sorted(problems.items())]
    if len(lines) == 1:
        raise DataError(lines[0])
    more = [f"… and {len(lines) - SHOWN_PROBLEMS} more"] if len(lines) > SHOWN_PROBLEMS else []
    raise DataError("\n  ".join([f"{len(lines)} of {files} files cannot be used:", *lines[:SHOWN_PROBLEMS], *more]))


def _visible(files: Sequence[dict[str, Layout]]) -> None:
    """Every host must see the files that one of its ranks may have to read."""
    problems = {}
    for file in files:
        layout = file["inputs"]
        try:
            size = os.stat(layout.path).st_size
        except OSError as error:
            problems[layout.path] = f"another host reads it, this one cannot: {(error.strerror or str(error)).lower()}"
            continue
        if size < layout.file_bytes:
            problems[layout.path] = f"has {size} bytes here and {layout.file_bytes} on another host"
    _refuse(problems, len(files))
