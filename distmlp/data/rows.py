"""Rows in memory: what every reader gives and every engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

ROLES = ("inputs", "targets", "sample_weights")


@dataclass
class Rows:
    """Some rows, in their stored dtype and this machine's byte order."""

    inputs: NDArray  # (rows, features)
    targets: NDArray  # (rows, outputs), or (rows,) integer class labels
    weights: NDArray | None = None  # (rows,)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def parts(self) -> tuple[NDArray, ...]:
        """The arrays that are there, inputs first."""
        return (self.inputs, self.targets) if self.weights is None else (self.inputs, self.targets, self.weights)

    def of(self, role: str) -> NDArray:
        """The array of one of `ROLES` that is there."""
        return self.parts[ROLES.index(role)]

    def map(self, function: Any) -> Rows:
        """`function` of every array."""
        return Rows(*map(function, self.parts))
