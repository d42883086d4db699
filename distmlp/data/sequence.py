"""The shards of one part of a conversion, one after the other; each written by the rank that it is dealt to."""

from __future__ import annotations

from collections.abc import Callable
from glob import escape
from pathlib import Path

from distmlp.data.present import PresentShard
from distmlp.data.rows import Rows
from distmlp.data.writer import ShardWriter
from distmlp.errors import DataError

LARGEST_NUMBER = 99_999  # five digits: shards are read in the order of their sorted names


class ShardSequence:
    """`path(0)`, `path(1)`, … of `limit` rows each (0: one file of all). `mine(K)`: whether shard K is written here."""

    def __init__(
        self, out: Path, part: str, limit: int, mine: Callable[[int], bool],
        open_shard: Callable[[Path], ShardWriter | PresentShard],
    ) -> None:  # fmt: skip
        self._stem = out.with_name("-".join(filter(None, [out.stem, part])))
        self._suffix, self._limit = out.suffix, limit
        self._mine, self._open = mine, open_shard
        self._writer: ShardWriter | PresentShard | None = None
        self.rows = 0

    def path(self, number: int) -> Path:
        """Of shard `number`."""
        return self._stem.with_name(f"{self._stem.name}{f'-{number:05d}' if self._limit else ''}{self._suffix}")

    @property
    def paths(self) -> list[Path]:
        """Of all shards that the rows so far fill or begin."""
        number = -(-self.rows // self._limit) if self._limit else min(self.rows, 1)
        return [self.path(k) for k in range(number)]

    def present(self) -> list[Path]:
        """Files that have such names already, in order."""
        number = "-" + 5 * "[0-9]" if self._limit else ""
        return sorted(self._stem.parent.glob(f"{escape(self._stem.name)}{number}{escape(self._suffix)}"))

    def wants(self, count: int) -> bool:
        """Whether one of the next `count` rows is written here."""
        if not count:
            return False
        if not self._limit:
            return self._mine(0)
        return any(map(self._mine, range(self.rows // self._limit, (self.rows + count - 1) // self._limit + 1)))

    def append(self, rows: Rows | None, count: int) -> None:
        """The next `count` rows; None where this rank does not want them."""
        done = 0
        while done < count:
            number = self.rows // self._limit if self._limit else 0
            stop = min(count, done + self._limit - self.rows % self._limit) if self._limit else count
            if rows is not None and self._mine(number):
                self._write(number, rows, slice(done, stop))
            self.rows += stop - done
            done = stop
            if self._limit and self.rows % self._limit == 0:
                self.finish()

    def _write(self, number: int, rows: Rows, piece: slice) -> None:
        if self._writer is None:
            if number > LARGEST_NUMBER:
                raise DataError(
                    f"{self.path(number)}: more than {LARGEST_NUMBER + 1:,} shards, whose names would not sort in "
                    "their order; raise --rows-per-shard"
                )
            self._writer = self._open(self.path(number))
        arrays = {"inputs": rows.inputs[piece]}
        if rows.targets.size:
            arrays["targets"] = rows.targets[piece]
        if rows.weights is not None:
            arrays["sample_weights"] = rows.weights[piece]
        self._writer.append(**arrays)

    def finish(self) -> None:
        """Give the shard under way its name."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def discard(self) -> None:
        """Forget the shard under way."""
        if self._writer is not None:
            self._writer.discard()
