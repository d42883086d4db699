"""A batch on the threads of a rank: contiguous parts of its rows, each on one thread with one BLAS thread.

A BLAS that splits single products waits for its own threads many times a step, and waits very long where another
process has one of the cores. Here the threads meet once a step, and everything between is split, not only products.
The parts are cut by the number of rows alone, and added in their order: the bits do not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import DTypeLike, NDArray
from threadpoolctl import ThreadpoolController

from distmlp.engine.backprop import Layers
from distmlp.engine.optimizers import blocks
from distmlp.engine.rows import RowPasses
from distmlp.engine.tally import TALLY, Sums
from distmlp.network import Network

PART_ROWS = 128  # fewer make products inefficient
MOST_PARTS = 16
MOST_ELEMENTS = 1 << 24  # of all parts' sums; larger networks leave threads to the BLAS, which is good at them


def part_count(rows: int, network: Network) -> int:
    """Parts that `rows` rows are cut into."""
    most = min(MOST_PARTS, MOST_ELEMENTS // network.size)
    return max(1, min(most, round(rows / PART_ROWS)))


class PartSums:
    """Sums over the rows of a batch, like `RowPasses.sums`, on threads."""

    def __init__(self, make_passes: Callable[[int], RowPasses], network: Network, dtype: DTypeLike, rows: int) -> None:
        """`make_passes(rows)`: one thread's passes for up to `rows` rows; `rows`: of the largest batch to expect."""
        self._network, self._controller = network, ThreadpoolController()
        parts = part_count(rows, network)
        libraries = self._controller.select(user_api="blas").info()
        threads = max((library["num_threads"] for library in libraries), default=1)
        self._passes = [make_passes(-(-rows // parts)) for _ in range(min(threads, parts))]
        self._sums = [Sums(network, np.zeros(network.size + TALLY, dtype)) for _ in range(parts - 1)]
        self._split = MOST_ELEMENTS // network.size > 1
        others = len(self._passes) - 1
        self._pool = ThreadPoolExecutor(others, "distmlp-rows") if others else None

    def one_blas_thread(self, always: bool = False) -> AbstractContextManager:
        """To hold while `sums` is called; leaves the BLAS its threads where no batch is cut, but for `always`."""
        return self._controller.limit(limits=1, user_api="blas") if self._split or always else nullcontext()

    def sums(self, layers: Layers, inputs: NDArray, targets: NDArray, weights: NDArray | None, out: Sums) -> None:
        """Write the weighted sums of gradient and loss over raw rows, and what they weigh, to `out`."""
        rows, parts = len(inputs), part_count(len(inputs), self._network)
        sums = [out, *self._sums[: parts - 1]]
        cuts = [rows * part // parts for part in range(parts + 1)]

        def work(thread: int) -> None:
            with np.errstate(all="ignore"):
                for part in range(thread, parts, len(self._passes)):
                    own = slice(cuts[part], cuts[part + 1])
                    own_weights = None if weights is None else weights[own]
                    self._passes[thread].sums(layers, inputs[own], targets[own], own_weights, sums[part])

        others = []
        if self._pool:
            others = [self._pool.submit(work, thread) for thread in range(1, min(parts, len(self._passes)))]
        work(0)
        for other in others:
            other.result()
        for block in blocks(out.buffer.size) if parts > 1 else ():
            for part_sums in sums[1:]:
                out.buffer[block] += part_sums.buffer[block]

    def close(self) -> None:
        """Let the threads end."""
        if self._pool:
            self._pool.shutdown()
