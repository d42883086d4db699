"""The all-reduces of device memory, on host memory that behaves like a device; as ranks where MPI takes part."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from distmlp.comm import device_sums
from distmlp.comm.device_sums import ExchangeSum, LibrarySum, StagedSum, pieces
from distmlp.comm.transport_trial import describe, fastest, pattern, try_sums
from distmlp.comm.world import World, open_world
from tests.comm.host_device import HostDevice, view


@pytest.mark.parametrize(
    ("count", "limit", "wanted"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (4, 4, [(0, 4)]),
        (5, 4, [(0, 2), (2, 5)]),
        (12, 4, [(0, 4), (4, 8), (8, 12)]),
    ],
)
def test_pieces(count, limit, wanted):
    assert pieces(count, limit) == wanted


def test_no_call_of_mpi_counts_too_far():
    for count in (2**26, 2**26 + 1, 2**33 - 1):
        bounds = pieces(count, device_sums.MPI_PIECE)
        assert max(stop - start for start, stop in bounds) < 2**29  # elements: 2^31 bytes
        assert (bounds[0][0], bounds[-1][1]) == (0, count)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


class Doubling:
    """A world of two ranks that hold the same."""

    def __init__(self, log: list[str]) -> None:
        self.log, self._sums = log, 0

    def all_reduce(self, buffer: np.ndarray) -> None:
        self.log.append(f"sum {self._sums}")
        self._sums += 1
        buffer += buffer


def test_staged_pieces_overlap():
    device = HostDevice()
    values = np.arange(10, dtype=np.float32)
    address = device.buffer(values)
    staged = StagedSum(device, Doubling(device.log), np.full(10, np.nan, np.float32), limit=4)
    staged.run(address, 10)
    assert device.log == [
        "down 0", "down 1", "down 2",
        "wait 0", "sum 0", "up 0", "wait 1", "sum 1", "up 1", "wait 2", "sum 2", "up 2",
    ]  # fmt: skip
    tail = np.zeros(3, np.float32)
    staged.tail(address, 10, tail)
    assert tail.tolist() == [14, 16, 18]
    device.synchronize()
    assert view(address, 10).tolist() == (2 * values).tolist()
    assert staged.seconds > 0
    staged.close()


@functools.cache
def world() -> World:
    return open_world()


def sums(device: HostDevice, count: int) -> list[Any]:
    host = np.full(count, np.nan, np.float32)
    return [
        LibrarySum(device, world()), ExchangeSum(device, world(), count), StagedSum(device, world(), host, limit=100),
    ]  # fmt: skip


@pytest.mark.mpi(minsize=2)
@pytest.mark.parametrize("count", [1, 2, 7, 1000, 5003])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["library", "exchange", "staged"])
def test_sum_is_that_of_all_ranks(count, which, monkeypatch):
    """Three times in a row: every call waits for what was queued before it and leaves nothing half done."""
    monkeypatch.setattr(device_sums, "MPI_PIECE", 997)
    device, rank = HostDevice(), world().rank
    each = sums(device, count)[which]
    address = device.buffer(np.zeros(count))
    for turn in range(3):
        parts = [pattern(other + 10 * turn, count) for other in range(world().size)]
        device.upload(address, parts[rank])
        each.run(address, count)
        got, tail = np.empty(count, np.float32), np.empty(min(count, 8), np.float32)
        each.tail(address, count, tail)
        device.download(address, got)
        wanted = functools.reduce(np.add, parts)
        if which == 0:
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)
        else:
            assert got.tobytes() == wanted.tobytes()  # the order of the ranks
        assert tail.tobytes() == got[-tail.size :].tobytes()
        assert len(set(world().all_gather(got.tobytes()))) == 1
    each.close()


class Blocking:
    """A communicator without non-blocking calls, which crash on device memory in common builds."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.used = inner, set()

    def __getattr__(self, name: str) -> Any:
        assert not (name[0] in "Ii" and name[1:] and hasattr(self.inner, name[1:].capitalize())), name
        self.used.add(name)
        return getattr(self.inner, name)


@pytest.mark.mpi(minsize=2)
@pytest.mark.parametrize("which", [0, 1], ids=["library", "exchange"])
def test_only_blocking_calls_see_device_memory(which):
    device = HostDevice()
    each = sums(device, 10)[which]
    each._communicator = communicator = Blocking(each._communicator)
    each.run(device.buffer(np.ones(10)), 10)
    assert communicator.used == {("Allreduce", "Sendrecv")[which]}
    with pytest.raises(AssertionError):
        communicator.Iallreduce  # noqa: B018
    each.close()


class Broken:
    """An all-reduce that goes wrong on rank 1: a share `error` is added there; without one it is refused."""

    name, seconds = "broken", 0.0

    def __init__(self, inner: Any, device: HostDevice, error: float) -> None:
        self.inner, self.device, self.error = inner, device, error

    def run(self, address: int, count: int) -> None:
        if not self.error:
            raise RuntimeError("Other MPI error,\nerror stack: no kernel")
        self.inner.run(address, count)
        if world().rank == 1:
            self.device.synchronize()
            first = view(address, 1)
            first *= np.float32(1 + self.error)


@pytest.mark.mpi(minsize=2)
@pytest.mark.parametrize(("error", "fault"), [
    (0.5, "wrong sums on rank 1"), (1.2e-7, "same bits"), (np.nan, "wrong sums"),
    (0.0, "fails: Other MPI error, error stack: no kernel"),
])  # fmt: skip
def test_trial_refuses_what_is_wrong(error, fault):
    count = 300_000
    device = HostDevice()
    address = device.buffer(np.zeros(count))
    good = sums(device, count)[1]
    outcomes = try_sums([Broken(good, device, error), good], device, world(), address, count)
    assert fault in outcomes[0].fault
    assert (fastest(outcomes), outcomes[1].fault) == (1, "")
    assert outcomes[1].seconds > 0
    device.synchronize()
    assert not view(address, count).any()
    text = describe(outcomes, 1, count)
    assert text.startswith("exchange by Sendrecv for 1.2 MB")
    assert fault in text


@pytest.mark.mpi(minsize=2)
def test_trial_without_a_right_one_takes_none():
    device = HostDevice()
    address = device.buffer(np.zeros(5))
    broken = Broken(sums(device, 5)[0], device, 1.0)
    outcomes = try_sums([broken], device, world(), address, 5)
    assert fastest(outcomes) is None
    assert outcomes[0].fault
