"""Write shards: contiguous datasets, so that they are read at full speed; a file is complete or absent."""

from __future__ import annotations

import os
import secrets
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from numpy.typing import NDArray

from distmlp.data.layout import CHECKSUM_GROUP
from distmlp.errors import DataError
from distmlp.files import check_replaceable, describe, sync_directory
from distmlp.order import BLOCK_ROWS

COPY_BYTES = 64 << 20


class _Column:
    """One dataset in the making: its bytes lie in a nameless temporary file until the number of rows is known."""

    def __init__(self, sample: NDArray, folder: Path, checksums: bool) -> None:
        self.dtype, self.tail, self.rows = sample.dtype, sample.shape[1:], 0
        self.spool: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.sums: list[int] | None = [] if checksums else None
        self._sum = 0

    def append(self, array: NDArray, where: str) -> None:
        if array.dtype != self.dtype or array.shape[1:] != self.tail:
            raise DataError(
                f"{where}: rows of shape {array.shape[1:]} {array.dtype} after rows of {self.tail} {self.dtype}; "
                "all sources must agree"
            )
        array = np.ascontiguousarray(array)
        if array.size:
            self.spool.write(array.data.cast("B"))
        if self.sums is not None:
            self._add_sums(array)
        self.rows += len(array)

    def _add_sums(self, array: NDArray) -> None:
        assert self.sums is not None
        start = 0
        while start < len(array):
            inside = (self.rows + start) % BLOCK_ROWS
            piece = array[start : start + BLOCK_ROWS - inside]
            self._sum = zlib.crc32(piece.tobytes(), self._sum if inside else 0)
            if inside == 0:
                self.sums.append(0)
            self.sums[-1] = self._sum
            start += len(piece)


class ShardWriter:
    """One shard at `path`, filled by `append`, finished by `close` (or the end of a `with` block).

    `checksums`: store a CRC-32 of every 256 rows, which readers verify. Constant memory. Raises DataError
    when the disk is full or the folder cannot be written; then nothing is left behind.
    """

    def __init__(self, path: Path, checksums: bool = False) -> None:
        self.path, self._checksums = path, checksums
        self._columns: dict[str, _Column] = {}

    @property
    def rows(self) -> int:
        """Rows appended so far."""
        return next(iter(self._columns.values())).rows if self._columns else 0

    def append(self, **arrays: NDArray) -> None:
        """Add rows: `append(inputs=…, targets=…)`; the same datasets, shapes and dtypes each time."""
        try:
            for name, array in arrays.items():
                if name not in self._columns:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._columns[name] = _Column(array, self.path.parent, self._checksums)
                self._columns[name].append(array, f"{self.path}, dataset `{name}`")
        except OSError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        """Write the file under a temporary name, flush it to disk, give it its name."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(12)}.tmp")
        try:
            try:
                check_replaceable(self.path)
                self._write(temporary)
                os.rename(temporary, self.path)
                sync_directory(self.path.parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise self._failure(error) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget everything that was appended."""
        for column in self._columns.values():
            with suppress(OSError):  # its buffer may still not fit the disk
                column.spool.close()
        self._columns = {}

    def _write(self, temporary: Path) -> None:
        offsets = {}
        # A file of our own: HDF5 would lock one that it opens, if HDF5_USE_FILE_LOCKING says so.
        with open(temporary, "x+b") as handle, h5py.File(handle, "w") as file:
            for name, column in self._columns.items():
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                plist.set_obj_track_times(False)  # the same rows give the same bytes
                space = h5py.h5s.create_simple((column.rows, *column.tail))
                kind = h5py.h5t.py_create(column.dtype, logical=True)
                dataset = h5py.h5d.create(file.id, name.encode(), kind, space, plist)
                offsets[name] = dataset.get_offset()
                if column.sums is not None:
                    sums = file.create_dataset(f"{CHECKSUM_GROUP}/{name}", data=np.array(column.sums, "<u4"))
                    sums.attrs["block_rows"] = BLOCK_ROWS
        with open(temporary, "r+b", buffering=0) as file:
            for name, column in self._columns.items():
                if column.rows and offsets[name] is not None:
                    file.seek(offsets[name])
                    column.spool.seek(0)
                    while piece := column.spool.read(COPY_BYTES):
                        _write_all(file, piece)
            os.fsync(file.fileno())

    def _failure(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: cannot be written: {describe(error, self.path.parent)}")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[file.write(view) :]
