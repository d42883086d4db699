"""The bulk kernel: steps against the float64 reference, bits that repeat, faults, and the flat-gradient path."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gpu.cases import Case, drawn, rates
from gpu.checks import (
    bits,
    check,
    check_bits_repeat,
    check_flat_gradient,
    check_follows_wide,
    check_planned,
    check_skips,
    check_stops,
    hopper_only,
)

from distmlp.engine.layout import ACTIVATIONS
from distmlp.engine.plan_bulk import TILE_M

pytestmark = hopper_only

BASE = Case(precision="bf16", kernel="bulk", batch=300, limit=1.5, widths=(40, 130, 70))
LARGE = BASE.but(widths=(256, 512, 512, 96), activation="relu", optimizer="adam", batch=2048, batches=3)
SOFTMAX = BASE.but(loss="softmax_cross_entropy", widths=(40, 130, 10))
KINDS = [
    *(BASE.but(activation=a) for a in ACTIVATIONS if a != "identity"),
    BASE.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    *(BASE.but(output_activation=a) for a in ("sigmoid", "sine")),
    *(BASE.but(loss=loss, widths=(17, 133, w)) for loss in ("huber", "binary_cross_entropy") for w in (1, 7)),
    BASE.but(loss="mae", widths=(17, 33, 7), limit=3.0),  # signs turn where an error is about zero
    *(SOFTMAX.but(labels=labels, widths=(20, 140, w)) for labels in (True, False) for w in (3, 100)),
    BASE.but(weights=True, standardize=True, extra=13),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    *(BASE.but(optimizer=o, widths=(8, 140, 3)) for o in ("sgd", "nesterov", "adam", "lamb")),
    # Its first steps are little but signs; rounding the operands alone, on a CPU, moves the weights by 0.03.
    BASE.but(optimizer="rmsprop", widths=(8, 140, 3), limit=8.0),
    *(
        BASE.but(
            optimizer="adamw", options={"weight_decay": 0.1, "clip_norm": clip}, run={"ema_decay": 0.9},
            widths=(8, 140, 3),
        )
        for clip in (0.0, 0.05)
    ),
]  # fmt: skip
SHAPES = [
    BASE.but(widths=widths, batch=batch, activation="softplus")
    for widths, batch in (
        ((1, 1), 1), ((1, 3, 1), 3), ((3, 17, 100, 1), 333), ((128, 128, 1), 1000), ((1000, 33, 300), 129),
        ((256,) * 4, 5000), ((100, 1000, 1000, 2), 1024),
    )
]  # fmt: skip
TF32 = BASE.but(precision="tf32")
IN_TF32 = [
    *(TF32.but(activation=a, limit=3.0) for a in ("relu", "leaky_relu", "gelu", "tanh")),
    TF32.but(widths=(12, 16, 24, 16, 3), activation=("gelu", "relu", "tanh"), limit=2.0),
    SOFTMAX.but(precision="tf32", labels=True, weights=True, extra=1, standardize=True),
    TF32.but(widths=(130, 258, 514), batch=1000, dtype="u1", standardize=True),
    TF32.but(
        optimizer="adamw", options={"weight_decay": 0.1, "clip_norm": 0.05}, run={"ema_decay": 0.9},
        widths=(40, 300, 3), limit=4.0,
    ),
    *(
        TF32.but(widths=widths, batch=batch, activation="softplus")
        for widths, batch in (((1, 1), 1), ((3, 17, 100, 1), 333), ((1000, 33, 300), 129), ((256,) * 4, 5000))
    ),
]  # fmt: skip
CASES = [LARGE, LARGE.but(batch=700, batches=4, extra=100), LARGE.but(precision="tf32", extra=100)]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    check_planned(case, "wide")


@pytest.mark.parametrize("case", IN_TF32, ids=str)
def test_tf32(case: Case) -> None:
    check(case)


RAW_TYPES = [BASE.but(dtype=dtype, standardize=True) for dtype in ("u1", "i2", "u8", "f2", "f8")]


@pytest.mark.parametrize("case", RAW_TYPES, ids=lambda case: case.dtype)
def test_raw_types(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 500)


def test_follows_the_general_kernel() -> None:
    check_follows_wide(CASES[1], 200, falling=20)


@pytest.mark.parametrize("case", [BASE, TF32], ids=lambda case: case.precision)
def test_flat_gradient(case: Case) -> None:
    check_flat_gradient(case)


def test_takes_over_another_state() -> None:
    """Weight copies of an earlier state are not used."""
    engine, other = BASE.fused(), BASE.fused()
    engine.train(0, 0, rates(2))
    engine.load(BASE.initial())
    for each in (engine, other):
        each.train(0, 0, rates(2))
    assert bits(engine) == bits(other)


def test_counters_wrap() -> None:
    """Shares of tiles meet at counters that only grow: past 2^32 after some hundred million steps."""
    engine, fresh = CASES[1].fused(), CASES[1].fused()
    plan, state = engine.plan.special, engine._state
    assert plan.splits > 1
    steps = 2**32 // plan.splits - 1
    size = next(buffer.size_bytes for buffer in plan.buffers() if buffer.name == "bulk_words")
    words = np.zeros(size // 4, np.uint32)  # as `memory` in bulk.cu has them: flags and steps, announcements, arrivals
    words[1] = steps
    words[8 + 2 * (2 * len(plan.widths) - 3) * plan.rows // TILE_M :] = steps * plan.splits
    state.ledger.upload(state.arena.address("bulk_words"), words)
    for each in (engine, fresh):
        each.train(0, 0, rates(4))
    assert bits(engine) == bits(fresh)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_stops_before_a_bad_update(where: str, options: dict) -> None:
    check_stops(CASES[1].but(options=options), np.nan, where)


def test_skips_a_bad_batch() -> None:
    check_skips(CASES[1])


@pytest.mark.parametrize("case", [CASES[1], BASE, TF32.but(batches=4)], ids=str)
def test_rows_that_fill_up_a_tile_do_without_the_first(case: Case) -> None:
    check_skips(case, row=0)


DRAWN = drawn(
    5,
    lambda widths, batch, extra, precision: BASE.but(
        widths=tuple(widths), batch=batch, extra=min(extra, batch - 1), limit=2.0, precision=precision
    ),
    widths=st.lists(st.sampled_from([1, 2, 15, 17, 64, 65, 129, 300]), min_size=2, max_size=5),
    batch=st.integers(1, 400),
    extra=st.integers(0, 5),
    precision=st.sampled_from(["bf16", "tf32"]),
)


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)
