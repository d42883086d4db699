"""Sums in two stages: the ranks of a host among themselves, the first ranks of all hosts among themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from distmlp.comm.host_ranks import HostRanks, open_leaders
from distmlp.comm.world import open_world
from distmlp.errors import AgreedError, DataError


def test_ranks_of_a_host_keep_their_order():
    world = SimpleNamespace(
        rank=5, neighbours=(1, 4, 5), rank_hosts=("a", "b") * 3, inside=None, all_gather=lambda value: list("uvwxyz")
    )
    host = HostRanks(world)
    assert (host.size, host.rank) == (3, 2)
    assert host.all_gather("z") == ["v", "y", "z"]
    assert host.name([0, 1]) == ([1, 4], world.rank_hosts)


@pytest.fixture
def two_hosts(monkeypatch):
    """The world's ranks in turn on hosts a and b."""
    world = open_world()
    monkeypatch.setattr(world, "neighbours", tuple(range(world.rank % 2, world.size, 2)))
    monkeypatch.setattr(world, "hosts", ("a", "b"))
    yield world
    vars(world).pop("_leaders", None)


@pytest.mark.mpi(minsize=2)
def test_leaders_sum_for_all(two_hosts):
    world, host, leaders = two_hosts, HostRanks(two_hosts), open_leaders(two_hosts)
    assert (leaders is not None) == (world.rank < 2)
    assert open_leaders(world) is leaders
    own = np.array([10.0**world.rank], np.float32)
    total = sum(host.all_gather(own))
    if leaders:
        assert (leaders.rank, leaders.size) == (world.rank, 2)
        before = world.collectives
        leaders.all_reduce(total)
        assert (world.collectives, world.waiting) == (before + 1, "")
    total = host.all_gather(total)[0]  # the first one's
    assert total == sum(10.0**rank for rank in range(world.size))


@pytest.mark.mpi(minsize=2)
def test_what_fails_on_one_host_fails_on_all(two_hosts):
    def fail() -> None:
        if two_hosts.rank == 1:
            raise DataError("here")

    with pytest.raises(AgreedError, match="here"):
        HostRanks(two_hosts).agree(fail)
