"""The reference engine: NumPy and BLAS on the CPU. What it computes is what the program means."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmlp.config import RunConfig
from distmlp.engine import Evaluation, Standardization, State, StepReport
from distmlp.engine import tally as slot
from distmlp.engine.lanes import LaneSums
from distmlp.engine.optimizers import Optimizer, slot_names
from distmlp.engine.parts import PartSums
from distmlp.engine.rows import RowPasses
from distmlp.engine.tally import TALLY, Sums
from distmlp.errors import DistmlpError
from distmlp.network import Network

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.data.feed import Feed
    from distmlp.data.shards import Rows


class ReferenceEngine:
    """`Engine` in NumPy. `dtype` float64 serves tests; a run uses float32.

    `feed` may be None for an engine that only predicts and evaluates. `stop` is asked once a step.
    With `run.reproducible = "ranks"` the sums of every stream are computed apart, on one BLAS thread, and added
    in a tree that does not depend on the number of ranks: products of few rows each, several times slower.
    """

    name = "reference"
    precision = "fp32"
    transport = "none"  # how gradients are reduced; set by `open_engine`

    def __init__(
        self,
        config: RunConfig,
        network: Network,
        world: World,
        feed: Feed | None,
        standardization: Standardization,
        stop: Callable[[], bool] = lambda: False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._run, self._network = config.run, network
        self._world, self._feed, self._stop = world, feed, stop
        self._parameters = np.zeros(network.size, dtype)
        self._layers = network.views(self._parameters)
        self._slots = {name: np.zeros(network.size, dtype) for name in slot_names(config.optimizer.name)}
        self._ema = np.zeros(network.size, dtype) if config.run.ema_decay else None
        self._optimizer = Optimizer(config.optimizer, config.run.ema_decay, network, dtype)
        self._step = 0
        self._steps_computed = 0
        self._sums = Sums(network, np.zeros(network.size + TALLY, dtype))
        self._parts: PartSums | None = None
        self._lanes: LaneSums | None = None
        make_passes = partial(RowPasses, config.model, network, standardization, dtype)
        self._passes = make_passes(0)
        if feed is not None:
            rows = len(feed.streams) * -(-feed.order.batch // feed.order.streams)
            self._parts = PartSums(make_passes, network, dtype, rows)
            if config.run.reproducible == "ranks":
                self._lanes = LaneSums(network, feed.order.streams, world.size, world.rank, dtype)
        # Squares of the gradient must be finite too: an infinite second moment would freeze a weight for good.
        self._largest = math.sqrt(float(np.finfo(dtype).max))

    def load(self, state: State) -> None:
        self._parameters[:] = state.parameters
        for name, buffer in self._slots.items():
            buffer[:] = state.slots.get(name, 0)
        if self._ema is not None:
            self._ema[:] = state.parameters if state.ema is None else state.ema
        self._step = state.step

    def state(self, spare: State | None = None) -> State:
        old = spare or State(np.empty(0))
        slots = {name: _copied(buffer, old.slots.get(name)) for name, buffer in self._slots.items()}
        ema = None if self._ema is None else _copied(self._ema, old.ema)
        return State(_copied(self._parameters, old.parameters), slots, ema, self._step)

    def train(self, epoch: int, first: int, rates: NDArray) -> StepReport:
        assert self._feed is not None, "this engine was opened without data"
        assert self._parts is not None
        report = StepReport(np.empty(0), np.empty(0))
        losses: list[float] = []
        weights: list[float] = []
        waited = self._feed.wait_seconds
        tally = self._sums.tally
        with np.errstate(all="ignore"), self._parts.one_blas_thread(always=self._lanes is not None):
            for index, rate in enumerate(rates):
                fault = self._local_sums(self._feed, self._parts, epoch, first + index)
                report.communication_seconds += self._reduce()
                if tally[slot.FAILED]:
                    self._world.agree(partial(_raise, fault))
                loss, weight = self._mean()
                finite = self._is_finite(loss)
                if not finite and self._run.on_nonfinite == "stop":
                    report.nonfinite = index
                    break
                if finite and weight:
                    self._update(float(rate))
                losses.append(loss if finite else math.nan)
                weights.append(weight)
                report.skipped += not finite
                if tally[slot.STOP]:
                    report.stopped = True
                    break
        self._steps_computed += len(losses)
        report.losses, report.weights = np.array(losses), np.array(weights)
        report.wait_seconds = self._feed.wait_seconds - waited
        return report

    def _local_sums(self, feed: Feed, parts: PartSums, epoch: int, number: int) -> DistmlpError | None:
        """Fill this rank's part of what the step reduces; returns the fault that kept it from its rows."""
        own = self._lanes.first if self._lanes else self._sums
        try:
            rows = feed.batch(epoch, number)
        except DistmlpError as fault:
            (self._lanes.message if self._lanes else self._sums.buffer)[...] = 0
            own.tally[slot.FAILED] = 1
            return fault
        if self._lanes:
            positions = feed.order.batch_positions(number, feed.streams)
            self._lanes.fill(lambda stream, out: self._add_up(rows, positions % feed.order.streams == stream, out))
        else:
            parts.sums(self._layers, rows.inputs, rows.targets, rows.weights, self._sums)
        own.tally[slot.STOP] = self._stop()
        return None

    def _add_up(self, rows: Rows, chosen: NDArray, out: Sums) -> None:
        weights = None if rows.weights is None else rows.weights[chosen]
        self._passes.sums(self._layers, rows.inputs[chosen], rows.targets[chosen], weights, out)

    def _reduce(self) -> float:
        """Sum over the ranks into `_sums`, by one collective; returns the seconds it took."""
        started = perf_counter()
        self._world.all_reduce(self._lanes.message if self._lanes else self._sums.buffer)
        seconds = perf_counter() - started
        if self._lanes:
            self._lanes.total(self._sums)
        return seconds

    def _mean(self) -> tuple[float, float]:
        """Turn the summed gradient into the mean over the global batch; returns mean loss and sum of weights."""
        weight, loss = float(self._sums.tally[slot.WEIGHT]), float(self._sums.tally[slot.LOSS])
        if weight == 0:
            return loss, weight
        self._sums.gradient *= 1 / weight
        return loss / weight, weight

    def _is_finite(self, loss: float) -> bool:
        gradient = self._sums.gradient
        return math.isfinite(loss) and -self._largest < gradient.min() and gradient.max() < self._largest

    def _update(self, rate: float) -> None:
        self._step += 1
        self._optimizer.update(self._parameters, self._sums.gradient, self._slots, self._ema, rate, self._step)

    def predict(self, inputs: NDArray) -> NDArray:
        with np.errstate(all="ignore"):
            return self._passes.predict(self._averaged(), inputs)

    def evaluate(self, inputs: NDArray, targets: NDArray, weights: NDArray | None) -> Evaluation:
        with np.errstate(all="ignore"):
            return self._passes.evaluate(self._averaged(), inputs, targets, weights)

    def _averaged(self) -> list[tuple[NDArray, NDArray]]:
        return self._layers if self._ema is None else self._network.views(self._ema)

    def transfers(self) -> dict[str, int]:
        return {
            "host_to_device_bytes": 0,
            "device_to_host_bytes": 0,
            "kernel_launches": 0,
            "steps": self._steps_computed,
        }

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()


def _raise(fault: DistmlpError | None) -> None:
    if fault is not None:
        raise fault


def _copied(buffer: NDArray, spare: NDArray | None) -> NDArray:
    if spare is None or spare.shape != buffer.shape or spare.dtype != buffer.dtype:
        return buffer.copy()
    np.copyto(spare, buffer)
    return spare
