"""Rows of array files that belong together, of Parquet and of HDF5 files, a block at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmlp.data.arrayfiles import Array, npz_arrays
from distmlp.data.inspection import inspect_files
from distmlp.data.reader import RowReader
from distmlp.data.shards import ROLES, Rows, check_shapes
from distmlp.data.tables import Selection, Table
from distmlp.errors import DataError, SystemUnfitError

BLOCK_BYTES = 8 << 20
INPUT_NAMES = ("inputs", "x", "X", "x_train", "images", "data")
TARGET_NAMES = ("targets", "y", "Y", "y_train", "labels")


def pair_rows(inputs: Array, targets: Array | None, weights: Array | None) -> Iterator[Rows]:
    """Rows of arrays that belong together. Raises DataError when their lengths differ."""
    arrays = [array for array in (inputs, targets, weights) if array is not None]
    for array in arrays[1:]:
        if array.shape[0] != inputs.shape[0]:
            raise DataError(f"{array.where}: {array.shape[0]} rows beside {inputs.shape[0]} of {inputs.where}")
    widest = max(array.row_bytes for array in arrays)
    rows = max(1, BLOCK_BYTES // max(1, widest))
    none = (np.empty((0, 0), np.float32) for _ in iter(int, 1))
    streams = [array.blocks(rows) if array is not None else none for array in (inputs, targets, weights)]
    for block, target, weight in zip(*streams, strict=False):
        yield Rows(block, target, None if weights is None else weight)


def npz_rows(path: Path, selection: Selection) -> Iterator[Rows]:
    """Rows of an NPZ file: arrays named by the selection, or by what people usually call them."""
    arrays = npz_arrays(path)

    def pick(wanted: str, usual: Sequence[str], option: str) -> Array | None:
        name = wanted or next((name for name in usual if name in arrays), "")
        if wanted == "none" or (not name and option == "weights"):
            return None
        if name not in arrays:
            held = ", ".join(f"`{name}` {array.shape}" for name, array in arrays.items())
            raise DataError(f"{path}: no array `{name or usual[0]}`; it holds {held}; name one with --{option}")
        return arrays[name]

    inputs = pick(selection.inputs, INPUT_NAMES, "inputs")
    assert inputs is not None
    yield from pair_rows(
        inputs, pick(selection.targets, TARGET_NAMES, "targets"), pick(selection.weights, (), "weights")
    )


def table_rows(array: Array, selection: Selection) -> tuple[Table, Iterator[Rows]]:
    """Rows of one two-dimensional array whose columns are numbered from 0."""
    if len(array.shape) != 2:
        raise DataError(f"{array.where}: {array.shape} alone is no table; give INPUTS.npy TARGETS.npy")
    table = Table([str(k) for k in range(array.shape[1])], selection, array.where)

    def rows() -> Iterator[Rows]:
        done = 0
        for block in array.blocks(max(1, BLOCK_BYTES // max(1, 8 * array.shape[1]))):
            yield table.rows(block.astype(np.float64), range(done, done + len(block)))
            done += len(block)

    return table, rows()


def parquet_rows(path: Path, selection: Selection) -> tuple[Table, Iterator[Rows]]:
    """Rows of a Parquet file. Needs pyarrow (extra `parquet`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SystemUnfitError(f"{path}: Parquet needs pyarrow: pip install 'distmlp[parquet]'") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: is not a Parquet file: {error}") from None
    table = Table(file.schema_arrow.names, selection, str(path))

    def column(values: Any, number: int, first: int) -> NDArray:
        kind = values.type
        if number not in table.codes and (pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind)):
            return values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        if pyarrow.types.is_boolean(kind):
            return values.cast("uint8").cast("float64").to_numpy(zero_copy_only=False)
        texts = values.cast("string").to_pylist()
        return np.array([table.cell(number, text or "", f"{path}, row {first + k}") for k, text in enumerate(texts)])

    def rows() -> Iterator[Rows]:
        done = 0
        try:
            for batch in file.iter_batches(batch_size=8192):
                values = np.full((batch.num_rows, len(table.names)), np.nan)
                for number in table.used:
                    values[:, number] = column(batch.column(number), number, done)
                yield table.rows(values, range(done, done + len(values)))
                done += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}, from row {done}: cannot be read: {error}") from None

    return table, rows()


def hdf5_rows(path: Path, selection: Selection) -> Iterator[Rows]:
    """Rows of another HDF5 file, to repack it."""
    wanted = (selection.inputs or "inputs", selection.targets or "targets", selection.weights)
    datasets = {role: name for role, name in zip(ROLES, wanted, strict=True) if name not in ("", "none")}
    item = inspect_files([os.path.abspath(path)], datasets)[0]
    problem = item.problem or next(iter(check_shapes([item.layouts], "", ()).values()), "")
    if problem:
        raise DataError(f"{path}: {problem}")
    reader = RowReader()
    widest = max(layout.row_bytes for layout in item.layouts.values())
    step = max(1, BLOCK_BYTES // max(1, widest))
    total = item.layouts["inputs"].rows
    for start in range(0, total, step):
        stop = min(total, start + step)
        parts: list[NDArray | None] = []
        for role in ROLES:
            layout = item.layouts.get(role)
            block = None
            if layout is not None:
                block = np.empty((stop - start, *layout.shape[1:]), layout.native)
                reader.read(layout, start, stop, block.reshape(stop - start, layout.width))
            parts.append(block)
        inputs, targets, weights = parts
        assert inputs is not None
        yield Rows(inputs, np.empty((0, 0), np.float32) if targets is None else targets, weights)
