"""Worlds for tests of one process: a job of any size, seen from one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoneWorld:
    """Rank `rank` of `size`; the other ranks gather `others` and agree to everything."""

    def __init__(self, rank: int = 0, size: int = 1, others: list[Any] | None = None) -> None:
        self.rank, self.size, self.hosts, self.mpi_version = rank, size, ("here",), ""
        self.host = "here"
        self._others = others if others is not None else [[]] * (size - 1)

    def agree(self, function: Callable[[], Any], what: str = "") -> Any:
        return function()

    def all_gather(self, value: Any) -> list[Any]:
        return [*self._others[: self.rank], value, *self._others[self.rank :]]
