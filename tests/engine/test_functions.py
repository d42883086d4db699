"""Activations and losses against their definitions, their slopes against differences, and at extreme values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distmlp.engine.functions import ACTIVATIONS, erfcx, row_losses, softmax

DEFINITIONS = {
    "relu": lambda z: max(z, 0.0),
    "leaky_relu": lambda z: z if z > 0 else 0.01 * z,
    "elu": lambda z: z if z > 0 else math.expm1(z),
    "gelu": lambda z: 0.5 * z * math.erfc(-z / math.sqrt(2)),
    "silu": lambda z: z / (1 + math.exp(-z)),
    "tanh": math.tanh,
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    "softplus": lambda z: math.log1p(math.exp(z)),
    "sine": math.sin,
    "identity": lambda z: z,
}


def apply(name, z):
    """Output of the activation, in place where the engine does it in place."""
    out = np.empty_like(z) if ACTIVATIONS[name].reads_input else z
    ACTIVATIONS[name].apply(z, out)
    return out


def slope(name, z):
    output, gradient = apply(name, z), np.ones_like(z)
    ACTIVATIONS[name].chain(gradient, z, output)
    return gradient


def test_every_activation_has_a_definition_here():
    assert set(DEFINITIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 2e-14), (np.float32, 4e-6)])
def test_activation_is_its_definition(name, dtype, tolerance):
    z = np.concatenate([np.linspace(-20, 20, 4001), [-1e-8, 0.0, 1e-8]]).astype(dtype)
    wanted = [DEFINITIONS[name](float(v)) for v in z]
    result = apply(name, z.copy())
    assert result.dtype == dtype
    tail = 40 * tolerance if name == "gelu" else 0  # exp(-z²/2) carries the rounding of z²
    np.testing.assert_allclose(result, wanted, rtol=tolerance + tail, atol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slope_is_the_limit_of_differences(name):
    z = np.random.default_rng().uniform(-6, 6, 2000)
    z = z[np.abs(z) > 1e-3]  # beside the kinks
    step = 1e-5
    difference = [(DEFINITIONS[name](v + step) - DEFINITIONS[name](v - step)) / (2 * step) for v in z]
    np.testing.assert_allclose(slope(name, z.copy()), difference, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activation_and_slope_stay_finite_at_large_values(name, dtype):
    z = np.array([-1e4, -200, -89, 89, 200, 1e4], dtype)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert np.isfinite(apply(name, z.copy())).all()
        assert np.isfinite(slope(name, z.copy())).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_passes_nan_on(name):
    assert np.isnan(apply(name, np.array([np.nan, 1.0], np.float32))[0])


def test_erfcx_in_all_ranges():
    x = np.array([0.0, 1e-9, 0.3, 1.0, 1.99, 2.01, 4.0, 9.0, 25.0])
    wanted = [math.exp(v * v) * math.erfc(v) for v in x]
    np.testing.assert_allclose(erfcx(x), wanted, rtol=1e-12)  # exp(x²) costs the library digits, not us
    np.testing.assert_allclose(
        erfcx(np.array([1e4, 1e8])), [1 / (math.sqrt(math.pi) * v) for v in (1e4, 1e8)], rtol=1e-8
    )


def loss_definition(loss, y, t, delta):
    """One row of plain Python numbers, as PyTorch documents it."""
    if loss == "softmax_cross_entropy":
        top = max(y)
        log_total = top + math.log(math.fsum(math.exp(v - top) for v in y))
        return math.fsum(tk * (log_total - yk) for tk, yk in zip(t, y, strict=True))
    each = {
        "mse": lambda y, t: (y - t) ** 2,
        "mae": lambda y, t: abs(y - t),
        "huber": lambda y, t: 0.5 * (y - t) ** 2 if abs(y - t) <= delta else delta * (abs(y - t) - 0.5 * delta),
        "binary_cross_entropy": lambda y, t: max(y, 0) - y * t + math.log1p(math.exp(-abs(y))),
    }[loss]
    return math.fsum(each(yk, tk) for yk, tk in zip(y, t, strict=True)) / len(y)


LOSSES = ["mse", "mae", "huber", "binary_cross_entropy", "softmax_cross_entropy"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("outputs", [1, 3, 17])
def test_loss_is_its_definition_and_its_slope_the_limit_of_differences(loss, outputs):
    rng = np.random.default_rng()
    y = rng.normal(size=(9, outputs)) * 2
    t = rng.uniform(0, 1, (9, outputs)) if "entropy" in loss else rng.normal(size=(9, outputs))
    gradient = np.empty_like(y)
    losses = row_losses(loss, y, t, gradient, delta=0.7)
    np.testing.assert_allclose(
        losses, [loss_definition(loss, a, b, 0.7) for a, b in zip(y, t, strict=True)], rtol=1e-13
    )
    if loss == "mae":
        np.testing.assert_array_equal(gradient, np.sign(y - t) / outputs)
        return
    step = 1e-6
    for k in range(outputs):
        up, down = y.copy(), y.copy()
        up[:, k] += step
        down[:, k] -= step
        difference = (row_losses(loss, up, t, None, 0.7) - row_losses(loss, down, t, None, 0.7)) / (2 * step)
        np.testing.assert_allclose(gradient[:, k], difference, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_cross_entropies_are_exact_at_extreme_logits(dtype, sign):
    y = np.array([[sign * 1e4, 0.0, -sign * 1e4]], dtype)
    gradient = np.empty_like(y)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for label, lost in enumerate(max(y[0]) - y[0]):
            assert row_losses("softmax_cross_entropy", y, np.array([label]), gradient) == pytest.approx([lost])
            assert gradient[0].sum() == 0
            assert np.isfinite(gradient).all()
        for t in (0.0, 1.0):
            logit = y[:, :1]
            losses = row_losses("binary_cross_entropy", logit, np.full((1, 1), t, dtype), gradient[:, :1])
            assert losses[0] == (1e4 if (sign > 0) != (t > 0) else 0)
            assert gradient[0, 0] == float(sign > 0) - t


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels_and_one_hot_rows_mean_the_same(dtype):
    rng = np.random.default_rng()
    y, labels = rng.normal(size=(50, 7)).astype(dtype) * 30, rng.integers(0, 7, 50)
    by_label, by_row = np.empty_like(y), np.empty_like(y)
    tolerance = 40 * np.finfo(dtype).eps
    np.testing.assert_allclose(
        row_losses("softmax_cross_entropy", y, labels, by_label),
        row_losses("softmax_cross_entropy", y, np.eye(7, dtype=dtype)[labels], by_row),
        atol=100 * tolerance,
    )
    np.testing.assert_allclose(by_label, by_row, atol=tolerance)


def test_softmax_sums_to_one_at_extreme_logits():
    p = softmax(np.array([[1e4, -1e4, 1e4], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(p, [[0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3]])
