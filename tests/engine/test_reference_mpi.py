"""The reference engine on real ranks: mpirun -n 3 python -m pytest --with-mpi tests/engine/test_reference_mpi.py"""

from __future__ import annotations

import numpy as np
import pytest
from engine.fakes import FakeRows, make_config, make_engine, make_network
from engine.uneven import check_uneven_batches

from distmlp.comm.world import open_world

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def world():
    return open_world()


def some_rows():
    rng = np.random.default_rng(5)
    return FakeRows(rng.normal(size=(70, 4)), rng.normal(size=(70, 2)), rng.uniform(0.5, 2, 70))


def config_of(**run):
    return make_config([4, 300, 60, 2], data={"train": "x", "batch": 16, "streams": 8}, run=run)


def test_uneven_batches_are_exact(world):
    check_uneven_batches(world)


def test_replicas_stay_identical(world):
    config = config_of(ema_decay=0.9)
    network = make_network(config)
    engine = make_engine(config, some_rows(), world, dtype=np.float32)
    for number in range(4):
        hashes = world.all_gather(network.sha256(engine.state().parameters))
        assert len(set(hashes)) == 1, f"after step {number}"
        engine.train(0, number, np.array([0.01]))
    averages = world.all_gather(engine.state().ema.tobytes())
    assert len(set(averages)) == 1


def test_reproducible_ranks_gives_the_bits_of_one_process(world):
    config = config_of(reproducible="ranks")
    ends = []
    for ranks in (world, None):  # None: a single process
        engine = make_engine(config, some_rows(), ranks, dtype=np.float32)
        losses = engine.train(0, 0, np.full(5, 0.01)).losses
        ends.append(losses.tobytes() + engine.state().parameters.tobytes())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_row_of_one_rank_is_treated_alike_by_all(world, policy):
    rows = some_rows()
    rows.inputs[69] = np.nan  # of the last stream: the last rank reads it
    engine = make_engine(config_of(on_nonfinite=policy), rows, world)
    report = engine.train(0, 0, np.full(5, 0.01))
    assert np.isfinite(engine.state().parameters).all()
    assert (report.nonfinite is None, report.skipped) == ((True, 1) if policy == "skip" else (False, 0))
    assert len({*world.all_gather((report.nonfinite, report.skipped, report.losses.tobytes()))}) == 1
