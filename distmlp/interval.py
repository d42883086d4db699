"""How often something happens: a number of epochs, of steps, or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST = 1 << 40
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(epoch|step|second|minute|hour)s?")
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@dataclass(frozen=True)
class Interval:
    """How often something happens: exactly one of the three is set."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Read "1 epoch", "500 steps", "90 seconds", "10 minutes", "2 hours"."""
        match = _INTERVAL.fullmatch(text.strip())
        if match is None or not 0 < (value := float(match[1])) <= _MOST:
            raise ValueError('expected a positive number and a unit, such as "1 epoch", "500 steps" or "10 minutes"')
        if match[2] in _SECONDS:
            return cls(seconds=value * _SECONDS[match[2]])
        if value != int(value):
            raise ValueError(f"{match[2]}s come whole")
        return cls(epochs=int(value)) if match[2] == "epoch" else cls(steps=int(value))
