"""A shard that an interrupted conversion has finished: compared with what would be written, not written again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmlp.data.inspection import inspect_files
from distmlp.data.reader import RowReader
from distmlp.errors import DataError


class PresentShard:
    """Stands in for a `ShardWriter` whose file is there. Raises DataError where the file holds something else."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self._reader = RowReader()
        self._names: dict[str, str] = {}

    def append(self, **arrays: NDArray) -> None:
        """Compare the next rows."""
        if not self._names:
            self._names = {name: name for name in arrays}
            found = inspect_files([str(self.path)], self._names)[0]
            if found.problem:
                raise DataError(f"{self.path}: {found.problem}")
            self._layouts = found.layouts
        count = len(next(iter(arrays.values())))
        for name, array in arrays.items():
            layout = self._layouts[name]
            same = layout.native == array.dtype and layout.shape[1:] == array.shape[1:]
            if same and self.rows + count <= layout.rows:
                stored = np.empty((count, layout.width), layout.native)
                self._reader.read(layout, self.rows, self.rows + count, stored)
                same = stored.tobytes() == array.tobytes()
            if not same or self.rows + count > layout.rows:
                raise self._differs(name)
        self.rows += count

    def close(self) -> None:
        """All rows have come."""
        for name, layout in self._layouts.items():
            if layout.rows != self.rows:
                raise self._differs(name)

    def discard(self) -> None:
        """Nothing was begun."""

    def _differs(self, name: str) -> DataError:
        return DataError(
            f"{self.path}, dataset `{name}`: holds other rows than these sources and options give, so it is not what "
            "an interrupted conversion left; remove it, or begin anew with --overwrite"
        )
