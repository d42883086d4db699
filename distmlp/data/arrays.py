"""Rows that are already in memory: a feed over arrays, and their moments. For callers without files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distmlp.data.rows import Rows
from distmlp.order import Order

BLOCK_ROWS = 64  # of a sum: stays in the cache, which is worth a factor of ten


class MemoryFeed:
    """What `data.feed.Feed` is to a run, over arrays in memory: one process, all streams.

    The order of an epoch is computed at once: 8 bytes a row.
    """

    wait_seconds = 0.0

    def __init__(self, rows: Rows, order: Order) -> None:
        self._rows, self.order, self.streams = rows, order, range(order.streams)
        self._epoch, self._places = -1, np.empty(0, np.int64)

    def batch(self, epoch: int, number: int) -> Rows:
        """The rows of a batch, in the order of `Order`."""
        if epoch != self._epoch:
            self._epoch, self._places = epoch, self.order.rows_at(epoch, np.arange(self.order.rows))
        first = number * self.order.batch
        return take(self._rows, self._places[first : first + self.order.batch])

    def resident(self) -> Rows:
        """All rows, as they lie."""
        return self._rows

    def resident_bytes(self) -> int:
        return sum(array.nbytes for array in self._rows.parts)

    def blame(self, epoch: int, number: int) -> None:
        """Non-finite values are refused before a fit."""

    def close(self) -> None:
        """Nothing is held."""


def moments(values: NDArray, weights: NDArray | None) -> tuple[NDArray, NDArray]:
    """Mean and deviation (columns,), float64, of `values` (rows, columns), each row counting with its weight.

    The deviation of a constant column is 1.
    """
    weights = np.ones(len(values)) if weights is None else weights / weights.mean()
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, len(values), BLOCK_ROWS)]
    mean, square = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for block in blocks:
        mean += weights[block] @ values[block].astype(np.float64) / len(values)
    for block in blocks:
        square += weights[block] @ (values[block] - mean) ** 2 / len(values)
    deviation = np.sqrt(square)
    constant = deviation <= 1e-14 * np.abs(mean)  # nothing but the rounding of the mean
    return mean, np.where(constant, 1.0, deviation)


def take(rows: Rows, chosen: NDArray) -> Rows:
    """The chosen rows, copied."""
    return rows.map(lambda array: array[chosen])
