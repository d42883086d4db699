"""The narrow kernel: steps against the float64 reference, bits that repeat, faults, and the flat-gradient path."""

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
    check_large,
    check_planned,
    check_skips,
    check_stops,
)

from distmlp.engine.layout import ACTIVATIONS

BASE = Case(precision="bf16", kernel="narrow", batch=300, limit=1.5)
DEEP = BASE.but(widths=(32, 64, 64, 64, 64, 16), activation="relu", optimizer="adam", batch=4096, batches=3)
SOFTMAX = BASE.but(widths=(20, 40, 10), loss="softmax_cross_entropy")
KINDS = [
    *(BASE.but(activation=a) for a in ACTIVATIONS if a != "identity"),
    BASE.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    *(BASE.but(output_activation=a) for a in ("sigmoid", "softplus", "sine")),
    *(BASE.but(loss=loss, widths=(17, 33, w)) for loss in ("huber", "binary_cross_entropy") for w in (1, 7)),
    BASE.but(loss="mae", widths=(17, 33, 7), limit=3.0),  # signs turn where an error is about zero
    *(SOFTMAX.but(labels=labels, widths=(20, 40, w)) for labels in (True, False) for w in (3, 10, 100)),
    BASE.but(weights=True, standardize=True, extra=13),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    *(BASE.but(optimizer=o, widths=(8, 40, 3)) for o in ("sgd", "nesterov", "rmsprop", "adam", "adamw", "lamb")),
    *(
        BASE.but(
            optimizer=o, options={"weight_decay": 0.1, "clip_norm": clip}, run={"ema_decay": 0.9}, widths=(8, 40, 3)
        )
        for o in ("momentum", "adamw")
        for clip in (0.0, 0.05)
    ),
]
SHAPES = [
    BASE.but(widths=widths, batch=batch, activation="softplus")
    for widths, batch in (
        ((1, 1), 1), ((1, 3, 1), 3), ((3, 17, 100, 1), 333), ((128, 128, 1), 1000), ((100, 33, 128), 129),
        ((64,) * 6, 5000), ((17, 16, 16, 16, 16, 16, 16, 16, 2), 64), ((96, 96, 20), 20_000),
    )
]  # fmt: skip
MANY_BLOCKS = DEEP.but(widths=(8, 16, 4), batch=20_000, batches=2, extra=100)  # some without tiles or parameters
CASES = [DEEP, DEEP.but(batch=512, batches=4, extra=100), MANY_BLOCKS]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    check_planned(case, "narrow")


RAW_TYPES = [
    BASE.but(dtype=dtype, standardize=True) for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f8")
]


@pytest.mark.parametrize("case", RAW_TYPES, ids=lambda case: case.dtype)
def test_raw_types(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 1000)


def test_follows_the_wide_kernel() -> None:
    check_follows_wide(CASES[1], 200, falling=20)


def test_flat_gradient() -> None:
    check_flat_gradient(BASE)


def test_evaluation_sees_the_trained_weights() -> None:
    check_evaluation(DEEP)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_stops_before_a_bad_update(value: float, where: str, options: dict) -> None:
    check_stops(CASES[1].but(options=options), value, where)


def test_large_targets() -> None:
    check_large(BASE, "targets", 1e9, 1e-12)


def test_skips_a_bad_batch() -> None:
    check_skips(CASES[1])


DRAWN = drawn(
    6,
    lambda widths, batch, extra: BASE.but(widths=tuple(widths), batch=batch, extra=min(extra, batch - 1), limit=2.0),
    widths=st.lists(st.sampled_from([1, 2, 5, 8, 15, 16, 17, 31, 48, 64]), min_size=2, max_size=5),
    batch=st.integers(1, 400),
    extra=st.integers(0, 5),
)


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)
