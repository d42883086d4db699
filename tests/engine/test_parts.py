"""A batch on several threads: the same bits on any number of them, the same sums as at once."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from engine.fakes import FakeRows, make_config, make_engine, make_network
from threadpoolctl import threadpool_info, threadpool_limits

from distmlp.engine import Standardization
from distmlp.engine.parts import MOST_PARTS, PartSums, part_count
from distmlp.engine.rows import RowPasses
from distmlp.engine.tally import ROWS, TALLY, WEIGHT, Sums

CONFIG = make_config([5, 9, 3], {"loss": "softmax_cross_entropy"})
NETWORK = make_network(CONFIG)


def some_rows(count):
    rng = np.random.default_rng()
    return FakeRows(rng.normal(size=(count, 5)), rng.integers(0, 3, count), rng.uniform(1, 2, count))


def sums_on(threads, rows, dtype):
    with threadpool_limits(threads, "blas"):
        make_passes = partial(RowPasses, CONFIG.model, NETWORK, Standardization(), dtype)
        parts = PartSums(make_passes, NETWORK, dtype, 2000)
    out = Sums(NETWORK, np.full(NETWORK.size + TALLY, 7, dtype))
    out.gradient[:] = 0
    layers = NETWORK.views(NETWORK.initial(1, "he_normal", dtype))
    try:
        with parts.one_blas_thread():
            parts.sums(layers, rows.inputs, rows.targets, rows.weights, out)
    finally:
        parts.close()
    return out


@pytest.mark.parametrize("count", [0, 1, 191, 192, 1000, 2000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_number_of_threads_gives_the_same_bits(count, dtype):
    rows = some_rows(count)
    available = max(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
    results = [sums_on(threads, rows, dtype) for threads in range(1, min(available, 4) + 1)]
    assert len({result.buffer.tobytes() for result in results}) == 1
    tally = results[0].tally
    assert tally[ROWS] == count
    assert tally[WEIGHT] == pytest.approx(rows.weights.sum(), rel=1e-5)


def test_parts_add_up_to_the_whole():
    rows = some_rows(1000)
    whole = Sums(NETWORK, np.zeros(NETWORK.size + TALLY))
    layers = NETWORK.views(NETWORK.initial(1, "he_normal", np.float64))
    RowPasses(CONFIG.model, NETWORK, Standardization(), np.float64, 1000).sums(
        layers, rows.inputs, rows.targets, rows.weights, whole
    )
    np.testing.assert_allclose(sums_on(2, rows, np.float64).buffer, whole.buffer, rtol=0, atol=1e-10)


def test_how_a_batch_is_cut():
    assert [part_count(rows, NETWORK) for rows in (0, 1, 128, 191, 256, 1024, 10**6)] == [1, 1, 1, 1, 2, 8, MOST_PARTS]
    large = make_network(make_config([4096, 4096, 1]))
    assert part_count(1024, large) == 1  # its products are large enough for the threads of the BLAS


def test_a_fault_on_a_thread_reaches_the_caller():
    rows = some_rows(1000)
    rows.targets[900] = 3  # a class that is not there
    with pytest.raises(IndexError):
        sums_on(2, rows, np.float32)


def test_closing_ends_the_threads():
    config = make_config([5, 3], data={"train": "x", "batch": 512})
    before = threading.active_count()
    with threadpool_limits(2, "blas"):
        engine = make_engine(config, FakeRows(np.ones((512, 5)), np.ones((512, 3))))
    engine.train(0, 0, np.array([0.1]))
    assert threading.active_count() == before + 1
    engine.close()
    assert threading.active_count() == before
