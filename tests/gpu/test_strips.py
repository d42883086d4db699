"""The strips kernel: steps in TF32 and float32 against the float64 reference, bits that repeat, faults, and the path
through the flat gradient."""

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
)

BASE = Case(precision="tf32", kernel="strips", batch=300, batches=2, extra=13)
NARROW64 = BASE.but(widths=(32, 64, 64, 64, 64, 16), activation="relu", batch=1024, batches=6, limit=2.0)
# With rounded operands NumPy's gradient of the lowest weights is 1.02e-2 off here, as the kernel's is: units near zero
# change sides.
NARROW128 = NARROW64.but(widths=(32, 128, 128, 128, 128, 16), limit=3.0)
FULL = NARROW64.but(batch=65_536, batches=1, extra=777)
SOFTMAX = BASE.but(widths=(20, 40, 10), loss="softmax_cross_entropy")
MIXED = BASE.but(widths=(17, 33, 20, 12, 9, 5))
KINDS = [
    *(
        MIXED.but(activation=kinds)
        for kinds in (("relu", "elu", "gelu", "silu"), ("leaky_relu", "tanh", "sigmoid", "softplus"))
    ),
    BASE.but(activation="sine"),
    *(BASE.but(loss=loss, widths=(17, 33, 7)) for loss in ("mae", "huber", "binary_cross_entropy")),
    *(SOFTMAX.but(labels=labels, widths=(20, 40, w)) for labels, w in ((True, 3), (False, 100))),
    BASE.but(weights=True, standardize=True),
    BASE.but(dtype="u1", standardize=True),
    BASE.but(dtype="f8", standardize=True, widths=(16, 20, 5)),
    SOFTMAX.but(labels=True, weights=True, standardize=True),
]
OPTIMIZERS = [
    *(BASE.but(optimizer=optimizer) for optimizer in ("rmsprop", "lamb")),
    *(
        BASE.but(optimizer="adamw", options={"weight_decay": 0.1, "clip_norm": clip}, run={"ema_decay": 0.9})
        for clip in (0.0, 0.05)
    ),
]
SHAPES = [
    BASE.but(widths=widths, batch=batch, batches=1, activation="softplus", precision=precision)
    for widths, batch, precision in (
        ((1, 1), 1, "tf32"), ((3, 17, 100, 1), 17, "fp32"), ((128, 128, 128, 128), 20_000, "tf32"),
        ((100, 33, 128), 40_000, "fp32"), ((16, *(64,) * 8, 2), 12_345, "tf32"), ((96, 96, 65, 32), 9000, "fp32"),
    )
]  # fmt: skip
FLOATS = [case.but(precision="fp32") for case in (NARROW64, NARROW128, KINDS[0], SOFTMAX)]
WHOLE = [FULL, FULL.but(widths=NARROW128.widths), FULL.but(widths=NARROW128.widths, precision="fp32")]
RANDOM = drawn(
    8,
    lambda widths, batch, extra, precision, activation: BASE.but(
        widths=tuple(widths), batch=batch, extra=extra, precision=precision, activation=activation
    ),
    widths=st.lists(st.integers(1, 128), min_size=2, max_size=6),
    batch=st.integers(1, 30_000),
    extra=st.integers(1, 500),
    precision=st.sampled_from(["tf32", "fp32"]),
    activation=st.sampled_from(["tanh", "silu", "elu"]),
)
CASES = [NARROW64, NARROW128]


@pytest.mark.parametrize("case", [NARROW64, NARROW128, *KINDS, *OPTIMIZERS, *SHAPES, *FLOATS, *WHOLE], ids=str)
def test_steps(case: Case) -> None:
    check_planned(case, "narrow")


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [FULL, NARROW128], ids=str)
def test_follows_the_wide_kernel(case: Case) -> None:
    check_follows_wide(case, 6, falling=0)


@pytest.mark.parametrize("case", [NARROW64, NARROW128.but(batch=60_000, batches=2, precision="fp32")], ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 40)


def test_flat_gradient() -> None:
    check_flat_gradient(BASE, 1)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_stops_before_a_bad_update(value: float, options: dict) -> None:
    check_stops(NARROW64.but(options=options), value)


def test_skips_bad_batches() -> None:
    check_skips(NARROW64)


def test_evaluation_after_training() -> None:
    check_evaluation(NARROW64.but(extra=0))
