"""Loss and metrics of a network over shards, the same at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from distmlp.comm.world import World
from distmlp.data.shards import Shards
from distmlp.data.values import blame
from distmlp.engine import Engine, Evaluation
from distmlp.errors import DataError

_SMALLEST_BLOCK = 256
_LARGEST_BLOCK = 65536


def row_blocks(rows: int) -> list[range]:
    """Blocks of rows that depend on `rows` alone: their sums are the same whichever rank computes them."""
    size = min(max(rows // 64, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def own_blocks(rows: int, world: World) -> Iterator[range]:
    """The contiguous blocks of this rank."""
    blocks = row_blocks(rows)
    yield from blocks[len(blocks) * world.rank // world.size : len(blocks) * (world.rank + 1) // world.size]


def evaluate(engine: Engine, shards: Shards, world: World, strict: bool = False) -> Evaluation:
    """Sums over all rows of `shards`, on every rank. Raises AgreedError when a rank cannot read its rows.

    `strict`: rows that hold NaN or infinity are refused with their names, where the loss shows that there are any.
    """

    def mine() -> list[Evaluation]:
        sums = []
        for block in own_blocks(shards.rows, world):
            rows = shards.read(block.start, block.stop)
            sums.append(engine.evaluate(rows.inputs, rows.targets, rows.weights))
            if strict and not math.isfinite(sums[-1].loss):
                fault = blame(shards, np.arange(block.start, block.stop), rows)
                if fault:
                    raise DataError(f"{fault}; mend or leave out those rows")
        return sums

    by_rank = world.all_gather([part.as_array() for part in world.agree(mine)])
    table = np.array([part for parts in by_rank for part in parts])
    return Evaluation.from_array(np.array([math.fsum(column) for column in table.T]))


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
