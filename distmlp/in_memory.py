"""Training on rows in memory, by one process and without files: what scikit-learn's interface stands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.world import World
from distmlp.config import RunConfig
from distmlp.data.arrays import MemoryFeed, moments
from distmlp.data.shards import Rows
from distmlp.engine import Engine, Standardization, State
from distmlp.engine.select import open_engine
from distmlp.errors import DivergedError
from distmlp.network import Network
from distmlp.order import Order
from distmlp.schedule import learning_rates

if TYPE_CHECKING:
    from distmlp.data.feed import Feed


class Training:
    """A network with fresh weights, standardized by `rows`, and what became of it so far.

    losses: mean of every epoch. scores: of the rows held out, after every epoch.
    """

    def __init__(self, config: RunConfig, rows: Rows) -> None:
        model = config.model
        self.config = config
        self.network = Network.build(model.layers, model.activation, model.output_activation)
        self.state = State(self.network.initial(config.run.seed, model.init))
        self.losses: list[float] = []
        self.scores: list[float] = []
        self._standardization = _measured(config.data.standardize, rows)

    @property
    def views(self) -> list[tuple[NDArray, NDArray]]:
        """(weight, bias) of every layer."""
        return self.network.views(self.state.parameters)

    def run(
        self, rows: Rows, epochs: int, tolerance: float, patience: int,
        score: Callable[[Engine], float] | None = None,
    ) -> bool:  # fmt: skip
        """Up to `epochs` more epochs; True if the last was used up and the loss was still falling.

        Ends earlier after `patience` epochs that lower the loss, or raise the `score`, by less than `tolerance`. With
        `score` the best weights are kept, else the last. Raises DivergedError where the loss stops being finite.
        """
        data, run = self.config.data, self.config.run
        order = Order(len(rows.inputs), data.streams, data.batch, run.seed, data.shuffle)
        engine = self._open(MemoryFeed(rows, order))
        best, best_state, stale = np.inf, None, 0
        try:
            for _ in range(epochs):
                loss = self._epoch(engine, order.batches_per_epoch)
                if score is not None:
                    self.scores.append(score(engine))
                    loss = -self.scores[-1]
                stale = 0 if loss < best - tolerance else stale + 1
                if loss < best:
                    best = loss
                    best_state = engine.state() if score is not None else None
                if stale >= patience:
                    break
            self.state = best_state or engine.state()
        finally:
            engine.close()
        return stale < patience

    def _epoch(self, engine: Engine, batches: int) -> float:
        rates = learning_rates(self.config.schedule, self.config.optimizer.learning_rate, 0, batches, batches)
        report = engine.train(len(self.losses), 0, rates)
        if report.nonfinite is not None:
            raise DivergedError(
                f"fit: loss or gradient is not finite at batch {report.nonfinite} of epoch {len(self.losses)}; lower "
                "learning_rate_init, set clip_norm, or standardize"
            )
        self.losses.append(float(np.sum(report.losses * report.weights) / np.sum(report.weights)))
        return self.losses[-1]

    def outputs(self, inputs: NDArray) -> NDArray:
        """The output layer (rows, outputs), float32, in target units."""
        engine = self._open(None)
        try:
            return engine.predict(inputs)
        finally:
            engine.close()

    def _open(self, feed: MemoryFeed | None) -> Engine:
        as_feed = cast("Feed | None", feed)  # what an engine asks of a feed, both have
        engine, _ = open_engine(self.config, self.network, World(), as_feed, self._standardization)
        engine.load(self.state)
        return engine


def _measured(which: str, rows: Rows) -> Standardization:
    """Mean and deviation over the rows, each counting with its weight."""
    return Standardization(
        inputs=None if which == "none" else moments(rows.inputs, rows.weights),
        targets=moments(rows.targets, rows.weights) if which == "both" else None,
    )
