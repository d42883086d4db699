"""The world of a job: run alone, and as ranks under `mpirun` with --with-mpi."""

from __future__ import annotations

import numpy as np
import pytest
from launching import run_python

from distmlp.comm.faults import merge_faults
from distmlp.comm.world import World, open_world
from distmlp.errors import AgreedError, ConfigError, DataError


def test_single_process_loads_no_mpi():
    script = (
        "import sys; from distmlp.comm.world import open_world; w = open_world(); "
        "print(w.size, w.rank, w.local_rank, w.hosts == (w.host,), w.mpi_version == '', 'mpi4py' in sys.modules)"
    )
    assert run_python(0, script).stdout.split() == ["1", "0", "0", "True", "True", "False"]


def test_single_process_lets_its_own_error_through():
    def fail() -> None:
        raise DataError("shard a.h5 is empty")

    with pytest.raises(DataError, match=r"shard a\.h5 is empty"):
        World().agree(fail)


@pytest.mark.parametrize(
    ("faults", "message", "code"),
    [
        ([(3, "bad"), (3, "bad")], "bad", 3),
        ([None, (3, "bad")], "bad [rank 1 on host b]", 3),
        ([(3, "bad"), None, (3, "bad")], "bad [ranks 0, 2 on a, c]", 3),
        ([(2, "x"), (4, "y"), None], "opening:\n  x [rank 0 on host a]\n  y [rank 1 on host b]", 4),
        ([(75, "x"), (1, "y")], "opening:\n  x [rank 0 on host a]\n  y [rank 1 on host b]", 1),
    ],
)
def test_merged_faults_name_ranks_and_take_the_gravest_code(faults, message, code):
    error = merge_faults(faults, ("a", "b", "c"), "opening")
    assert (str(error), error.exit_code) == (message, code)


@pytest.mark.mpi
def test_ranks_hosts_and_local_ranks_are_consistent():
    world = open_world()
    assert world.all_gather(world.rank) == list(range(world.size))
    assert len(world.hosts) == 1
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert world.mpi_version


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 40_000, 100_003])
def test_all_reduce_adds_in_the_order_of_the_ranks(dtype, size, monkeypatch):
    monkeypatch.setattr("distmlp.comm.reduction.PIECE", 30_000)  # several pieces, the last one short
    world = open_world()
    parts = [np.random.default_rng([rank, size]).normal(0, 100, size).astype(dtype) for rank in range(world.size)]
    expected = parts[0].astype(np.float32) if dtype == np.float16 else parts[0].copy()
    for part in parts[1:]:
        expected += part
    buffer = parts[world.rank].copy()
    world.all_reduce(buffer)
    np.testing.assert_array_equal(buffer, expected.astype(dtype))
    assert len(set(world.all_gather(buffer.tobytes()))) == 1


@pytest.mark.mpi
def test_all_reduce_passes_on_non_finite_values_without_a_warning(recwarn):
    world = open_world()
    buffer = np.full(20_000, 3e38 if world.rank else 1e38, np.float32)
    buffer[0] = np.nan
    world.all_reduce(buffer)
    assert np.isnan(buffer[0])
    assert len(recwarn) == 0


@pytest.mark.mpi
def test_all_reduce_refuses_what_it_would_sum_wrongly():
    world = open_world()
    if world.size == 1:
        pytest.skip("nothing is summed by one rank")
    with pytest.raises(TypeError, match="float16, float32"):
        world.all_reduce(np.ones(3, ">f4"))
    with pytest.raises(ValueError, match="contiguous"):
        world.all_reduce(np.ones((4, 4), np.float32)[:, 1])


@pytest.mark.mpi(min_size=2)
def test_agree_raises_the_same_error_everywhere_and_the_world_goes_on():
    world = open_world()

    def fail_on_last() -> str:
        if world.rank == world.size - 1:
            raise ConfigError("no such key")
        return "fine"

    with pytest.raises(AgreedError, match=rf"no such key \[rank {world.size - 1} on host") as caught:
        world.agree(fail_on_last)
    assert caught.value.exit_code == 2
    assert world.agree(lambda: world.rank) == world.rank
    assert world.broadcast({"from": world.rank}) == {"from": 0}
