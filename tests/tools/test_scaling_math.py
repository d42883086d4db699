"""Scaling arithmetic and the cost model: known answers and recovered coefficients."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from distmlp.tools.scaling_math import (
    Block,
    Measured,
    bus_bandwidth,
    derived_communication_us,
    efficiency,
    speedup,
    time_blocks,
    time_split,
)
from distmlp.tools.scaling_model import AllReduce, CostModel, fit, nonnegative_least_squares, predict


def _line(step, seconds, train=None, **more):
    timing = {} if train is None else {"train_seconds": train, "data_wait_seconds": 0.1, "communication_seconds": 0.2}
    return {"step": step, "seconds": seconds, **timing, **more}


def test_a_block_spans_log_points_and_takes_epoch_ends_in():
    lines = [_line(10, 5.0, 4.0), _line(17, 6.0, 0.7), _line(20, 6.5, 0.4), _line(30, 7.5, 0.8)]
    first, second = time_blocks(lines, 10)
    assert (first.steps, first.seconds) == (10, 1.5)
    assert first.communication_seconds == pytest.approx(0.4)
    assert first.other_seconds == pytest.approx(0.4)
    assert second == Block(10, 1.0, 0.2, 0.1, pytest.approx(0.2))


def test_validation_within_a_block_does_not_count():
    lines = [_line(10, 5.0, 4.0, validation_loss=1.0), _line(20, 9.0, 0.5), _line(30, 9.6, 0.5)]
    assert [block.seconds for block in time_blocks(lines, 10)] == pytest.approx([0.5, 0.6])


def test_a_clock_that_starts_anew_makes_no_block_and_missing_figures_stay_unknown():
    lines = [_line(10, 5.0), _line(20, 6.0), _line(30, 0.5), _line(40, 1.5)]
    assert time_blocks(lines, 10) == [Block(10, 1.0, None, None, None), Block(10, 1.0, None, None, None)]
    assert time_blocks(lines[:1], 10) == []


@pytest.mark.parametrize(
    ("mode", "batch", "step_us", "gain", "per_rank"),
    [("weak", 400, 125.0, 3.2, 0.8), ("strong", 100, 50.0, 2.0, 0.5), ("strong", 100, 25.0, 4.0, 1.0)],
)
def test_efficiency_is_speedup_per_rank(mode, batch, step_us, gain, per_rank):
    alone, four = Measured(mode, 1, 100, 100.0), Measured(mode, 4, batch, step_us)
    assert speedup(four, alone) == pytest.approx(gain)
    assert efficiency(four, alone) == pytest.approx(per_rank)


def test_the_split_adds_up_to_the_step():
    split = time_split(Measured("weak", 2, 64, 100.0, communication_us=30.0, data_wait_us=5.0, other_us=15.0))
    assert split == {"compute": 50.0, "communication": 30.0, "data_wait": 5.0, "other": 15.0}
    assert time_split(Measured("weak", 1, 32, 100.0))["communication"] is None


def test_communication_is_derived_from_the_one_rank_step_over_as_many_rows():
    alone = Measured("weak", 1, 32, 70.0)
    assert derived_communication_us(Measured("weak", 2, 64, 100.0), [alone]) == pytest.approx(30.0)
    assert derived_communication_us(Measured("strong", 2, 32, 100.0), [alone]) is None


def test_bus_bandwidth():
    assert bus_bandwidth(2, 1_000_000, 10.0) == pytest.approx(1e11)
    assert bus_bandwidth(4, 1_000_000, 10.0) == pytest.approx(1.5e11)


def test_nonnegative_least_squares_matches_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    generator = np.random.default_rng(3)
    for _ in range(20):
        columns, values = generator.normal(size=(9, 4)), generator.normal(size=9)
        expected, _ = optimize.nnls(columns, values)
        assert nonnegative_least_squares(columns, values) == pytest.approx(expected, abs=1e-9)


TRUE = CostModel(20.0, 0.05, 3.0, 1.5, 1e-5, 4_000_000)


def _points(model: CostModel, apart: bool) -> list[Measured]:
    points = []
    for ranks in (1, 2, 4, 8):
        for mode, batch in (("weak", 1000 * ranks), ("strong", 1000)):
            step = model.step_us(ranks, batch)
            exchange = step - model.step_us(1, math.ceil(batch / ranks)) if apart else None
            points.append(Measured(mode, ranks, batch, step, exchange))
    return points


@pytest.mark.parametrize("apart", [True, False])
def test_the_fit_recovers_the_model_from_steps_and_exchanges(apart):
    exchanges = [
        AllReduce(n, size, 1.5 * 2 * math.ceil(math.log2(n)) + 1e-5 * size * 2 * (n - 1) / n)
        for n in (2, 4, 8)
        for size in (4096, 1 << 20, 1 << 26)
    ]
    model = fit(_points(TRUE, apart), TRUE.gradient_bytes, exchanges)
    for name, value in vars(TRUE).items():
        assert getattr(model, name) == pytest.approx(value, rel=1e-6), name
    assert model.bandwidth_bytes_per_second == pytest.approx(1e11, rel=1e-6)


@pytest.mark.parametrize("apart", [True, False])
def test_the_fit_without_exchanges_predicts_unseen_rank_counts(apart):
    true = CostModel(20.0, 0.05, 0.0, 1.5, 1e-5, 4_000_000)
    model = fit(_points(true, apart), true.gradient_bytes)
    for ranks in (16, 512, 4096):
        assert model.step_us(ranks, 1000 * ranks) == pytest.approx(true.step_us(ranks, 1000 * ranks), rel=1e-6)


def test_noise_never_gives_negative_coefficients():
    random.seed(1)
    points = [Measured("weak", n, 100 * n, random.uniform(50, 150), random.uniform(0, 50)) for n in (1, 2, 4)]
    model = fit(points, 1_000_000)
    assert min(model.fixed_us, model.per_row_us, model.latency_us, model.per_byte_us) >= 0.0


def test_one_point_is_enough_and_none_is_refused():
    model = fit([Measured("weak", 1, 64, 80.0)], 4096)
    assert predict(model, "weak", 8, 64)["efficiency"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no measured point"):
        fit([], 4096)


def test_predictions_keep_the_rules_of_their_mode():
    weak, strong = predict(TRUE, "weak", 512, 1000), predict(TRUE, "strong", 512, 1000)
    assert (weak["global_batch"], strong["global_batch"]) == (512_000, 1000)
    assert weak["efficiency"] > strong["efficiency"] > 0
    assert weak["samples_per_second"] == pytest.approx(512_000 * 1e6 / TRUE.step_us(512, 512_000))
    assert predict(TRUE, "strong", 4096, 1000)["us_per_step"] is None


def test_what_several_ranks_cost_beside_the_exchange_is_told_apart_from_one_ranks_step():
    exchanges = [AllReduce(2, size, 20.0 + size / 1e5) for size in (4096, 1 << 20)]
    beside = 20.0 + 1e6 / 1e5 + 150.0  # the exchange of 1 MB, and 150 µs of launches
    points = [
        Measured("weak", 1, 1024, 129.0),
        Measured("weak", 2, 2048, 129.0 + beside, 60.0),
        Measured("strong", 2, 1024, 79.0 + beside, 60.0),
    ]
    model = fit(points, 1_000_000, exchanges)
    assert model.imbalance_us == pytest.approx(150.0, rel=0.01)
    assert model.step_us(2, 1024) == pytest.approx(79.0 + beside, rel=0.01)
    assert model.step_us(1, 1024) == pytest.approx(129.0, rel=0.01)
