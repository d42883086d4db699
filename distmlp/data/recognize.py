"""Which format every source of a conversion has, and whether they all give the same kind of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distmlp.data.arrayfiles import idx_array, npy_array
from distmlp.data.blocks import Kinds, Source
from distmlp.data.csvfile import csv_source
from distmlp.data.formats import hdf5_source, npz_source, pair_source, parquet_source, table_source
from distmlp.data.tables import Selection
from distmlp.errors import DataError

CSV, HDF5, PARQUET = {".csv", ".tsv", ".txt"}, {".h5", ".hdf5", ".he5"}, {".parquet", ".pq"}


def open_sources(paths: Sequence[Path], selection: Selection, header: bool | None) -> list[Source]:
    """The sources at `paths`, of which IDX and NPY files may be pairs. Raises DataError, also where they differ."""
    waiting, sources = list(paths), []
    while waiting:
        path = waiting.pop(0)
        _check_file(path)
        sources.append(_open(path, waiting, selection, header))
    for source in sources[1:]:
        if source.kinds != sources[0].kinds:
            raise DataError(
                f"{source.where}: rows of {_shown(source.kinds)} after rows of {_shown(sources[0].kinds)} in "
                f"{sources[0].where}; all sources must agree"
            )
    return sources


def _open(path: Path, waiting: list[Path], selection: Selection, header: bool | None) -> Source:
    kind = _kind(path)
    if kind in CSV:
        return csv_source(path, selection, header)
    if kind in PARQUET:
        return parquet_source(path, selection)
    if kind == ".npz":
        return npz_source(path, selection)
    if kind in HDF5:
        return hdf5_source(path, selection)
    if kind == ".npy":
        array = npy_array(path)
        if not waiting or _kind(waiting[0]) != ".npy":
            return table_source(array, selection)
        first, second = array, npy_array(_check_file(waiting.pop(0)))
    elif not waiting:
        raise DataError(f"{path}: one IDX file alone; give images and labels: IMAGES LABELS OUT.h5")
    else:
        first, second = idx_array(path), idx_array(_check_file(waiting.pop(0)))
    if len(second.shape) > len(first.shape):  # in either order: the one with more dimensions is the inputs
        first, second = second, first
    return pair_source(first, second, None)


def _check_file(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path}: is a directory, expected a file")
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is a pipe or device, which cannot be read twice; expected a file")
    return path


def _kind(path: Path) -> str:
    """The suffix that tells the format, ".gz" aside; IDX for anything that is not known by its suffix."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    known = CSV | HDF5 | PARQUET | {".npy", ".npz"}
    return suffix.lower() if suffix.lower() in known else "idx"


def _shown(kinds: Kinds) -> str:
    return ", ".join(f"{role} {shape} {dtype}" for role, (shape, dtype) in kinds.items())
