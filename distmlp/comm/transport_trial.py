"""Which of several all-reduces of device memory is right and fastest here, at the size at hand. Collective.

Wrong values show libraries that read a buffer too early or lose a peer's memory; different bits on different ranks
show reductions in an order that depends on the rank (pmodels/mpich#6538).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.device_sums import ITEM_BYTES, MPI_PIECE, Device, Sum

if TYPE_CHECKING:
    from distmlp.comm.world import World

TILE = 1 << 16  # elements of the pattern that fills the buffer again and again
ROUNDS, WARM_UP = 5, 2


@dataclass(frozen=True)
class Outcome:
    """How one of them did: the same on every rank."""

    name: str
    fault: str  # "" where every rank got the right values, and the same bits
    seconds: float = 0.0  # of one all-reduce, median on the slowest rank


def try_sums(sums: Sequence[Sum], device: Device, world: World, address: int, count: int) -> list[Outcome]:
    """How each of `sums` does. Collective.

    Works on the buffer itself, `count` elements at `address`, and leaves zeros there.
    """
    count = min(count, MPI_PIECE)
    outcomes = []
    for each in sums:
        fault = _verify(each, device, world, address, count)
        outcomes.append(Outcome(each.name, fault, 0.0 if fault else _time(each, device, world, address, count)))
        each.seconds = 0.0
    device.upload(address, np.zeros(count, np.float32))
    return outcomes


def fastest(outcomes: Sequence[Outcome]) -> int | None:
    """The number of the fastest that is right, None without one."""
    right = [number for number, outcome in enumerate(outcomes) if not outcome.fault]
    return min(right, key=lambda number: outcomes[number].seconds, default=None)


def pattern(rank: int, size: int) -> NDArray:
    """Numbers of many magnitudes and both signs, whose sum has other bits in another order; float32 (size,)."""
    random = np.random.default_rng((rank, size))
    return (random.standard_normal(size) * 2.0 ** random.integers(-8, 9, size)).astype(np.float32)


def _verify(each: Sum, device: Device, world: World, address: int, count: int) -> str:
    """Sum known values; what was wrong on the first rank where something was, "" if nothing."""
    length = min(count, TILE)
    tile = pattern(world.rank, length)
    for start, stop in _tiles(count, length):
        device.upload(address + start * ITEM_BYTES, tile[: stop - start])
    refused = ""
    try:
        each.run(address, count)
    except Exception as error:  # an MPI that cannot after all, such as one that misses a file of its own
        refused = " ".join(str(error).split())
    if refusals := [text for text in world.all_gather(refused) if text]:
        return f"fails: {refusals[0][:200]}"
    result = np.empty(count, np.float32)
    device.download(address, result)
    wanted, scale = np.zeros(length), np.zeros(length)
    for rank in range(world.size):
        other = pattern(rank, length).astype(np.float64)
        wanted += other
        scale += np.abs(other)
    limit = world.size * np.finfo(np.float32).eps * scale
    right = all(
        (np.abs(result[start:stop] - wanted[: stop - start]) <= limit[: stop - start]).all()
        for start, stop in _tiles(count, length)
    )
    found = world.all_gather((right, zlib.crc32(result.data)))
    wrong = [rank for rank, (fine, _) in enumerate(found) if not fine]
    if wrong:
        return f"wrong sums on rank {wrong[0]}"
    return "" if len({check for _, check in found}) == 1 else "the ranks do not get the same bits"


def _tiles(count: int, length: int) -> list[tuple[int, int]]:
    return [(start, min(start + length, count)) for start in range(0, count, length)]


def _time(each: Sum, device: Device, world: World, address: int, count: int) -> float:
    device.upload(address, np.zeros(count, np.float32))  # sums of sums would overflow
    laps = []
    for _ in range(WARM_UP + ROUNDS):
        device.synchronize()
        started = perf_counter()
        each.run(address, count)
        device.synchronize()
        laps.append(perf_counter() - started)
    return max(world.all_gather(float(np.median(laps[WARM_UP:]))))


def describe(outcomes: Sequence[Outcome], taken: int, count: int) -> str:
    """One line for the start of a run: what was taken, how fast it and the others are."""
    size_bytes = min(count, MPI_PIECE) * ITEM_BYTES

    def speed(outcome: Outcome) -> str:
        return outcome.fault or f"{outcome.seconds * 1e6:.0f} µs, {size_bytes / outcome.seconds / 1e9:.3g} GB/s"

    best = outcomes[taken]
    others = [f"{other.name} {speed(other)}" for other in outcomes if other is not best]
    return f"{best.name} for {size_bytes / 1e6:.3g} MB: {speed(best)}" + (f"; {'; '.join(others)}" if others else "")
