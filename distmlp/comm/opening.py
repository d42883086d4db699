"""What those above the world have to say to its opening. Here, below both, so that the world need not know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

first_rank_alone = False  # the other ranks do not come: rank 0 is a world of its own
# Called where there are several ranks: as soon as MPI runs, and with the world once there is one.
when_started: list[Callable[[], None]] = []
when_met: list[Callable[[Any], None]] = []
