"""The sweep kernel: steps against the float64 reference, bits that repeat, faults, and the flat-gradient path."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.cases import Case
from gpu.checks import (
    check_bits_repeat,
    check_flat_gradient,
    check_follows_wide,
    check_large,
    check_planned,
    check_skips,
    check_stops,
    hopper_only,
)

from distmlp.engine.layout import ACTIVATIONS

pytestmark = hopper_only

BASE = Case(precision="bf16", kernel="sweep", batch=9000, batches=1, limit=1.5)
DEEP = BASE.but(widths=(32, 128, 128, 128, 128, 16), activation="relu", optimizer="adam", batch=20_000, limit=2.0)
SOFTMAX = BASE.but(widths=(20, 40, 10), loss="softmax_cross_entropy")
KINDS = [
    *(BASE.but(activation=a) for a in ACTIVATIONS if a != "identity"),
    BASE.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    *(BASE.but(loss=loss, widths=(17, 33, 7)) for loss in ("huber", "binary_cross_entropy")),
    *(SOFTMAX.but(labels=labels, widths=(20, 40, w)) for labels in (True, False) for w in (3, 100)),
    BASE.but(weights=True, standardize=True, extra=13),
    BASE.but(dtype="u1", standardize=True),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    BASE.but(optimizer="adamw", options={"weight_decay": 0.1, "clip_norm": clip}, run={"ema_decay": 0.9})
    for clip in (0.0, 0.05)
]
SHAPES = [
    BASE.but(widths=widths, batch=batch, activation="softplus")
    for widths, batch in (
        ((1, 1), 9000), ((3, 17, 100, 1), 8449), ((128, 128, 128, 128), 20_000), ((100, 33, 128), 40_000),
        ((16, *(64,) * 8, 2), 12_345),
    )
]  # fmt: skip
FULL = DEEP.but(batch=65_536, batches=2, extra=777)
CASES = [DEEP.but(batches=2, extra=100), FULL]


@pytest.mark.parametrize("case", [DEEP, *KINDS, *OPTIMIZERS, *SHAPES], ids=str)
def test_steps(case: Case) -> None:
    check_planned(case, "narrow")


def test_follows_the_wide_kernel() -> None:
    check_follows_wide(FULL, 12, falling=0)


def test_bits_repeat() -> None:
    check_bits_repeat(CASES[0], 200)


def test_flat_gradient() -> None:
    check_flat_gradient(BASE, 1)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_stops_before_a_bad_update(value: float, options: dict) -> None:
    check_stops(CASES[0].but(options=options), value, batch=1)


def test_skips_a_bad_batch() -> None:
    check_skips(CASES[0].but(batches=4), (1, 2))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e30}], ids=["direct", "norm"])
def test_large_targets(options: dict) -> None:
    """Losses, which nobody squares, may be larger than gradients."""
    check_large(BASE.but(options=options), "targets", 1e9, 1e-12)
