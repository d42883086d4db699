"""The file that `predict` writes: one dataset, complete or absent."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from distmlp.errors import DataError


class PredictionWriter:
    """Writes `predictions` (rows, outputs), float32, block by block under a temporary name."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = h5py.File(self._temporary, "x", locking=False)
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
            self._file.close()
            with open(self._temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self._temporary, self._path)
        except (OSError, RuntimeError) as error:
            raise self._fault(error) from None

    def close(self) -> None:
        """Remove what an interrupted job left."""
        with suppress(OSError, RuntimeError):
            self._file.close()
        with suppress(OSError):
            self._temporary.unlink()

    def _fault(self, error: Exception) -> DataError:
        self.close() if hasattr(self, "_file") else None
        return DataError(f"predictions {self._path}: could not be written: {error}; give another place with --out")
