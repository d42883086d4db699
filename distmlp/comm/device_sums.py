"""The all-reduce of one flat buffer of float32 in device memory, in place, by three ways that MPI offers.

`LibrarySum` hands the device's address to the library's own Allreduce; `ExchangeSum` moves parts with Sendrecv
and adds them in the order of the ranks; `StagedSum` goes through page-locked host memory and works with any MPI.
Only blocking calls: non-blocking reductions of device memory crash in common builds (open-mpi/ompi#12045). MPI
knows nothing of streams, so all work queued on the device is awaited before it sees an address (mpi4py PR 60).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from distmlp.comm.world import World

MPI_PIECE = 1 << 26  # elements in one call: far below MPI's 2^31 bytes, and it bounds the scratch memory
STAGED_PIECE = 1 << 18  # elements: copies of this size hide behind the sums of the pieces before and after
ITEM_BYTES = 4


class Device(Protocol):
    """What the sums ask of a device. Addresses are raw, counts in float32; all in the order of one stream."""

    def allocate(self, count: int) -> int:
        """The address of scratch memory that lives until `release`. Raises SystemUnfitError."""

    def copy(self, target: int, source: int, count: int) -> None:
        """Queue a copy within the device."""

    def add(self, out: int, first: int, second: int, count: int) -> None:
        """Queue out = first + second; `out` may be one of them."""

    def synchronize(self) -> None:
        """Wait for everything queued."""

    def start_download(self, address: int, host: NDArray) -> Any:
        """Queue a copy into page-locked `host`; a token for `wait`."""

    def wait(self, token: Any) -> None:
        """Wait for that download, and for nothing queued after it."""

    def start_upload(self, address: int, host: NDArray) -> None:
        """Copy page-locked `host` to the device beside the downloads that are still under way."""

    def join_uploads(self) -> None:
        """Whatever is queued from now on comes after the uploads."""

    def download(self, address: int, host: NDArray) -> None:
        """Copy into `host`, after everything queued; it is there on return."""

    def upload(self, address: int, host: NDArray) -> None:
        """Queue a copy of pageable `host`, which may be changed on return."""

    def release(self) -> None:
        """Give back the scratch memory."""


class Sum(Protocol):
    """An all-reduce. `seconds`: what the calls took so far, once the device had computed."""

    name: str
    seconds: float

    def run(self, address: int, count: int) -> None:
        """Replace `count` elements at `address` by their sums over all ranks: the same bits everywhere. Collective."""

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        """Copy the last elements of what was summed to the host, into `tail`."""

    def close(self) -> None:
        """Give back memory and handles. MPI must still be there."""


def pieces(count: int, limit: int) -> list[tuple[int, int]]:
    """[start, stop) of the pieces of `count` elements, none longer than `limit`, as even as can be."""
    number = -(-count // limit)
    bounds = [count * piece // number for piece in range(number + 1)] if number else []
    return list(itertools.pairwise(bounds))


class _MpiSum:
    """What both sums by MPI on device addresses share."""

    name = ""
    _sum_piece: Any

    def __init__(self, device: Device, world: World) -> None:
        from mpi4py import MPI

        self._mpi, self._device, self._world = MPI, device, world
        self._communicator, self._rank, self._size = world.communicator, world.rank, world.size
        self.seconds = 0.0
        # A description costs microseconds to make, and the same few come back every step.
        self._memory = lru_cache(maxsize=1024)(self._describe)

    def run(self, address: int, count: int) -> None:
        self._device.synchronize()
        started = perf_counter()
        with self._world.inside("all_reduce"):
            for start, stop in pieces(count, MPI_PIECE):
                self._sum_piece(address + start * ITEM_BYTES, stop - start)
        self.seconds += perf_counter() - started

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        self._device.download(address + (count - tail.size) * ITEM_BYTES, tail)

    def close(self) -> None:
        self._memory.cache_clear()
        self._device.release()

    def _describe(self, address: int, count: int) -> list[Any]:
        """For mpi4py: a raw address, since MPI itself finds out where it lies."""
        return [self._mpi.buffer.fromaddress(address, count * ITEM_BYTES), count, self._mpi.FLOAT]


class LibrarySum(_MpiSum):
    """MPI's Allreduce in place. Whether all ranks get the same bits is up to the library: see transport_trial.py."""

    name = "Allreduce of the library"

    def _sum_piece(self, address: int, count: int) -> None:
        self._communicator.Allreduce(self._mpi.IN_PLACE, self._memory(address, count))


class ExchangeSum(_MpiSum):
    """Reduce-scatter and all-gather by Sendrecv: every element is added on one rank, in the order of the ranks.

    Two ranks swap everything and both add, which moves as much in half as many rounds.
    """

    name = "exchange by Sendrecv"

    def __init__(self, device: Device, world: World, largest: int) -> None:
        """`largest`: the most elements that `run` will be asked for."""
        super().__init__(device, world)
        largest = min(largest, MPI_PIECE)
        # (ranks, elements of a share), or what the other of two ranks sent
        self._scratch = device.allocate(largest if self._size == 2 else (-(-largest // self._size)) * self._size)

    def _sum_piece(self, address: int, count: int) -> None:
        if self._size == 2:
            self._send(1 - self._rank, address, count, 1 - self._rank, self._scratch, count)
            # a + b has the same bits as b + a, but for the payload of a NaN: so the order is kept
            first, second = (address, self._scratch) if self._rank == 0 else (self._scratch, address)
            self._device.add(address, first, second, count)
        else:
            self._scatter_gather(address, count)
        self._device.synchronize()  # the next call may overwrite the scratch memory, and send what was added

    def _scatter_gather(self, address: int, count: int) -> None:
        size, rank, device = self._size, self._rank, self._device
        bounds = [count * share // size for share in range(size + 1)]
        places = [address + start * ITEM_BYTES for start in bounds]
        counts = [stop - start for start, stop in itertools.pairwise(bounds)]
        own, mine = places[rank], counts[rank]
        rows = [self._scratch + share * mine * ITEM_BYTES for share in range(size)]
        if mine:
            device.copy(rows[rank], own, mine)
        for turn in range(1, size):
            to, source = (rank + turn) % size, (rank - turn) % size
            self._send(to, places[to], counts[to], source, rows[source], mine)
        if mine:
            device.add(own, rows[0], rows[1], mine)
            for row in rows[2:]:
                device.add(own, own, row, mine)
        device.synchronize()
        for turn in range(1, size):
            to, source = (rank + turn) % size, (rank - turn) % size
            self._send(to, own, mine, source, places[source], counts[source])

    def _send(self, to: int, what: int, count: int, source: int, where: int, expected: int) -> None:
        self._communicator.Sendrecv(self._memory(what, count), to, 0, self._memory(where, expected), source, 0)


class StagedSum:
    """Through page-locked host memory, in pieces: piece k + 1 comes down and piece k − 1 goes up while k is summed.

    `host`: page-locked float32, as many elements as will be summed.
    """

    name = "staged"

    def __init__(self, device: Device, world: World, host: NDArray, limit: int = STAGED_PIECE) -> None:
        self._device, self._world, self._host, self._limit = device, world, host, limit
        self.seconds = 0.0

    def run(self, address: int, count: int) -> None:
        device, host = self._device, self._host
        bounds = pieces(count, self._limit)
        tokens = [device.start_download(address + start * ITEM_BYTES, host[start:stop]) for start, stop in bounds]
        started = 0.0
        for token, (start, stop) in zip(tokens, bounds, strict=True):
            device.wait(token)
            started = started or perf_counter()  # the first piece is there once the device has computed
            self._world.all_reduce(host[start:stop])
            device.start_upload(address + start * ITEM_BYTES, host[start:stop])
        device.join_uploads()
        self.seconds += perf_counter() - started

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        np.copyto(tail, self._host[count - tail.size : count])

    def close(self) -> None:
        self._host = np.empty(0, np.float32)
        self._device.release()
