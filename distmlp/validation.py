"""How far a network has come on the validation set, and what happens where its rows or its loss are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from distmlp.comm.world import World
from distmlp.config import RunConfig
from distmlp.data.shards import Shards
from distmlp.engine import Engine
from distmlp.errors import DataError, DivergedError
from distmlp.evaluation import evaluate, metrics


class Validation:
    """The validation set of a run. `warn` takes what the policy `skip` has to say."""

    def __init__(self, config: RunConfig, shards: Shards, world: World, warn: Callable[[str], None]) -> None:
        self._config, self._shards, self._world, self._warn = config, shards, world, warn
        self._step = 0

    def measure(self, engine: Engine, step: int) -> dict[str, float]:
        """Metrics after `step` steps, the same on every rank. Collective.

        Under the policy `stop` raises AgreedError (DataError) naming rows that hold NaN or infinity, and DivergedError
        for a loss that is not finite though all rows are; under `skip` such rows are left out.
        """
        self._step = step
        total = evaluate(engine, self._shards, self._world, self._unfit_rows)
        found = metrics(total, self._config.model.loss)
        if not math.isfinite(found["loss"]) and total.weight > 0:
            self._no_loss()
        return found

    def _unfit_rows(self, where: str) -> None:
        if self._config.run.on_nonfinite == "stop":
            raise DataError(
                f"validation after step {self._step}: {where}; mend those rows and continue with --resume, or have "
                "them left out with --set run.on_nonfinite=skip"
            )
        self._warn(f"validation: {where}; such rows are left out")  # every time: a reporter says the same but once

    def _no_loss(self) -> None:
        text = f"validation after step {self._step}: the loss is not finite, though the rows are: the training diverged"
        if self._config.run.on_nonfinite == "stop":
            rate = self._config.optimizer.learning_rate
            raise DivergedError(
                f"{text}; lower optimizer.learning_rate ({rate:g}) or set optimizer.clip_norm, or go on all the same "
                "with --set run.on_nonfinite=skip; earlier checkpoints are intact"
            )
        self._warn(text)
