"""Other formats → shards: `distmlp data convert`. Streaming, in constant memory; every file complete or absent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmlp.data.arrayfiles import Array, idx_array, npy_array
from distmlp.data.csvfile import read_csv
from distmlp.data.formats import hdf5_rows, npz_rows, pair_rows, parquet_rows, table_rows
from distmlp.data.present import PresentShard
from distmlp.data.shards import Rows
from distmlp.data.tables import Selection, Table
from distmlp.data.writer import ShardWriter
from distmlp.errors import ConfigError, DataError
from distmlp.order import mix

CSV, HDF5, PARQUET = {".csv", ".tsv", ".txt"}, {".h5", ".hdf5", ".he5"}, {".parquet", ".pq"}
EVERYTHING = Selection()


@dataclass
class Converted:
    """What came out: the files in order, rows by part ("" without a split), rows left out as incomplete."""

    paths: list[Path] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


def convert(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    selection: Selection = EVERYTHING,
    header: bool | None = None,
    rows_per_shard: int = 0,
    validation: float = 0.0,
    seed: int = 0,
    checksums: bool = False,
    overwrite: bool = False,
    resume: bool = False,
) -> Converted:
    """Write the rows of `sources`, one after the other, to HDF5 shards with contiguous datasets.

    Sources: CSV (.gz too), Parquet, NPZ, HDF5 (repacked); IDX (.gz) and NPY in pairs of inputs and targets.
    `out`: "data.h5"; with `rows_per_shard` data-00000.h5, data-00001.h5, …. `validation`: fraction of the
    rows that goes to data-validation*.h5, the rest to data-train*.h5, chosen by a hash of (seed, row
    number) so that rows added later do not move the others. `checksums`: see `ShardWriter`. `resume`: shards
    that an interrupted conversion finished are compared and kept.
    Raises DataError for what is wrong in a source or on the disk, ConfigError for what is asked.
    """
    out = Path(out)
    if not sources:
        raise ConfigError("data convert: no source is given")
    if not 0.0 <= validation < 1.0:
        raise ConfigError(f"--validation {validation:g}: expected a fraction from 0 to below 1")
    if overwrite and resume:
        raise ConfigError("data convert: --overwrite begins anew, --resume goes on; give one of them")
    if out.suffix.lower() not in HDF5:
        raise ConfigError(f"{out}: the last argument is the shard to write and must end in .h5")
    parts = ("train", "validation") if validation else ("",)
    result = Converted(rows=dict.fromkeys(parts, 0))
    shards = {part: _Sequence(out, part, rows_per_shard, checksums, overwrite, resume) for part in parts}
    number = 0
    tables: list[Table] = []
    try:
        for rows in _all_rows([Path(source) for source in sources], selection, header, tables):
            if validation:
                place = mix(np.arange(number, number + len(rows)) & 0xFFFFFFFF, mix(seed & 0xFFFFFFFF, 0x5EED))
                chosen = place < validation * 2.0**32
                shards["validation"].append(_part(rows, chosen))
                shards["train"].append(_part(rows, ~chosen))
            else:
                shards[""].append(rows)
            number += len(rows)
        for part, sequence in shards.items():
            result.paths += sequence.finish()
            sequence.remove_older()
            result.rows[part] = sequence.rows
    finally:
        for sequence in shards.values():
            sequence.discard()
    if not number:
        raise DataError(f"{', '.join(map(str, sources))}: no row came out")
    result.dropped = sum(table.dropped for table in tables)
    return result


class _Sequence:
    """The shards of one part, each closed when it is full."""

    def __init__(
        self, out: Path, part: str, rows_per_shard: int, checksums: bool, overwrite: bool, resume: bool
    ) -> None:  # fmt: skip
        self._stem = out.with_name("-".join(filter(None, [out.stem, part])))
        self._suffix, self._limit, self._checksums, self._overwrite = out.suffix, rows_per_shard, checksums, overwrite
        self._resume = resume
        self._writer: ShardWriter | PresentShard | None = None
        self._paths: list[Path] = []
        self.rows = 0

    def append(self, rows: Rows) -> None:
        done = 0
        while done < len(rows):
            if self._writer is None:
                self._writer = self._next()
            room = self._limit - self._writer.rows if self._limit else len(rows)
            piece = slice(done, done + room)
            arrays = {"inputs": rows.inputs[piece]}
            if len(rows.targets):
                arrays["targets"] = rows.targets[piece]
            if rows.weights is not None:
                arrays["sample_weights"] = rows.weights[piece]
            self._writer.append(**arrays)
            done += len(arrays["inputs"])
            if self._limit and self._writer.rows >= self._limit:
                self.finish()
        self.rows += len(rows)

    def _next(self) -> ShardWriter | PresentShard:
        path = self._path(len(self._paths))
        if path.exists() and self._resume:
            return PresentShard(path)
        if path.exists() and not self._overwrite:
            raise DataError(
                f"{path}: exists already; choose another name, or give --overwrite, or --resume to go on where a "
                "conversion was interrupted"
            )
        return ShardWriter(path, self._checksums)

    def _path(self, number: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}{f'-{number:05d}' if self._limit else ''}{self._suffix}")

    def remove_older(self) -> None:
        """Shards of an earlier, longer conversion would be read with the new ones."""
        number = len(self._paths)
        while self._limit and self._overwrite and self._path(number).exists():
            self._path(number).unlink()
            number += 1

    def finish(self) -> list[Path]:
        if self._writer is not None:
            self._writer.close()
            self._paths.append(self._writer.path)
            self._writer = None
        return self._paths

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()


def _part(rows: Rows, chosen: NDArray) -> Rows:
    return rows.map(lambda array: array[chosen] if len(array) else array)


def _all_rows(sources: list[Path], selection: Selection, header: bool | None, tables: list[Table]) -> Iterator[Rows]:
    waiting = list(sources)
    while waiting:
        path = waiting.pop(0)
        if path.is_dir():
            raise DataError(f"{path}: is a directory, expected a file")
        kind = _kind(path)
        if kind in CSV | PARQUET:
            table, rows = read_csv(path, selection, header) if kind in CSV else parquet_rows(path, selection)
            tables.append(table)
            yield from rows
        elif kind == ".npz":
            yield from npz_rows(path, selection)
        elif kind in HDF5:
            yield from hdf5_rows(path, selection)
        elif kind == ".npy":
            array = npy_array(path)
            if waiting and _kind(waiting[0]) == ".npy":
                yield from _pair(array, npy_array(waiting.pop(0)))
            else:
                table, rows = table_rows(array, selection)
                tables.append(table)
                yield from rows
        elif not waiting:
            raise DataError(f"{path}: one IDX file alone; give images and labels: IMAGES LABELS OUT.h5")
        else:
            yield from _pair(idx_array(path), idx_array(waiting.pop(0)))


def _kind(path: Path) -> str:
    """The suffix that tells the format, ".gz" aside; IDX for anything that is not known by its suffix."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    known = CSV | HDF5 | PARQUET | {".npy", ".npz"}
    return suffix.lower() if suffix.lower() in known else "idx"


def _pair(first: Array, second: Array) -> Iterator[Rows]:
    """Inputs and targets in either order: the one with more dimensions, or wider rows, is the inputs."""
    if len(second.shape) > len(first.shape):
        first, second = second, first
    return pair_rows(first, second, None)
