"""The ranks of a host among themselves, and the first ranks of all hosts among themselves: for sums in two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distmlp.comm.world import World

T = TypeVar("T")


class HostRanks:
    """The ranks of this host as a world of their own. Its collectives are those of all ranks: all hosts take part."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.members = world.neighbours
        self.size, self.rank = len(self.members), self.members.index(world.rank)
        self.inside = world.inside

    def all_gather(self, value: T) -> list[T]:
        """What the ranks of this host say."""
        values = self._world.all_gather(value)
        return [values[rank] for rank in self.members]

    def agree(self, function: Callable[[], T], what: str = "") -> T:
        """As `World.agree`: all ranks fail where one does."""
        return self._world.agree(function, what)

    def name(self, ranks: list[int]) -> tuple[list[int], tuple[str, ...]]:
        """Their numbers in the job, and all ranks' hosts."""
        return [self.members[rank] for rank in ranks], self._world.rank_hosts


class Leaders(World):
    """The first rank of every host. While it waits for another one, the watchdog knows of it."""

    def __init__(self, world: World, communicator: Any) -> None:
        self._whole = world
        super().__init__(communicator, world.mpi_version)

    @property
    def waiting(self) -> str:
        return self._whole.waiting

    @waiting.setter
    def waiting(self, collective: str) -> None:
        self._whole.waiting = collective

    @property
    def collectives(self) -> int:
        return self._whole.collectives

    @collectives.setter
    def collectives(self, count: int) -> None:
        self._whole.collectives = count


def open_leaders(world: World) -> Leaders | None:
    """Collective, once a world; None on ranks that are not the first of their host."""
    leads = world.rank == world.neighbours[0]
    if not hasattr(world, "_leaders"):
        from mpi4py import MPI

        communicator = world.communicator.Split(0 if leads else MPI.UNDEFINED, world.rank)
        world._leaders = Leaders(world, communicator) if leads else None  # type: ignore[attr-defined]
    return world._leaders  # type: ignore[attr-defined]
