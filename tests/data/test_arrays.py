"""The feed over arrays gives the batches of `Order`; moments count weights."""

from __future__ import annotations

import numpy as np
import pytest

from distmlp.data.arrays import MemoryFeed, moments
from distmlp.data.shards import Rows
from distmlp.order import Order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
def test_batches_are_those_of_the_order(shuffle, streams):
    order = Order(rows=1000, streams=streams, batch=300, seed=5, shuffle=shuffle)
    rows = Rows(np.arange(1000.0)[:, None], np.arange(1000), np.arange(1000.0) + 0.5)
    feed = MemoryFeed(rows, order)
    for epoch in (0, 1, 0):
        for number in range(order.batches_per_epoch):
            batch, expected = feed.batch(epoch, number), order.batch_rows(epoch, number, range(streams))
            assert np.array_equal(batch.targets, expected)
            assert np.array_equal(batch.inputs[:, 0], expected)
            assert np.array_equal(batch.weights, expected + 0.5)
    assert len(feed.batch(0, 3)) == 100
    assert feed.resident() is rows
    assert feed.resident_bytes() == 3 * 8000


def test_moments_count_weights_and_leave_constants_alone():
    values = np.array([[1.0, 7.1, 0.0], [2.0, 7.1, 0.0], [4.0, 7.1, 0.0]], np.float32)
    mean, deviation = moments(values, np.array([1.0, 2.0, 0.0]))
    repeated_mean, repeated_deviation = moments(values[[0, 1, 1]], None)
    assert mean == pytest.approx(repeated_mean)
    assert deviation == pytest.approx(repeated_deviation)
    assert deviation[1:] == pytest.approx([1.0, 1.0])
