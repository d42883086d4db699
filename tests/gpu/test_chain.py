"""The chain kernel: steps against the float64 reference, bits that repeat, faults, and the flat-gradient path."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gpu.cases import Case, drawn
from gpu.checks import (
    check,
    check_bits_repeat,
    check_evaluation,
    check_flat_gradient,
    check_follows_wide,
    check_planned,
    check_skips,
    check_stops,
    hopper_only,
)

from distmlp.engine.layout import ACTIVATIONS

pytestmark = hopper_only

BASE = Case(precision="bf16", kernel="chain", widths=(70, 200, 130, 33), batch=1500, batches=1, limit=1.5)
MID = BASE.but(widths=(256,) * 6, activation="relu", optimizer="adam", batch=4096, batches=2, limit=3.0)
SOFTMAX = BASE.but(widths=(20, 140, 10), loss="softmax_cross_entropy")
KINDS = [
    *(BASE.but(activation=a) for a in ACTIVATIONS if a != "identity"),
    BASE.but(widths=(12, 160, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    BASE.but(output_activation="sigmoid"),
    *(BASE.but(loss=loss) for loss in ("huber", "binary_cross_entropy")),
    BASE.but(loss="mae", limit=3.0),  # signs turn where an error is about zero
    *(SOFTMAX.but(labels=labels, widths=(20, 140, w)) for labels in (True, False) for w in (3, 200)),
    BASE.but(weights=True, standardize=True, extra=13),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    *(BASE.but(optimizer=o) for o in ("sgd", "nesterov", "adam", "lamb")),
    *(
        BASE.but(optimizer="adamw", options={"weight_decay": 0.1, "clip_norm": clip}, run={"ema_decay": 0.9})
        for clip in (0.0, 0.05)
    ),
]
SHAPES = [
    BASE.but(widths=widths, batch=batch, activation="softplus")
    for widths, batch in (
        ((1, 129, 1), 1000), ((512, 512), 2112), ((3, 17, 300, 5), 2113), ((256,) * 6, 4224), ((300, 65, 130), 4225),
        ((130, 256, 64), 8448), ((16, *(192,) * 8, 2), 1234), ((784, 512, 512, 10), 1024),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", [MID, *KINDS, *OPTIMIZERS, *SHAPES], ids=str)
def test_steps(case: Case) -> None:
    check_planned(case, "wide")


RAW_TYPES = [BASE.but(dtype=dtype, standardize=True) for dtype in ("u1", "i2", "i4", "f2", "f8")]


@pytest.mark.parametrize("case", RAW_TYPES, ids=lambda case: case.dtype)
def test_raw_types(case: Case) -> None:
    check(case)


def test_follows_the_wide_kernel() -> None:
    check_follows_wide(MID.but(extra=1000), 30, falling=1)


# The short batches leave parts of the batch without rows, in the middle of a launch and as one of its own.
@pytest.mark.parametrize("case", [MID.but(extra=100), BASE.but(batch=8000, extra=70, optimizer="adam")], ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 200)


def test_flat_gradient() -> None:
    check_flat_gradient(BASE, 1)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_stops_before_a_bad_update(value: float, options: dict) -> None:
    check_stops(MID.but(options=options), value, batch=1)


def test_skips_a_bad_batch() -> None:
    check_skips(MID.but(batches=4), (1, 2), np.inf)


def test_evaluation_sees_the_trained_weights() -> None:
    check_evaluation(MID)


DRAWN = drawn(
    6,
    lambda widths, widest, outputs, batch, extra: BASE.but(
        widths=(*widths, widest, outputs), batch=batch, extra=extra, limit=2.0
    ),
    widths=st.lists(st.sampled_from([5, 64, 65, 100, 128, 192, 257, 320]), min_size=1, max_size=3),
    widest=st.integers(129, 400),
    outputs=st.integers(2, 140),
    batch=st.integers(1000, 6000),
    extra=st.sampled_from([0, 65]),
)


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)
