"""Activations and losses in NumPy, any floating dtype. Semantics are PyTorch's.

Rows go through them in place where the mathematics allows it; nothing here knows of layers or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LEAKY_SLOPE = 0.01


@dataclass(frozen=True)
class Activation:
    """`apply(z, out)` writes f(z) to `out`; `chain(gradient, z, output)` multiplies `gradient` by f'(z) in place.

    Where `reads_input` is False, `chain` looks only at the output, and `out` may be `z` itself.
    """

    apply: Callable[[NDArray, NDArray], object]
    chain: Callable[[NDArray, NDArray, NDArray], object]
    reads_input: bool = False


def _relu_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= output > 0


def _leaky_relu(z: NDArray, out: NDArray) -> None:
    np.maximum(z, z * z.dtype.type(LEAKY_SLOPE), out=out)


def _leaky_relu_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= np.where(output > 0, z.dtype.type(1), z.dtype.type(LEAKY_SLOPE))


def _elu(z: NDArray, out: NDArray) -> None:
    below = np.expm1(np.minimum(z, 0))
    np.maximum(z, 0, out=out)
    out += below


def _elu_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= np.minimum(output, 0) + 1  # exp(z) = elu(z) + 1 below zero


def _normal_cdf(z: NDArray) -> NDArray:
    """Distribution function of the standard normal, relatively exact in both tails."""
    tail = np.abs(z) * z.dtype.type(math.sqrt(0.5))
    tail = 0.5 * np.exp(-tail * tail) * erfcx(tail)  # of -|z|
    return np.where(z > 0, 1 - tail, tail).astype(z.dtype, copy=False)


def _gelu(z: NDArray, out: NDArray) -> None:
    np.multiply(z, _normal_cdf(z), out=out)


def _gelu_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    density = np.exp(z * z * z.dtype.type(-0.5)) * z.dtype.type(1 / math.sqrt(2 * math.pi))
    gradient *= _normal_cdf(z) + z * density


def sigmoid(z: NDArray) -> NDArray:
    """1 / (1 + exp(-z)) without overflow, relatively exact in both tails."""
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1, small) / (1 + small)


def _sigmoid(z: NDArray, out: NDArray) -> None:
    out[...] = sigmoid(z)


def _sigmoid_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= output * (1 - output)


def _silu(z: NDArray, out: NDArray) -> None:
    np.multiply(z, sigmoid(z), out=out)


def _silu_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    s = sigmoid(z)
    gradient *= s * (1 + z * (1 - s))


def _softplus(z: NDArray, out: NDArray) -> None:
    rest = np.log1p(np.exp(-np.abs(z)))
    np.maximum(z, 0, out=out)
    out += rest


def _softplus_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= -np.expm1(-output)  # sigmoid(z) = 1 - exp(-softplus(z))


def _tanh_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= 1 - output * output


def _sine_chain(gradient: NDArray, z: NDArray, output: NDArray) -> None:
    gradient *= np.cos(z)


def _identity(z: NDArray, out: NDArray) -> None:
    if out is not z:
        out[...] = z


ACTIVATIONS = {
    "relu": Activation(lambda z, out: np.maximum(z, 0, out=out), _relu_chain),
    "leaky_relu": Activation(_leaky_relu, _leaky_relu_chain),
    "elu": Activation(_elu, _elu_chain),
    "gelu": Activation(_gelu, _gelu_chain, reads_input=True),
    "silu": Activation(_silu, _silu_chain, reads_input=True),
    "tanh": Activation(lambda z, out: np.tanh(z, out=out), _tanh_chain),
    "sigmoid": Activation(_sigmoid, _sigmoid_chain),
    "softplus": Activation(_softplus, _softplus_chain),
    "sine": Activation(lambda z, out: np.sin(z, out=out), _sine_chain, reads_input=True),
    "identity": Activation(_identity, lambda gradient, z, output: None),
}


def erfcx(x: NDArray) -> NDArray:
    """exp(x²) erfc(x) for x >= 0, to the precision of the dtype (NumPy has no error function).

    A Chebyshev series in t = (x - 3.75) / (x + 3.75), the variable of Shepherd & Laframboise 1981.
    """
    series = _erfcx_series(np.dtype(x.dtype))
    t = 1 - 7.5 / (x + 3.75)
    t2 = (2 * t).astype(x.dtype, copy=False)
    after, value = np.zeros_like(x), np.full_like(x, series[-1])
    for coefficient in series[-2:0:-1]:  # Clenshaw's recurrence
        after, value = value, t2 * value - after + coefficient
    # (1 + 2 x) erfcx(x) is the function in the series: bounded on the whole half-line
    return (t * value - after + series[0]) / (1 + 2 * x)


@lru_cache
def _erfcx_series(dtype: DTypeLike) -> NDArray:
    degree = 12 if np.dtype(dtype).itemsize <= 4 else 22

    def sample(t: Any) -> Any:
        x = 3.75 * (1 + t) / (1 - t)
        return np.array([(1 + 2 * v) * _erfcx(float(v)) for v in x])

    return np.polynomial.chebyshev.chebinterpolate(sample, degree).astype(dtype)


def _erfcx(x: float) -> float:
    """One value: the library's erfc where exp(x²) is harmless, else Laplace's continued fraction."""
    if x < 2:
        return math.exp(x * x) * math.erfc(x)
    tail = x
    for k in range(400, 0, -1):
        tail = x + k / 2 / tail
    return 1 / (tail * math.sqrt(math.pi))


def softmax(logits: NDArray) -> NDArray:
    """Class probabilities (rows, classes) of logits (rows, classes)."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    exponentials /= exponentials.sum(axis=1, keepdims=True)
    return exponentials


def row_losses(loss: str, output: NDArray, targets: NDArray, gradient: NDArray | None, delta: float = 1.0) -> NDArray:
    """Loss of every row (rows,); writes its derivative by `output` to `gradient` (rows, outputs) if given.

    `targets`: (rows, outputs) like `output`, or for softmax_cross_entropy also integer labels (rows,).
    mse, mae, huber (threshold `delta`) and binary_cross_entropy are means over the outputs of a row;
    the two cross-entropies take logits and stay finite for any finite logit.
    """
    if loss == "softmax_cross_entropy":
        return _softmax_cross_entropy(output, targets, gradient)
    outputs = output.dtype.type(output.shape[1])
    if loss == "binary_cross_entropy":
        losses = np.maximum(output, 0) - output * targets + np.log1p(np.exp(-np.abs(output)))
        slope = sigmoid(output) - targets
    else:
        error = output - targets
        losses, slope = _of_error(loss, error, delta)
    if gradient is not None:
        np.divide(slope, outputs, out=gradient)
    return losses.mean(axis=1)


def _of_error(loss: str, error: NDArray, delta: float) -> tuple[NDArray, NDArray]:
    if loss == "mse":
        return error * error, 2 * error
    if loss == "mae":
        return np.abs(error), np.sign(error)
    if loss == "huber":
        clipped = np.clip(error, -delta, delta)
        return clipped * (error - clipped / 2), clipped  # ½e² inside, delta (|e| - ½ delta) outside
    raise AssertionError(f"unknown loss {loss!r}")


def _softmax_cross_entropy(output: NDArray, targets: NDArray, gradient: NDArray | None) -> NDArray:
    shifted = output - output.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=1)
    log_total = np.log(total)
    if targets.ndim == 1:
        rows = np.arange(len(output))
        losses = log_total - shifted[rows, targets]
        if gradient is not None:
            np.divide(exponentials, total[:, None], out=gradient)
            gradient[rows, targets] -= 1
        return losses
    mass = targets.sum(axis=1)  # 1 for one-hot rows
    if gradient is not None:
        np.multiply(exponentials, (mass / total)[:, None], out=gradient)
        gradient -= targets
    return mass * log_total - (targets * shifted).sum(axis=1)
