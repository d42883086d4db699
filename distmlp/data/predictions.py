"""The file that `predict` writes: one dataset, complete or absent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from numpy.typing import NDArray

from distmlp.errors import DataError
from distmlp.files import check_replaceable, describe


class PredictionWriter:
    """Writes `predictions` (rows, outputs), float32, block by block under a temporary name."""

    def __init__(self, path: Path, shape: tuple[int, int], sources: Iterable[str | Path] = ()) -> None:
        """A file `path` for an array of `shape`; refused where it would replace one of `sources`."""
        self._path = path
        self._file: h5py.File | None = None
        self._handle: BinaryIO | None = None
        self._temporary: Path | None = None
        try:
            check_replaceable(path, sources)
            self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            # A file of our own: HDF5 would lock one that it opens, if HDF5_USE_FILE_LOCKING says so.
            self._handle = open(self._temporary, "x+b")  # noqa: SIM115 - closed by `finish` or `close`
            self._file = h5py.File(self._handle, "w")
            self._dataset = self._file.create_dataset("predictions", shape, np.float32)
        except OSError as error:
            raise self._fault(error) from None

    def write(self, start: int, block: NDArray) -> None:
        """Store rows `start` to `start + len(block)`. Raises DataError where the disk refuses."""
        try:
            self._dataset[start : start + len(block)] = block
        except OSError as error:
            raise self._fault(error) from None

    def finish(self) -> None:
        """Give the file its name."""
        try:
            if self._file is not None and self._handle is not None:
                self._file.close()
                self._handle.flush()
                os.fsync(self._handle.fileno())
                self._handle.close()
            assert self._temporary is not None
            os.replace(self._temporary, self._path)
        except (OSError, RuntimeError) as error:
            raise self._fault(error) from None

    def close(self) -> None:
        """Remove what an interrupted job left."""
        with suppress(OSError, RuntimeError):
            if self._file is not None:
                self._file.close()
        with suppress(OSError):
            if self._handle is not None:
                self._handle.close()
        with suppress(OSError):
            if self._temporary is not None:
                self._temporary.unlink()

    def _fault(self, error: Exception) -> DataError:
        self.close()
        reason = str(error)
        if isinstance(error, OSError) and error.errno:  # HDF5 adds lines of its own
            own = (
                isinstance(error.strerror, str) and "\n" not in error.strerror and "synchronously" not in error.strerror
            )
            told = error if own else OSError(error.errno, os.strerror(error.errno))
            reason = describe(told, self._path)
        return DataError(f"predictions {self._path}: could not be written: {reason}; give another place with --out")
