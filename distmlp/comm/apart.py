"""Long work that every rank does by itself: a rank that fails is heard of by the others before they are done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from distmlp.comm.world import World
from distmlp.errors import AgreedError, DistmlpError

T = TypeVar("T")
_TAG = 4098  # beside those of faults.py


class _FailedElsewhere(Exception):
    """Ends the work of a rank that need not go on."""


def agree_apart(world: World, work: Callable[[Callable[[], None]], T], what: str = "") -> T:
    """`work(listen)` on every rank; then as `World.agree`: its value, or one AgreedError on all. Collective.

    The work calls `listen()` between its parts, often enough that nobody waits long for it; that raises where
    another rank has failed, and the work ends there, cleaning up as for an error of its own.
    """
    if world.size == 1:
        return work(lambda: None)
    communicator = world.communicator
    rung: list[Any] = []

    def listen() -> None:
        if communicator.iprobe(tag=_TAG):
            raise _FailedElsewhere

    def mine() -> T | None:
        with suppress(_FailedElsewhere):
            try:
                return work(listen)
            except DistmlpError:
                others = (rank for rank in range(world.size) if rank != world.rank)
                rung.extend(communicator.isend(None, rank, _TAG) for rank in others)
                raise
        return None

    try:
        return world.agree(mine, what)  # type: ignore[return-value]
    except AgreedError:
        _silence(world, rung)
        raise


def _silence(world: World, rung: list[Any]) -> None:
    """Take in the messages that nobody looked at, so that none is left for the next."""
    for rank, did in enumerate(world.all_gather(bool(rung))):
        if did and rank != world.rank:
            world.communicator.recv(source=rank, tag=_TAG)
    for request in rung:
        request.wait()
