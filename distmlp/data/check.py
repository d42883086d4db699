"""Look through shards before a training does: `distmlp data check`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distmlp.data.advice import advice, describe
from distmlp.data.inspection import inspect_files
from distmlp.data.layout import Layout
from distmlp.data.reader import RowReader
from distmlp.data.rows import ROLES
from distmlp.data.shards import check_shapes
from distmlp.data.sources import expand
from distmlp.errors import ConfigError, DataError

PIECE_BYTES = 16 << 20


@dataclass
class DatasetSummary:
    """One dataset of one file. `lowest`, `highest`: of the finite values, None where there is none."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    nonfinite: int = 0
    lowest: float | None = None
    highest: float | None = None
    advice: str = ""


@dataclass
class FileSummary:
    """One file: its datasets, or what is wrong with it."""

    path: str
    datasets: list[DatasetSummary] = field(default_factory=list)
    problem: str = ""

    @property
    def rows(self) -> int:
        return self.datasets[0].shape[0] if self.datasets else 0


@dataclass
class Summary:
    """What `check` found. `read_bytes` were read and looked through in `seconds` by one thread."""

    files: list[FileSummary]
    read_bytes: int = 0
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files if not file.problem)

    @property
    def problems(self) -> list[str]:
        return [f"{file.path}: {file.problem}" for file in self.files if file.problem]


def check(
    patterns: str | Sequence[str], inputs: str = "inputs", targets: str = "targets", sample_weights: str = ""
) -> Summary:
    """Open, validate and read through every file of `patterns`. Dataset names as in [data]; "" for none.

    Bad files are part of the answer; DataError only where a pattern matches nothing, ConfigError without inputs.
    """
    if not inputs:
        raise ConfigError("data check: the dataset of the inputs has no name; give one with --inputs")
    paths = expand(patterns)
    datasets = {role: name for role, name in zip(ROLES, (inputs, targets, sample_weights), strict=True) if name}
    inspected = inspect_files(paths, datasets)
    problems = check_shapes([item.layouts for item in inspected if not item.problem], "", ())
    summary = Summary([])
    start = time.perf_counter()
    for item in inspected:
        file = FileSummary(item.path, problem=item.problem or problems.get(item.path, ""))
        try:
            for role, layout in item.layouts.items():
                file.datasets.append(_scan(role, layout))
                summary.read_bytes += layout.rows * layout.row_bytes
        except DataError as error:
            file.problem = file.problem or str(error).removeprefix(f"{item.path}, ")
        summary.files.append(file)
    summary.seconds = time.perf_counter() - start
    return summary


def _scan(role: str, layout: Layout) -> DatasetSummary:
    found = DatasetSummary(role, layout.name, layout.shape, str(layout.native), describe(layout), advice=advice(layout))
    reader = RowReader()
    step = max(1, PIECE_BYTES // max(1, layout.row_bytes))
    for start in range(0, layout.rows if layout.width else 0, step):
        piece = np.empty((min(step, layout.rows - start), layout.width), layout.native)
        reader.read(layout, start, start + len(piece), piece)
        values = piece.reshape(-1)
        if piece.dtype.kind == "f":
            values = values[np.isfinite(values)]
            found.nonfinite += piece.size - values.size
        if values.size:
            low, high = values.min().item(), values.max().item()
            found.lowest = low if found.lowest is None else min(found.lowest, low)
            found.highest = high if found.highest is None else max(found.highest, high)
    return found
