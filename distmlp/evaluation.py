"""Loss and metrics of a network over shards, the same at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.world import World
from distmlp.data.shards import Shards
from distmlp.data.values import unfit
from distmlp.engine import Engine, Evaluation
from distmlp.errors import DataError

_SMALLEST_BLOCK = 256
_LARGEST_BLOCK = 65536
_UNFIT_KEPT = 1000


def row_blocks(rows: int) -> list[range]:
    """Blocks of rows that depend on `rows` alone: their sums are the same whichever rank computes them."""
    size = min(max(rows // 64, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def own_blocks(rows: int, world: World) -> Iterator[range]:
    """The contiguous blocks of this rank."""
    blocks = row_blocks(rows)
    yield from blocks[len(blocks) * world.rank // world.size : len(blocks) * (world.rank + 1) // world.size]


class _Unfit:
    """Rows that hold no numbers, by what they hold: how many there are, and the first of them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, list[int]] = {}

    def add(self, what: str, numbers: Sequence[int], count: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + count
        first = self.first.setdefault(what, [])
        first += numbers[: _UNFIT_KEPT - len(first)]

    def where(self, shards: Shards) -> str:
        """ "file rows 3, 7: inputs hold NaN or infinite values; …"."""
        parts = []
        for what, first in self.first.items():
            more = f" ({self.counts[what]:,} rows in all)" if self.counts[what] > len(first) else ""
            parts.append(f"{shards.locate(first)}{more}: {what}")
        return "; ".join(parts)


def evaluate(
    engine: Engine, shards: Shards, world: World, unfit_rows: Callable[[str], None] | None = None
) -> Evaluation:
    """Sums over all rows of `shards`, on every rank. Raises AgreedError when a rank cannot read its rows.

    With `unfit_rows`, rows that hold NaN or infinity are left out, if the loss shows that there are any, and it is told
    at the end on every rank where they lie; it may raise. Without it they count as they are.
    """
    own = _Unfit()

    def mine() -> list[NDArray]:
        sums = []
        for block in own_blocks(shards.rows, world):
            numbers, rows = np.arange(block.start, block.stop), shards.read(block.start, block.stop)
            part = engine.evaluate(rows.inputs, rows.targets, rows.weights)
            while unfit_rows and not math.isfinite(part.loss):
                found, what = unfit(rows)
                if not what:
                    break
                own.add(what, numbers[found].tolist(), int(found.sum()))
                numbers, rows = numbers[~found], rows.map(lambda array, good=~found: array[good])
                part = engine.evaluate(rows.inputs, rows.targets, rows.weights)
            sums.append(part.as_array())
        return sums

    by_rank = world.all_gather((world.agree(mine), own))
    everywhere = _Unfit()
    for _, others in by_rank:
        for what, first in others.first.items():
            everywhere.add(what, first, others.counts[what])
    if unfit_rows and everywhere.counts:
        unfit_rows(everywhere.where(shards))
    table = np.array([part for parts, _ in by_rank for part in parts])
    return Evaluation.from_array(np.array([_sum(column) for column in table.T]))


def refuse(where: str) -> None:
    """For `evaluate`: end it."""
    raise DataError(f"{where}; mend or leave out those rows")


def _sum(column: NDArray) -> float:
    try:
        return math.fsum(column)
    except (ValueError, OverflowError):  # infinity of either sign, or beyond float64
        return math.nan


def metrics(total: Evaluation, loss: str) -> dict[str, float]:
    """`loss`, and `accuracy` (classification) or `rmse mae r2` (regression, in the targets' own units).

    `r2` is the mean over the outputs of 1 - residual / total sum of squares; NaN where a target is constant.
    """
    weight = total.weight or math.nan
    result = {"loss": total.loss / weight}
    if "cross_entropy" in loss:
        result["accuracy"] = total.correct / weight
        return result
    values = weight * len(total.squared)
    spread = total.target_squared - total.target**2 / weight
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = np.where(spread > 0, 1.0 - total.squared / spread, np.nan)
    result["rmse"] = math.sqrt(total.squared.sum() / values)
    result["mae"] = total.absolute / values
    result["r2"] = float(explained.mean())
    return result
