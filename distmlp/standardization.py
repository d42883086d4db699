"""Mean and deviation of inputs and targets: measured by data/, applied by engine/, kept in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import NDArray


@dataclass
class Standardization:
    """Mean and deviation of the training set; `None` where a side is left as it is.

    `inputs`: `(mean (features,), deviation (features,))`, float64; `targets` likewise. A deviation of a
    constant column is 1.
    """

    inputs: tuple[NDArray, NDArray] | None = None
    targets: tuple[NDArray, NDArray] | None = None
