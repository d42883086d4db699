"""A cost model of the training step, fitted to measured points, and what it predicts elsewhere. Pure.

The cost of a step at n ranks, b rows a rank and m bytes of gradient is modelled, in microseconds, as

    fixed + per_row * b  +  [n > 1] * imbalance + latency * 2 ceil(log2 n) + per_byte * m * 2 (n - 1) / n

`imbalance` is what having several ranks costs beside the exchange: waiting for each other, one launch a step. The
last two terms are those of a reduce-scatter and an all-gather by recursive halving and doubling
(Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005). Every coefficient is at least zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from distmlp.tools.scaling_math import Measured, all_reduce_volume


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce measured by itself: `bytes` over `ranks` took `us` microseconds. `way`: how it went."""

    ranks: int
    bytes: int
    us: float
    way: str = "host"


@dataclass(frozen=True)
class CostModel:
    """The coefficients of the module's formula, and m."""

    fixed_us: float
    per_row_us: float
    imbalance_us: float
    latency_us: float
    per_byte_us: float
    gradient_bytes: int

    @property
    def bandwidth_bytes_per_second(self) -> float | None:
        """`None` where the points show no cost per byte."""
        return 1e6 / self.per_byte_us if self.per_byte_us > 0 else None

    def step_us(self, ranks: int, batch: int) -> float:
        """A whole step over a global batch of `batch` rows."""
        compute = self.fixed_us + self.per_row_us * math.ceil(batch / ranks)
        if ranks == 1:
            return compute
        exchange = np.dot(_exchange_terms(ranks, self.gradient_bytes), (self.latency_us, self.per_byte_us))
        return compute + self.imbalance_us + float(exchange)


def _exchange_terms(ranks: int, size_bytes: int) -> tuple[float, float]:
    """What `latency` and `per_byte` are multiplied by."""
    return (2.0 * math.ceil(math.log2(ranks)), all_reduce_volume(ranks) * size_bytes) if ranks > 1 else (0.0, 0.0)


def fit(points: Sequence[Measured], gradient_bytes: int, exchanges: Sequence[AllReduce] = ()) -> CostModel:
    """The cost model of measured points, relative errors weighing equally.

    `exchanges`, all-reduces measured by themselves, give latency and bandwidth; what the steps took beyond
    them and one rank's step is imbalance. Without them both come from the steps. Raises ValueError without a point.
    """
    if not points:
        raise ValueError("no measured point")
    wide = [exchange for exchange in exchanges if exchange.ranks > 1]
    known = np.zeros(2)
    if wide:
        terms = np.array([_exchange_terms(e.ranks, e.bytes) for e in wide])
        known = _solve(terms, np.array([e.us for e in wide]), np.array([1.0 / e.us for e in wide]))
    columns, values, weights = [], [], []
    for point in points:
        for row, value in _equations(point, gradient_bytes, split=not wide):
            columns.append(row)
            values.append(value)
            weights.append(1.0 / point.step_us)
    table, times = np.array(columns), np.array(values)
    if wide:
        times = np.maximum(times - table[:, 3:] @ known, 0.0)
        table[:, 3:] = 0.0
    else:
        table[:, 2] = 0.0  # imbalance and latency cannot be told apart
    solution = _solve(table, times, np.array(weights))
    if wide:
        solution[3:] = known
    fixed, per_row, imbalance, latency, per_byte = (float(value) for value in solution)
    return CostModel(fixed, per_row, imbalance, latency, per_byte, gradient_bytes)


def _equations(point: Measured, gradient_bytes: int, split: bool) -> Iterator[tuple[list[float], float]]:
    """Rows over (fixed, per_row, imbalance, latency, per_byte) and the microseconds they should give.

    `split`: compute and communication as they were timed apart; else the step as a whole.
    """
    compute = [1.0, float(point.rows_per_rank), 0.0, 0.0, 0.0]
    exchange = [0.0, 0.0, 1.0, *_exchange_terms(point.ranks, gradient_bytes)]
    if point.ranks == 1:
        yield compute, point.step_us
    elif point.communication_us is None or not split:
        yield [a + b for a, b in zip(compute, exchange, strict=True)], point.step_us
    else:
        yield compute, point.step_us - point.communication_us
        yield exchange, point.communication_us


def _solve(columns: NDArray, values: NDArray, weights: NDArray) -> NDArray:
    """Non-negative least squares of weighted equations, columns scaled to a like size."""
    weighted = columns * weights[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0.0] = 1.0
    return nonnegative_least_squares(weighted / scale, values * weights) / scale


def nonnegative_least_squares(columns: NDArray, values: NDArray) -> NDArray:
    """x >= 0 that minimises |columns @ x - values|; columns (equations, unknowns <= 5), values (equations,).

    The answer is an ordinary least-squares solution on the set of its non-zero unknowns, so all such sets are
    tried; among equally good ones the smallest wins.
    """
    unknowns = columns.shape[1]
    best, best_error = np.zeros(unknowns), float(values @ values)
    for count in range(1, unknowns + 1):
        for chosen in combinations(range(unknowns), count):
            part = columns[:, chosen]
            solution, *_ = np.linalg.lstsq(part, values, rcond=None)
            error = float(np.sum((part @ solution - values) ** 2))
            if solution.min() >= 0.0 and error < best_error - 1e-12 * float(values @ values):
                best, best_error = np.zeros(unknowns), error
                best[list(chosen)] = solution
    return best


def predict(model: CostModel, mode: str, ranks: int, batch: int) -> dict[str, float | int | str | None]:
    """Speed at `ranks` when one rank takes `batch` rows; efficiency relative to the model's own one-rank step.

    Times are `None` where a strong sweep would leave ranks without rows.
    """
    total = batch * ranks if mode == "weak" else batch
    point: dict[str, float | int | str | None] = {"mode": mode, "ranks": ranks, "global_batch": total}
    if total < ranks:
        return point | dict.fromkeys(("us_per_step", "samples_per_second", "speedup", "efficiency"))
    step, alone = model.step_us(ranks, total), model.step_us(1, batch)
    gain = (total / step) / (batch / alone)
    return point | {
        "us_per_step": step,
        "samples_per_second": total * 1e6 / step,
        "speedup": gain,
        "efficiency": gain / ranks,
    }
