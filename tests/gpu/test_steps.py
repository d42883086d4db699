"""One and a few steps against the float64 reference: gradients, updated weights, losses, for every kind of network."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gpu.cases import Case, drawn, error, rates
from gpu.checks import check

from distmlp.engine.layout import ACTIVATIONS

MIXED = Case(widths=(12, *(24,) * len(ACTIVATIONS), 3), activation=ACTIVATIONS, batch=100)
SOFTMAX = Case(widths=(20, 40, 10), loss="softmax_cross_entropy")
PRECISIONS = ("fp32", "tf32", "bf16")

KINDS = [
    *(Case(precision=p, activation=a, batch=200) for p in PRECISIONS for a in ("gelu", "tanh")),
    *(Case(precision=p, activation="relu", batch=200, limit=2.0) for p in PRECISIONS),  # rounding moves some to zero
    *(MIXED.but(precision=p, limit=2.0) for p in PRECISIONS),
    *(Case(output_activation=a, batch=64) for a in ("sigmoid", "softplus", "sine", "leaky_relu")),
    *(Case(loss=loss, widths=(17, 33, w)) for loss in ("mae", "huber", "binary_cross_entropy") for w in (1, 7)),
    *(SOFTMAX.but(labels=labels, precision=p) for p in ("fp32", "bf16") for labels in (True, False)),
    SOFTMAX.but(widths=(20, 40, 1000), labels=True, batch=33),
    Case(weights=True, standardize=True, extra=13),
    SOFTMAX.but(labels=True, weights=True, extra=1, standardize=True),
]
OPTIMIZERS = [
    *(Case(optimizer=o) for o in ("sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw", "lamb")),
    *(
        Case(optimizer=o, options={"weight_decay": 0.1, "clip_norm": 0.05}, run={"ema_decay": 0.9})
        for o in ("sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw", "lamb")
    ),
    Case(optimizer="adam", precision="bf16", options={"weight_decay": 0.01}, run={"ema_decay": 0.9}, widths=(8, 9, 3)),
]
SHAPES = [
    Case(widths=widths, batch=batch, precision=p, activation="softplus")
    for p in PRECISIONS
    for widths, batch in (
        ((1, 1), 1), ((1, 3, 1), 1), ((3, 17, 100, 1), 3), ((100, 1000, 17), 17), ((1000, 3, 1000), 100),
        ((17, 1000, 1000, 3), 333), ((130, 258, 514), 1000), ((784, 512, 512, 10), 128), ((256, 256, 256), 4096),
    )
] + [
    Case(widths=widths, batch=1024, extra=77, batches=1, precision="bf16", activation="softplus")
    for widths in ((100, 1000, 1000, 2), (784, 512, 512, 10))
]  # fmt: skip
LARGE = [Case(widths=(8192, 8192, 5), batch=64, precision=p, batches=1, activation="softplus") for p in PRECISIONS] + [
    Case(widths=(1, 8192, 1), batch=2, batches=1),
    Case(widths=(9, *(31,) * 63, 2), batch=40, limit=4.0),
    Case(widths=(9, *(32,) * 63, 2), batch=40, precision="bf16", limit=4.0),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_kinds(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case: Case) -> None:
    check(case, steps=1)


RAW_TYPES = [
    Case(dtype=d, standardize=True) for d in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
]


@pytest.mark.parametrize("case", RAW_TYPES, ids=lambda case: case.dtype)
def test_raw_types(case: Case) -> None:
    check(case)


def test_flat_gradient() -> None:
    """The path through the gradient buffer gives the same gradient as the direct one."""
    case = Case(options={"clip_norm": 1e30})
    direct, flat = Case().fused(), case.fused()
    for engine in (direct, flat):
        engine.train(0, 0, rates(1))
    first, second = direct.state(), flat.state()
    assert error(second.slots["momentum"], first.slots["momentum"]) < 1e-6
    weight = case.batch
    gradient = np.empty(flat._network.size, np.float32)
    flat._ledger.download(flat._state.arena.address("gradient"), gradient)
    assert error(gradient / weight, first.slots["momentum"]) < 1e-6


DRAWN = drawn(
    25,
    # The errors of one output in a few rows can cancel to less than bfloat16 tells.
    lambda widths, batch, extra, precision: Case(
        widths=tuple(widths),
        batch=batch + 8 * (widths[-1] == 1),
        extra=min(extra, batch - 1),
        precision=precision,
        limit=2.0,
    ),
    widths=st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 31, 64, 65, 100]), min_size=2, max_size=6),
    batch=st.integers(1, 150),
    extra=st.integers(0, 5),
    precision=st.sampled_from(PRECISIONS),
)


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_shapes(case: Case) -> None:
    check(case)
