"""The resident kernel: steps against the float64 reference, bits that repeat, faults, state that comes and goes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gpu.cases import Case, drawn
from gpu.checks import (
    check,
    check_bits_repeat,
    check_evaluation,
    check_large,
    check_planned,
    check_skips,
    check_stops,
    epochs,
)

from distmlp.engine.layout import ACTIVATIONS

BASE = Case(precision="bf16", kernel="resident", widths=(17, 33, 20, 5), batch=50, limit=1.5)
SEED = BASE.but(widths=(100, 1000, 1000, 1000, 2), activation="relu", optimizer="adam", batch=32, batches=4, extra=9)
SOFTMAX = BASE.but(widths=(20, 40, 10), loss="softmax_cross_entropy")
KINDS = [
    *(BASE.but(activation=a) for a in ACTIVATIONS if a not in ("identity", "leaky_relu")),
    BASE.but(activation="leaky_relu", limit=2.0),  # rounding moves some across zero
    BASE.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    BASE.but(output_activation="sigmoid"),
    *(BASE.but(loss=loss, widths=(17, 33, w)) for loss in ("huber", "binary_cross_entropy") for w in (1, 7)),
    BASE.but(loss="mae", limit=3.0),  # signs turn where an error is about zero
    *(SOFTMAX.but(labels=labels, widths=(20, 40, w)) for labels in (True, False) for w in (3, 10)),
    BASE.but(weights=True, standardize=True, extra=13),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    *(BASE.but(optimizer=o) for o in ("sgd", "nesterov", "adam", "adamw")),
    BASE.but(optimizer="rmsprop", limit=5.0),  # a gradient near zero moves its weight by its sign
    BASE.but(optimizer="adamw", options={"weight_decay": 0.1}, run={"ema_decay": 0.9}),
]
SHAPES = [
    BASE.but(widths=widths, batch=batch, activation="softplus")
    for widths, batch in (
        ((1, 3, 1), 1), ((3, 17, 100, 1), 7), ((128, 128, 1), 100), ((100, 33, 128, 9), 128), ((64,) * 6 + (16,), 65),
        ((17, *(16,) * 7, 2), 64), ((784, 512, 512, 10), 128), ((100, 1000, 1000, 1000, 2), 32),
    )
]  # fmt: skip
FLOATS = [
    case.but(precision=precision)
    for precision in ("tf32", "fp32")
    for case in (
        *(BASE.but(activation=a, limit=1.0) for a in ("gelu", "tanh", "sine", "elu")),
        BASE.but(activation="relu", batch=100, limit=2.0),
        BASE.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "softplus", "tanh"), limit=2.0),
        SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True, limit=1.0),
        BASE.but(optimizer="adamw", options={"weight_decay": 0.1}, run={"ema_decay": 0.9}, limit=2.0),
        *(case.but(limit=1.0) for case in SHAPES),
    )
]
CASES = [
    SEED,
    *(SEED.but(precision=precision) for precision in ("tf32", "fp32")),
    BASE.but(optimizer="adam", batch=128, extra=100),
    BASE.but(widths=(17, 33, 5), optimizer="adam", extra=3),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    check_planned(case, "wide")


@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_floats(case: Case) -> None:
    check_planned(case, "wide")


RAW_TYPES = [
    BASE.but(dtype=dtype, standardize=True) for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f8")
]


@pytest.mark.parametrize("case", RAW_TYPES, ids=lambda case: case.dtype)
def test_raw_types(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 300)


def test_follows_the_wide_kernel() -> None:
    resident, wide = epochs(SEED.fused(), SEED, 60), epochs(SEED.but(kernel="wide").fused(), SEED, 60)
    assert resident[-5:].mean() < 0.8 * resident[:5].mean()
    assert np.abs(resident / wide - 1)[:10].max() < 2e-2
    assert np.abs(resident - wide).max() < 2e-2 * wide.max()


def test_evaluation_sees_the_trained_weights() -> None:
    check_evaluation(CASES[1])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_large_magnitudes_take_the_slow_way(precision: str) -> None:
    """Inputs beyond what the kernel trusts unseen, but nothing that overflows: the same update."""
    case = BASE.but(activation="relu", optimizer="sgd", widths=(17, 33, 20, 3), precision=precision)
    if precision == "fp32":  # weights move by so little that their own rounding is 8e-5 of it
        case = case.but(limit=20.0)
    check_large(case, "inputs", 1e5, 1e-13, steps=2)


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_stops_before_a_bad_update(value: float, where: str) -> None:
    check_stops(SEED, value, where)


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_skips_a_bad_batch(precision: str) -> None:
    check_skips(SEED.but(precision=precision))


DRAWN = drawn(
    6,
    lambda widths, outputs, batch, extra: BASE.but(
        widths=(*widths, outputs), batch=batch, extra=min(extra, batch - 1), limit=2.0
    ),
    widths=st.lists(st.sampled_from([5, 8, 15, 16, 17, 31, 48, 64]), min_size=2, max_size=4),
    outputs=st.integers(2, 16),
    batch=st.integers(8, 40),  # differences of a few numbers cancel to less than bfloat16 tells
    extra=st.sampled_from([0, 5]),
)


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)
