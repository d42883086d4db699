"""The engine protocol: what the training loop asks of whatever computes the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distmlp.standardization import Standardization as Standardization


@dataclass
class State:
    """Everything that a step changes, on the host. All flat buffers share `Network`'s layout, float32."""

    parameters: NDArray
    slots: dict[str, NDArray] = field(default_factory=dict)  # optimizer: "momentum", "first_moment", "second_moment"
    ema: NDArray | None = None
    step: int = 0  # updates applied so far: the bias correction of adam counts them


@dataclass
class StepReport:
    """What a stretch of steps gave, the same on every rank."""

    losses: NDArray  # float64 (steps done,): mean loss over the rows of each global batch; NaN where skipped
    weights: NDArray  # float64 (steps done,): sum of the sample weights of each global batch
    skipped: int = 0  # batches left out because loss or gradient was not finite
    nonfinite: int | None = None  # index in this stretch of the step that ended it under policy `stop`
    stopped: bool = False  # some rank asked to stop; the steps counted here were done
    wait_seconds: float = 0.0  # this rank's time spent waiting for data
    communication_seconds: float = 0.0  # and in the all-reduce

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass
class Evaluation:
    """Sums over the rows of one or many batches; add them up over batches and ranks.

    The last three are vectors, one value per output, in the targets' own units.
    """

    rows: float = 0.0
    weight: float = 0.0
    loss: float = 0.0  # weighted sum
    correct: float = 0.0  # weighted count, classification
    absolute: float = 0.0  # weighted sum over rows and outputs, in the targets' own units
    squared: NDArray = field(default_factory=lambda: np.zeros(1))  # weighted sums of squared errors
    target: NDArray = field(default_factory=lambda: np.zeros(1))  # weighted sums of the targets, for r2
    target_squared: NDArray = field(default_factory=lambda: np.zeros(1))  # and of their squares

    def as_array(self) -> NDArray:
        """float64 (5 + 3 * outputs,), for sums over batches and ranks."""
        scalars = [self.rows, self.weight, self.loss, self.correct, self.absolute]
        return np.concatenate([np.array(scalars, np.float64), self.squared, self.target, self.target_squared])

    @classmethod
    def from_array(cls, array: NDArray) -> Evaluation:
        """The inverse of `as_array`."""
        squared, target, target_squared = np.split(array[5:], 3)
        rows, weight, loss, correct, absolute = array[:5].tolist()
        return cls(rows, weight, loss, correct, absolute, squared, target, target_squared)


class Engine(Protocol):
    """Computes steps. Parameters live inside it; the host sees them only through `state`."""

    name: str
    precision: str

    def load(self, state: State) -> None:
        """Take over `state` (copied)."""

    def state(self, spare: State | None = None) -> State:
        """A copy of everything a step changes, after all steps asked for so far.

        The arrays of `spare`, a state that is not needed any more, may be used again: fresh memory costs
        more time than the copy.
        """

    def train(self, epoch: int, first: int, rates: NDArray) -> StepReport:
        """Do `len(rates)` steps: batches `first`, `first + 1`, … of `epoch`, with these learning rates.

        Ends early, on every rank at the same step, when a rank asks to stop or a non-finite value ends it.
        Raises AgreedError when a rank failed.
        """

    def predict(self, inputs: NDArray) -> NDArray:
        """Output layer (rows, outputs), float32, of raw `inputs` (rows, features), in raw target units.

        Logits are returned as they are. Uses the averaged weights when `ema_decay` is set.
        """

    def evaluate(self, inputs: NDArray, targets: NDArray, weights: NDArray | None) -> Evaluation:
        """Sums of loss and metrics over raw rows."""

    def transfers(self) -> dict[str, int]:
        """`host_to_device_bytes device_to_host_bytes kernel_launches steps`."""

    def close(self) -> None:
        """Give back device memory and threads."""
