"""The sum of the gradients over the ranks, between two launches, by the transport that was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.device_sums import MPI_PIECE, ExchangeSum, LibrarySum, StagedSum, Sum
from distmlp.comm.transport_trial import describe, fastest, try_sums
from distmlp.engine import tally as slot
from distmlp.engine.device_memory import pinned
from distmlp.engine.gpu import Gpu, NcclSum
from distmlp.engine.tally import TALLY
from distmlp.errors import SystemUnfitError

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.engine.fused_state import DeviceState

YARDSTICK = 1 << 24  # elements up to which the staged way is timed beside MPI's: it takes page-locked memory


class Reduction:
    """Sums gradient and tally where they lie on the device.

    `tally` holds the sums of the last call, see tally.py; `seconds` what the all-reduces took.
    """

    def __init__(self, state: DeviceState, summation: Sum) -> None:
        self._state, self._sum = state, summation
        self._buffer, self._count = state.reduced
        self.tally = pinned(TALLY * 4).view(np.float32)
        self._votes = np.zeros(TALLY, np.float32)

    @property
    def seconds(self) -> float:
        return self._sum.seconds

    def reduce(self, stop: bool, failed: bool) -> None:
        """Replace the device's gradient and tally by their sums over all ranks. Collective.

        `stop`: this rank asks to stop. `failed`: it could not compute its part and adds nothing.
        """
        state = self._state
        address = state.arena.address(self._buffer)
        if failed:
            state.arena.zero(self._buffer, state.ledger.stream)
        if stop or failed:  # the kernel left zeros in these two places of the tally
            self._votes[:2] = stop, failed
            place = address + (self._count - TALLY + slot.STOP) * 4
            state.ledger.upload(place, self._votes[: slot.FAILED - slot.STOP + 1])
        self._sum.run(address, self._count)
        self._sum.tail(address, self._count, self.tally)

    def close(self) -> None:
        """Give back communicators, scratch and page-locked memory. Before MPI ends."""
        self._sum.close()
        self.tally = self.tally.copy()


class AloneSum:
    """Of one rank, which has nobody to add."""

    name = "none"

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.seconds = gpu, 0.0

    def run(self, address: int, count: int) -> None:
        """Leave everything as it is."""

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        self._gpu.download(address + (count - tail.size) * 4, tail)

    def close(self) -> None:
        self._gpu.release()


def open_reduction(transport: str, state: DeviceState, world: World) -> tuple[Reduction, str]:
    """The reduction by `transport`, and a few words on it. Collective.

    Raises AgreedError where it does not work after all, on every rank.
    """
    summation, note = sum_by(transport, state, Gpu(state.ledger), world)
    return Reduction(state, summation), note


def sum_by(transport: str, state: DeviceState, gpu: Gpu, world: World) -> tuple[Sum, str]:
    """The all-reduce of the buffer that ranks sum. Collective."""
    if world.size == 1:
        return AloneSum(gpu), ""
    if transport == "nccl":
        return NcclSum(gpu, world, state.ledger), ""
    if transport == "mpi":
        return _fastest_by_mpi(state, gpu, world)
    return world.agree(lambda: StagedSum(gpu, world, _host(state.reduced[1])), "staged"), ""


def _fastest_by_mpi(state: DeviceState, gpu: Gpu, world: World) -> tuple[Sum, str]:
    """The library's Allreduce or our own exchange, whichever is faster at this size and right."""
    buffer, count = state.reduced
    address = state.arena.address(buffer)
    sums: list[Sum] = [LibrarySum(gpu, world)]
    own = world.agree(lambda: _own_exchange(state, world, address, count))
    obstacles = [text for text in world.all_gather("" if isinstance(own, ExchangeSum) else own) if text]
    if isinstance(own, ExchangeSum) and not obstacles:
        sums.append(own)
    eligible = len(sums)
    if count <= YARDSTICK:  # is device memory the faster way at all? (open-mpi/ompi#2397)
        sums.append(world.agree(lambda: StagedSum(Gpu(state.ledger), world, _host(count))))
    outcomes = try_sums(sums, gpu, world, address, count)
    taken = fastest(outcomes[:eligible])
    if taken is None:
        reasons = "; ".join(f"{outcome.name}: {outcome.fault}" for outcome in outcomes[:eligible])

        def refuse() -> None:
            raise SystemUnfitError(
                f"MPI all-reduces of GPU memory go wrong here ({reasons}): {world.mpi_version}; use "
                "--set run.transport=nccl or staged, and let `distmlp doctor` look at the GPUs' access to each other"
            )

        world.agree(refuse)
    assert taken is not None
    for number, each in enumerate(sums):
        if number != taken:
            each.close()
    note = "; ".join([describe(outcomes, taken, count), *obstacles[:1]])
    staged = outcomes[eligible:]
    if staged and not staged[0].fault and staged[0].seconds < outcomes[taken].seconds:
        note += "; host memory is the faster way here: --set run.transport=staged"
    return sums[taken], note


def _own_exchange(state: DeviceState, world: World, address: int, count: int) -> ExchangeSum | str:
    """Ours, or why it cannot be had: CuPy compiles its addition with CUDA's headers, which may be missing."""
    gpu = Gpu(state.ledger)
    exchange = ExchangeSum(gpu, world, count)
    try:
        gpu.add(address, address, address, min(count, MPI_PIECE))
        gpu.synchronize()
    except Exception as error:
        exchange.close()
        return f"no exchange of our own: {type(error).__name__}: {str(error).splitlines()[0]}"
    return exchange


def _host(count: int) -> NDArray:
    return pinned(count * 4).view(np.float32)[:count]
