"""The part of an epoch that one rank owns, numbered without gaps. Pure.

A rank owns the positions of its contiguous streams; its i-th position of an epoch has own index i.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmlp.order import Order


@dataclass(frozen=True)
class Lanes:
    """Own index ↔ epoch position for the contiguous range `streams` of `order.streams`."""

    order: Order
    streams: range

    @property
    def count(self) -> int:
        """Rows that the streams hold, which is the positions they have in an epoch."""
        return len(self.order.owned_rows(self.streams))

    def before(self, position: int) -> int:
        """How many own positions lie before `position`."""
        place, stream = divmod(position, self.order.streams)
        return place * len(self.streams) + min(max(stream - self.streams.start, 0), len(self.streams))

    def of_batch(self, number: int) -> range:
        """Own indices of global batch `number`; they may be none."""
        first = number * self.order.batch
        return range(self.before(first), self.before(first + self.order.batch_size(number)))

    def positions(self, indices: NDArray) -> NDArray:
        """Epoch positions (int64) of own indices."""
        place, lane = np.divmod(np.asarray(indices, np.int64), len(self.streams))
        return place * self.order.streams + self.streams.start + lane

    def rows(self, epoch: int, indices: range) -> NDArray:
        """Global rows (int64) that stand at own indices of `epoch`, in position order."""
        return self.order.rows_at(epoch, self.positions(np.arange(indices.start, indices.stop, dtype=np.int64)))
