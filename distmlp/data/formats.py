"""Sources of rows: array files that belong together, Parquet and HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmlp.data.arrayfiles import Array, npz_arrays
from distmlp.data.blocks import Block, Source
from distmlp.data.inspection import inspect_files
from distmlp.data.layout import Layout
from distmlp.data.reader import RowReader
from distmlp.data.rows import ROLES, Rows
from distmlp.data.shards import check_shapes
from distmlp.data.tables import Selection, Table
from distmlp.errors import DataError, SystemUnfitError

BLOCK_BYTES = 8 << 20
INPUT_NAMES = ("inputs", "x", "X", "x_train", "images", "data")
TARGET_NAMES = ("targets", "y", "Y", "y_train", "labels")
NO_TARGETS = np.empty((0, 0), np.float32)


def pair_source(inputs: Array, targets: Array | None, weights: Array | None) -> Source:
    """Arrays that belong together. Raises DataError when their lengths differ."""
    arrays = {role: array for role, array in zip(ROLES, (inputs, targets, weights), strict=True) if array is not None}
    for array in arrays.values():
        if array.shape[0] != inputs.shape[0]:
            raise DataError(f"{array.where}: {array.shape[0]} rows beside {inputs.shape[0]} of {inputs.where}")
    step = _step(max(array.row_bytes for array in arrays.values()))

    def blocks() -> Iterator[Block]:
        for pieces in zip(*(array.pieces(step) for array in arrays.values()), strict=True):
            loads = dict(zip(arrays, (load for _, load in pieces), strict=True))
            yield Block(pieces[0][0], partial(_rows, loads))

    return Source(inputs.where, {role: array.kind for role, array in arrays.items()}, blocks)


def _step(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _rows(loads: Mapping[str, Callable[[], NDArray]]) -> Rows:
    """What every role's `load` gives, as rows."""
    arrays = {role: load() for role, load in loads.items()}
    return Rows(arrays["inputs"], arrays.get("targets", NO_TARGETS), arrays.get("sample_weights"))


def npz_source(path: Path, selection: Selection) -> Source:
    """An NPZ file: arrays named by the selection, or by what people usually call them."""
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
    return pair_source(inputs, pick(selection.targets, TARGET_NAMES, "targets"), pick(selection.weights, (), "weights"))


def table_source(array: Array, selection: Selection) -> Source:
    """One two-dimensional array whose columns are numbered from 0."""
    if len(array.shape) != 2:
        raise DataError(f"{array.where}: {array.shape} alone is no table; give INPUTS.npy TARGETS.npy")
    table = Table([str(k) for k in range(array.shape[1])], selection, array.where)

    def rows(load: Callable[[], NDArray], numbers: range) -> Rows:
        return table.rows(load().astype(np.float64), numbers)

    def blocks() -> Iterator[Block]:
        done = 0
        for count, load in array.pieces(_step(8 * array.shape[1])):
            yield Block(count, partial(rows, load, range(done, done + count)))
            done += count

    return Source(array.where, table.kinds, blocks, table.exact)


def parquet_source(path: Path, selection: Selection) -> Source:
    """A Parquet file. Needs pyarrow (extra `parquet`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SystemUnfitError(f"{path}: Parquet needs pyarrow: pip install 'distmlp[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: is not a Parquet file: {error}") from None
    table = Table(names, selection, str(path))

    def column(values: Any, number: int, first: int) -> NDArray:
        kind = values.type
        if number not in table.codes and (pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind)):
            return values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        if pyarrow.types.is_boolean(kind):
            return values.cast("uint8").cast("float64").to_numpy(zero_copy_only=False)
        if pyarrow.types.is_nested(kind):
            raise DataError(
                f"{path}, row {first}, column `{table.names[number]}` holds {kind}, expected a number in every row; "
                "spread it over columns of its own, or leave it out with --inputs"
            )
        texts = values.cast("string").to_pylist()
        return np.array([table.cell(number, text or "", f"{path}, row {first + k}") for k, text in enumerate(texts)])

    def rows(batch: Any, first: int) -> Rows:
        try:
            values = np.full((batch.num_rows, len(table.names)), np.nan)
            for number in table.used:
                values[:, number] = column(batch.column(number), number, first)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}, from row {first}: cannot be read: {error}") from None
        return table.rows(values, range(first, first + len(values)))

    def blocks() -> Iterator[Block]:
        done = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=8192):
                    yield Block(batch.num_rows, partial(rows, batch, done))
                    done += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}, from row {done}: cannot be read: {error}") from None

    return Source(str(path), table.kinds, blocks, table.exact)


def hdf5_source(path: Path, selection: Selection) -> Source:
    """Another HDF5 file, to repack it."""
    wanted = (selection.inputs or "inputs", selection.targets or "targets", selection.weights)
    datasets = {role: name for role, name in zip(ROLES, wanted, strict=True) if name not in ("", "none")}
    item = inspect_files([os.path.abspath(path)], datasets)[0]
    problem = item.problem or next(iter(check_shapes([item.layouts], "", ()).values()), "")
    if problem:
        raise DataError(f"{path}: {problem}")
    layouts, reader = item.layouts, RowReader()
    total, step = layouts["inputs"].rows, _step(max(layout.row_bytes for layout in layouts.values()))

    def read(layout: Layout, start: int, stop: int) -> NDArray:
        block = np.empty((stop - start, *layout.shape[1:]), layout.native)
        reader.read(layout, start, stop, block.reshape(stop - start, layout.width))
        return block

    def blocks() -> Iterator[Block]:
        for start in range(0, total, step):
            stop = min(total, start + step)
            loads = {role: partial(read, layout, start, stop) for role, layout in layouts.items()}
            yield Block(stop - start, partial(_rows, loads))

    kinds = {role: (layout.shape[1:], np.dtype(layout.native)) for role, layout in layouts.items()}
    return Source(str(path), kinds, blocks)
