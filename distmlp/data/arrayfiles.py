"""Arrays in IDX, NPY and NPZ files: header first, then rows as a stream, without pickle."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from distmlp.errors import DataError

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
LARGEST_ROW_BYTES = 1 << 30
_ZIP_FAULTS = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Array:
    """An array in a file: what it is called in messages, its header, and where its values come from."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: Any  # a context manager that gives a stream standing at the first value

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, refused where a header claims the absurd."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        if size > LARGEST_ROW_BYTES:
            raise DataError(f"{self.where}: claims rows of {self.shape[1:]} {self.dtype}, {size:,} bytes each")
        return size

    @property
    def kind(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the rows that come out."""
        return self.shape[1:], np.dtype(np.uint8) if self.dtype == bool else self.dtype.newbyteorder("=")

    def blocks(self, rows: int) -> Iterator[NDArray]:
        """All rows, `rows` at a time, in native byte order. Raises DataError where the file ends early."""
        for _, load in self.pieces(rows):
            yield load()

    def pieces(self, rows: int) -> Iterator[tuple[int, Callable[[], NDArray]]]:
        """The same as (how many rows, what reads them): called before the next piece is asked for, or not at all."""
        row_bytes = self.row_bytes
        with self.source() as stream:
            begin = stream.tell()
            for start in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - start)
                yield count, partial(self._read, stream, begin + start * row_bytes, start, count)
            if stream.tell() == begin + self.shape[0] * row_bytes and stream.read(1):
                raise DataError(f"{self.where}: goes on after its {self.shape[0]} rows")

    def _read(self, stream: BinaryIO, place: int, start: int, count: int) -> NDArray:
        size = count * self.row_bytes
        try:
            stream.seek(place)
            data = stream.read(size)
        except _ZIP_FAULTS as error:
            raise DataError(f"{self.where}: cannot be read: {error}") from None
        if len(data) < size:
            last = start + len(data) // max(1, self.row_bytes)
            raise DataError(f"{self.where}: ends at row {last} of {self.shape[0]}")
        block = np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])
        return block.astype(self.kind[1])


def idx_array(path: Path) -> Array:
    """An IDX file (.gz too). Source of the format: http://yann.lecun.com/exdb/mnist/"""

    @contextmanager
    def stream(skip: int = 0) -> Iterator[BinaryIO]:
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                file.read(skip)
                yield file  # type: ignore[misc]
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None

    with stream() as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_TYPES or not head[3]:
            raise DataError(f"{path}: is not an IDX file (it begins with {head.hex(' ') or 'nothing'})")
        sizes = file.read(4 * head[3])
        if len(sizes) < 4 * head[3]:
            raise DataError(f"{path}: ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    return Array(str(path), shape, np.dtype(IDX_TYPES[head[2]]), lambda: stream(4 + len(sizes)))


def _npy_header(file: Any, where: str) -> tuple[tuple[int, ...], np.dtype, bool]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{where}: is not an NPY array: {error}") from None
    if dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(f"{where}: holds {dtype}, expected real numbers of 1 to 8 bytes (pickles are never read)")
    if not shape:
        raise DataError(f"{where}: is a single number, expected rows")
    return shape, dtype, fortran and len(shape) > 1


@dataclass(frozen=True)
class FortranArray(Array):
    """An NPY file whose columns, not rows, lie together, as pandas likes to save them: mapped, not streamed."""

    def pieces(self, rows: int) -> Iterator[tuple[int, Callable[[], NDArray]]]:
        for start in range(0, self.shape[0], rows):
            part = self.source[start : start + rows]
            yield len(part), partial(np.array, part, self.kind[1], order="C")


def npy_array(path: Path) -> Array:
    """An NPY file."""

    @contextmanager
    def stream() -> Iterator[BinaryIO]:
        try:
            with open(path, "rb") as file:
                _npy_header(file, str(path))
                yield file
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None

    with stream() as file:
        file.seek(0)
        shape, dtype, fortran = _npy_header(file, str(path))
    if not fortran:
        return Array(str(path), shape, dtype, stream)
    try:
        return FortranArray(str(path), shape, dtype, np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def npz_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an NPZ file by name, streamed out of the archive."""

    @contextmanager
    def stream(member: str, where: str) -> Iterator[Any]:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                _npy_header(file, where)
                yield file
        except _ZIP_FAULTS as error:
            raise DataError(f"{where}: cannot be read: {error}") from None

    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                where = f"{path}, array `{member.removesuffix('.npy')}`"
                with archive.open(member) as file:
                    shape, dtype, fortran = _npy_header(file, where)
                if fortran:
                    raise DataError(f"{where}: is in Fortran order; save it as numpy.ascontiguousarray(array)")
                arrays[member.removesuffix(".npy")] = Array(
                    where, shape, dtype, lambda member=member, where=where: stream(member, where)
                )
    except _ZIP_FAULTS as error:
        raise DataError(f"{path}: is not an NPZ file: {error}") from None
    return arrays
