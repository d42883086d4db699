"""Batches and data sets of more than 2^31 elements: few rows, again and again, so that the outcome is theirs."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.cases import LIMITS, Case, error, rates
from gpu.checks import check, hopper_only

from distmlp.data.shards import Rows
from distmlp.errors import SystemUnfitError

DISTINCT = 1000
pytestmark = pytest.mark.xdist_group("large")  # one at a time: they take a good part of a GPU's memory


class Repeating(Case):
    def data(self) -> Rows:
        assert self.rows % DISTINCT == 0
        return self.distinct.data().map(lambda array: np.tile(array, (self.rows // DISTINCT, 1)))

    @property
    def distinct(self) -> Case:
        return Case(**{**vars(self), "batch": DISTINCT, "batches": 1, "extra": 0})


WIDE = Repeating(widths=(4, 520, 520, 3), batch=4_130_000, batches=1, precision="bf16")
BATCHES = [
    WIDE,
    WIDE.but(precision="fp32", limit=50.0),  # sums of so many float32 numbers are not good to 1e-5 any more
    pytest.param(WIDE.but(kernel="bulk"), marks=hopper_only),
    Repeating(
        widths=(64, 16, 3), batch=33_600_000, batches=1, dtype="u1", activation="softplus", precision="bf16",
        kernel="narrow", limit=2.0,
    ),
]  # fmt: skip
DATA = Repeating(widths=(1100, 8, 1), batch=1000, batches=2000, dtype="u1", activation="softplus")


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: f"{case.kernel} {case.precision}")
def test_batch(case: Case) -> None:
    assert case.batch * max(case.widths) > 2**31
    try:
        engine = case.fused(poison=None)
    except SystemUnfitError as unfit:
        pytest.skip(str(unfit))  # it says how many bytes are missing
    reference = case.distinct.reference()
    assert engine.plan.kernel == case.kernel
    try:
        wanted, got = reference.train(0, 0, rates(1)), engine.train(0, 0, rates(1))
        assert error(got.losses, wanted.losses) < 3 * LIMITS[case.precision] * case.limit
        true, found = reference.state(), engine.state()
        assert error(found.slots["momentum"], true.slots["momentum"]) < LIMITS[case.precision] * case.limit
    finally:
        engine.close()


def test_data_set() -> None:
    assert DATA.rows * DATA.widths[0] > 2**31
    check(DATA, steps=2)
