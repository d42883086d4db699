"""Rows that are already in memory: a feed over arrays, and their moments. For callers without files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distmlp.data.shards import Rows
from distmlp.order import Order


class MemoryFeed:
    """What `data.feed.Feed` is to a run, over arrays in memory: one process, all streams."""

    wait_seconds = 0.0

    def __init__(self, rows: Rows, order: Order) -> None:
        self._rows, self.order, self.streams = rows, order, range(order.streams)

    def batch(self, epoch: int, number: int) -> Rows:
        """The rows of a batch, in the order of `Order`."""
        return take(self._rows, self.order.batch_rows(epoch, number, self.streams))

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
    wide = values.astype(np.float64)
    mean = np.average(wide, axis=0, weights=weights)
    deviation = np.sqrt(np.average((wide - mean) ** 2, axis=0, weights=weights))
    constant = deviation <= 1e-14 * np.abs(mean)  # nothing but the rounding of the mean
    return mean, np.where(constant, 1.0, deviation)


def take(rows: Rows, chosen: NDArray) -> Rows:
    """The chosen rows, copied."""
    return rows.map(lambda array: array[chosen])
