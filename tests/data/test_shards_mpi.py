"""Shards, standardization and feed on real MPI ranks: the child that checks files starts beside a running MPI."""

import numpy as np
import pytest
from data.samples import SOFTMAX, open_shards, write_ids, write_shard

from distmlp.comm.world import open_world
from distmlp.data.feed import Feed
from distmlp.data.standardize import measure
from distmlp.errors import AgreedError
from distmlp.order import Order

pytestmark = pytest.mark.mpi


@pytest.fixture
def world():
    return open_world()


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks."""
    return world.broadcast(tmp_path)


def test_the_rows_of_all_ranks_are_the_whole(world, folder):
    if world.rank == 0:
        write_ids(folder, (300, 50, 400), chunks=(50, 3), compression="gzip")
    world.barrier()
    shards = open_shards(folder, world=world)
    order = Order(shards.rows, 12, 64, 3, True)
    feed = Feed(shards, order, world, "stream")
    for number in range(order.batches_per_epoch):
        parts = world.all_gather(feed.batch(1, number).inputs[:, 0].tolist())
        expected = order.batch_rows(1, number, range(12)).tolist()
        assert sorted(row for part in parts for row in part) == sorted(expected)
    feed.close()
    mean, deviation = measure(shards, world, "inputs").inputs
    np.testing.assert_allclose(mean, 374.5 + np.arange(3) * 0.25)
    np.testing.assert_allclose(deviation, np.arange(750).std())
    assert len(set(world.all_gather(mean.tobytes() + deviation.tobytes()))) == 1


def test_every_rank_hears_of_every_bad_file(world, folder):
    if world.rank == 0:
        rows = np.ones((5, 2))
        for name, label in (("a", 0), ("b", 9), ("c", 1)):
            write_shard(folder / f"{name}.h5", rows, np.full(5, label))
        (folder / "d.h5").write_bytes(b"no")
    world.barrier()
    with pytest.raises(Exception, match="2 of 4 files") as caught:
        open_shards(folder, SOFTMAX, (2, 2), world)
    assert caught.value.exit_code == 3
    assert isinstance(caught.value, AgreedError) == (world.size > 1)
    assert len(set(world.all_gather(str(caught.value)))) == 1
