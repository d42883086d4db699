"""The sample order: what users are promised of it, over many shapes of data, ranks and seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmlp.order import BLOCK_ROWS, WINDOW_ROWS, Order, owned_streams, permute

orders = st.builds(
    Order,
    rows=st.one_of(st.integers(1, 300), st.integers(1000, 20000)),
    streams=st.integers(1, 23),
    batch=st.integers(1, 700),
    seed=st.one_of(st.integers(0, 5), st.integers(0, (1 << 63) - 1)),
    shuffle=st.booleans(),
)


def epoch_rows(order, epoch):
    return order.rows_at(epoch, np.arange(order.rows))


@given(orders, st.integers(0, 1000))
@settings(max_examples=60)
def test_every_row_once_an_epoch(order, epoch):
    np.testing.assert_array_equal(np.sort(epoch_rows(order, epoch)), np.arange(order.rows))


@given(orders)
@settings(max_examples=60)
def test_streams_are_contiguous_and_of_equal_length(order):
    starts = [order.stream_start(stream) for stream in range(order.streams + 1)]
    lengths = np.diff(starts)
    assert starts[0] == 0
    assert starts[-1] == order.rows
    assert lengths.max() - lengths.min() <= 1
    positions = np.arange(order.rows)
    rows, stream = order.rows_at(3, positions), positions % order.streams
    assert (rows >= np.array(starts)[stream]).all()
    assert (rows < np.array(starts)[stream + 1]).all()


@given(orders, st.sampled_from([2, 3, 4, 7]))
@settings(max_examples=60)
def test_global_batches_are_the_same_at_any_number_of_ranks(order, ranks):
    if order.streams < ranks:
        return
    for number in {0, order.batches_per_epoch // 2, order.batches_per_epoch - 1}:
        whole = order.batch_rows(1, number, range(order.streams))
        parts, places = [], []
        for rank in range(ranks):
            streams = owned_streams(order.streams, ranks, rank)
            parts.append(order.batch_rows(1, number, streams))
            places.append(order.batch_positions(number, streams))
        back = np.argsort(np.concatenate(places), kind="stable")
        np.testing.assert_array_equal(np.concatenate(parts)[back], whole)
        assert all((np.diff(place) > 0).all() for place in places)


@given(orders)
@settings(max_examples=40)
def test_batches_cut_the_epoch_and_only_the_last_is_short(order):
    sizes = [order.batch_size(number) for number in range(order.batches_per_epoch)]
    assert sum(sizes) == order.rows
    assert all(size == order.batch for size in sizes[:-1])
    assert 1 <= sizes[-1] <= order.batch
    everything = range(order.streams)
    first_and_last = [order.batch_rows(2, number, everything) for number in (0, len(sizes) - 1)]
    rows = epoch_rows(order, 2)
    np.testing.assert_array_equal(first_and_last[0], rows[: sizes[0]])
    np.testing.assert_array_equal(first_and_last[1], rows[order.rows - sizes[-1] :])


def test_an_order_has_no_memory():
    """Resuming needs (epoch, step) alone: nothing asked before changes what comes."""
    order = Order(10_000, 8, 100, 42, True)
    fresh = Order(10_000, 8, 100, 42, True).batch_rows(5, 37, range(8))
    for number in range(20):
        order.batch_rows(4, number, range(8))
    np.testing.assert_array_equal(order.batch_rows(5, 37, range(8)), fresh)


@pytest.mark.parametrize(("streams", "ranks"), [(16, 3), (7, 7), (23, 4), (5, 1), (100, 64)])
def test_ranks_own_whole_streams_in_turn(streams, ranks):
    owned = [owned_streams(streams, ranks, rank) for rank in range(ranks)]
    assert [stream for part in owned for stream in part] == list(range(streams))
    assert {len(part) for part in owned} <= {streams // ranks, -(-streams // ranks)}


@given(st.integers(1, 5000), st.integers(0, (1 << 32) - 1))
@settings(max_examples=80)
def test_permute_is_a_bijection(size, key):
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_without_shuffle_streams_run_straight():
    order = Order(10, 3, 4, 0, False)
    assert order.batch_rows(9, 0, range(3)).tolist() == [0, 4, 7, 1]


def test_a_window_reads_whole_blocks():
    """Reading stays contiguous: the rows of a window are `WINDOW_ROWS / BLOCK_ROWS` stretches of the file."""
    order = Order(64 * WINDOW_ROWS + 100, 1, 100, 3, True)
    for window in (0, 17, 63):
        rows = np.sort(order.rows_at(1, np.arange(window * WINDOW_ROWS, (window + 1) * WINDOW_ROWS)))
        assert (np.diff(rows) > 1).sum() < WINDOW_ROWS // BLOCK_ROWS
        assert not (rows == np.arange(rows[0], rows[0] + len(rows))).all()


def as_read(order, epoch, stream, number):
    """Rows of a window in reading order, and where in them each place finds its row."""
    (runs,) = order.window_runs(epoch, range(stream, stream + 1), number)
    rows = np.concatenate([np.arange(first, first + count) for first, count in runs])
    return rows, order.window_places(epoch, stream, number)


@given(orders, st.integers(0, 50), st.data())
@settings(max_examples=60)
def test_a_window_is_what_stands_at_its_positions(order, epoch, data):
    stream = data.draw(st.integers(0, order.streams - 1))
    length = order.stream_length(stream)
    if not length:
        return
    number = data.draw(st.integers(0, (length - 1) // WINDOW_ROWS))
    rows, places = as_read(order, epoch, stream, number)
    positions = np.arange(number * WINDOW_ROWS, min(length, (number + 1) * WINDOW_ROWS)) * order.streams + stream
    np.testing.assert_array_equal(rows[places], order.rows_at(epoch, positions))
    for block in rows[: len(rows) // BLOCK_ROWS * BLOCK_ROWS].reshape(-1, BLOCK_ROWS):
        assert (np.diff(block) == 1).all()


@pytest.mark.parametrize("shuffle", [True, False])
def test_many_windows_are_worked_out_as_one_by_one(shuffle):
    order = Order(13 * WINDOW_ROWS + 7 * BLOCK_ROWS + 3, 3, 10, 5, shuffle)
    found = order.windows_runs(4, range(1, 3), 2, 64)
    assert len(found) == 2  # of streams of four windows and a part
    for number, runs in enumerate(found, 2):
        single = order.window_runs(4, range(1, 3), number)
        np.testing.assert_array_equal(runs, np.concatenate(single))
    assert len(order.windows_runs(4, range(3), 99, 64)) == 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_of_a_long_stream(shuffle):
    order = Order(3 * WINDOW_ROWS + 1000, 1, 10, 5, shuffle)
    for number in range(4):
        rows, places = as_read(order, 2, 0, number)
        positions = np.arange(number * WINDOW_ROWS, number * WINDOW_ROWS + len(rows))
        np.testing.assert_array_equal(rows[places], order.rows_at(2, positions))


def test_epochs_streams_and_seeds_differ():
    order = Order(4000, 4, 100, 7, True)
    rows = epoch_rows(order, 0).reshape(-1, 4) - [order.stream_start(stream) for stream in range(4)]
    for other in range(1, 4):
        assert (rows[:, 0] == rows[:, other]).mean() < 0.02
    for changed in (epoch_rows(order, 1), *(epoch_rows(Order(4000, 4, 100, s, True), 0) for s in (8, 7 + (1 << 32)))):
        assert (changed == epoch_rows(order, 0)).mean() < 0.02


def test_quality_of_the_shuffle():
    """Over many epochs a place gets every row about equally often, and neighbours do not stay together."""
    order = Order(600, 1, 50, 11, True)  # two whole blocks and a short one, one window
    epochs = 3000
    rows = np.stack([epoch_rows(order, epoch) for epoch in range(epochs)])
    for place in (0, 299, 599):
        counts = np.bincount(rows[:, place] // 60, minlength=10)
        chi_squared = ((counts - epochs / 10) ** 2 / (epochs / 10)).sum()
        assert chi_squared < 30  # 9 degrees of freedom: 1 in 2,300 by chance
    assert abs(np.corrcoef(rows[:, 10], rows[:, 11])[0, 1]) < 0.08
    assert (np.diff(rows[0]) == 1).mean() < 0.02
    assert abs(np.corrcoef(np.arange(600), rows[5])[0, 1]) < 0.15
