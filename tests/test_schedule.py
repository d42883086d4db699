"""Learning rates against their definitions at every step that matters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distmlp.config import ScheduleConfig
from distmlp.schedule import learning_rate, learning_rates

BASE, TOTAL = 0.4, 100
NAMES = ["constant", "step", "cosine", "linear", "one_cycle"]


def rates(total=TOTAL, **keys):
    return learning_rates(ScheduleConfig(**keys), BASE, 0, total, total)


def test_constant():
    np.testing.assert_array_equal(rates(), BASE)


def test_step_drops_after_every_step_size():
    r = rates(name="step", step_size=30, factor=0.5)
    wanted = [BASE] * 30 + [BASE / 2] * 30 + [BASE / 4] * 30 + [BASE / 8] * 10
    np.testing.assert_allclose(r, wanted)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine(floor):
    r = rates(name="cosine", final_fraction=floor)
    wanted = [BASE * (floor + (1 - floor) * (1 + math.cos(math.pi * k / TOTAL)) / 2) for k in range(TOTAL)]
    np.testing.assert_allclose(r, wanted)
    assert r[0] == BASE
    assert r[50] == pytest.approx(BASE * (1 + floor) / 2)


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_linear(floor):
    r = rates(name="linear", final_fraction=floor)
    np.testing.assert_allclose(r, np.linspace(BASE, BASE * floor, TOTAL + 1)[:-1])


def test_one_cycle_rises_to_its_peak_and_falls():
    r = rates(name="one_cycle", peak_at=0.3)
    assert r[0] == pytest.approx(BASE / 25)
    assert int(np.argmax(r)) == 30
    assert r[30] == pytest.approx(BASE)
    assert (np.diff(r[:31]) > 0).all()
    assert (np.diff(r[30:]) < 0).all()
    assert 0 < r[-1] < 0.01 * BASE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [1, 10, 99])
def test_warm_up_rises_linearly_then_the_schedule_runs_over_the_rest(name, warmup):
    r = rates(name=name, warmup_steps=warmup)
    np.testing.assert_allclose(r[:warmup], BASE * np.arange(1, warmup + 1) / warmup)
    rest = learning_rates(ScheduleConfig(name=name), BASE, 0, TOTAL - warmup, TOTAL - warmup)
    np.testing.assert_allclose(r[warmup:], rest)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 5, 1000])
def test_every_rate_is_finite_and_within_the_base(name, warmup):
    """Also beyond the end, in a run of one step, and where warm-up is longer than the run."""
    schedule = ScheduleConfig(name=name, warmup_steps=warmup)
    for total in (1, 2, 100):
        r = learning_rates(schedule, BASE, 0, 3 * total, total)
        assert np.isfinite(r).all()
        assert (r >= 0).all()
        assert (r <= BASE * (1 + 1e-15)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_stretch_is_a_cut_of_the_whole(name):
    """A resumed run continues with the rates of one that was not stopped."""
    schedule = ScheduleConfig(name=name, warmup_steps=7)
    whole = learning_rates(schedule, BASE, 0, TOTAL, TOTAL)
    np.testing.assert_array_equal(learning_rates(schedule, BASE, 40, 20, TOTAL), whole[40:60])
    assert learning_rate(schedule, BASE, 59, TOTAL) == whole[59]
