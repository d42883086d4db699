"""Update rules over the flat buffers, in NumPy. Semantics are PyTorch's; lamb is that of You et al. 2020.

A rule touches every parameter with a dozen element-wise operations. They run block by block, so that the
pieces of all buffers stay in the cache from the first operation to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmlp.config import OptimizerConfig
from distmlp.network import Network

BLOCK = 32768  # elements: parameters, gradient, two slots and scratch in float32 take 640 KB of the L2 cache


def blocks(size: int) -> Iterator[slice]:
    """Slices of `BLOCK` elements that cover `size`."""
    for start in range(0, size, BLOCK):
        yield slice(start, min(start + BLOCK, size))


def norm(flat: NDArray) -> float:
    """Euclidean norm, summed in float64 in an order that depends on nothing but the size."""
    return math.sqrt(sum(float(np.add.reduce(np.square(flat[b], dtype=np.float64))) for b in blocks(flat.size)))


# A rule changes one block in place: parameters p and slots; gradient g and scratch t may be spoilt.
# `rate` is the learning rate, `step` counts from 1.


def _sgd(c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int) -> None:
    g *= rate
    p -= g


def _momentum(c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int, m: NDArray) -> None:
    m *= c.momentum
    m += g
    np.multiply(m, rate, out=t)
    p -= t


def _nesterov(c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int, m: NDArray) -> None:
    m *= c.momentum
    m += g
    np.multiply(m, c.momentum, out=t)
    t += g
    t *= rate
    p -= t


def _average(average: NDArray, value: NDArray, decay: float, t: NDArray) -> None:
    """average = decay * average + (1 - decay) * value; `t` may be `value`."""
    np.multiply(value, 1.0 - decay, out=t)
    average *= decay
    average += t


def _rmsprop(c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int, v: NDArray) -> None:
    np.multiply(g, g, out=t)
    _average(v, t, c.rho, t)
    np.sqrt(v, out=t)
    t += c.epsilon
    np.divide(g, t, out=t)
    t *= rate
    p -= t


def _moments(c: OptimizerConfig, g: NDArray, t: NDArray, step: int, m: NDArray, v: NDArray) -> float:
    """Update both moments, leave in `t` the direction m̂ / (√v̂ + ε) but for the factor that is returned.

    With both bias corrections moved out of the arrays: m̂ / (√v̂ + ε) = factor * m / (√v + ε √(1 - β2^step)).
    """
    _average(m, g, c.beta1, t)
    np.multiply(g, g, out=t)
    _average(v, t, c.beta2, t)
    root = math.sqrt(1.0 - c.beta2**step)
    np.sqrt(v, out=t)
    t += c.epsilon * root
    np.divide(m, t, out=t)
    return root / (1.0 - c.beta1**step)


def _adam(
    c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int, m: NDArray, v: NDArray
) -> None:
    t *= rate * _moments(c, g, t, step, m, v)
    p -= t


def _lamb_direction(
    c: OptimizerConfig, p: NDArray, g: NDArray, t: NDArray, rate: float, step: int, m: NDArray, v: NDArray
) -> None:
    factor = _moments(c, g, t, step, m, v)
    np.multiply(t, factor, out=g)  # g becomes the direction; `update` applies it once whole tensors are known
    np.multiply(p, c.weight_decay, out=t)
    g += t


_RULES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "sgd": (_sgd, ()),
    "momentum": (_momentum, ("momentum",)),
    "nesterov": (_nesterov, ("momentum",)),
    "rmsprop": (_rmsprop, ("second_moment",)),
    "adam": (_adam, ("first_moment", "second_moment")),
    "adamw": (_adam, ("first_moment", "second_moment")),
    "lamb": (_lamb_direction, ("first_moment", "second_moment")),
}


def slot_names(optimizer: str) -> tuple[str, ...]:
    """The flat buffers that `optimizer` keeps beside the parameters."""
    return _RULES[optimizer][1]


def needs_norm(config: OptimizerConfig) -> bool:
    """Whether an update has to wait for a norm over all parameters or a tensor."""
    return config.name == "lamb" or config.clip_norm > 0


class Optimizer:
    """The rule of one configuration; also clips the gradient and keeps the average of the weights."""

    def __init__(self, config: OptimizerConfig, ema_decay: float, network: Network, dtype: DTypeLike) -> None:
        self._config = config
        self._ema_decay = ema_decay
        self._network = network
        self._rule, self._slots = _RULES[config.name]
        self._scratch = np.empty(min(BLOCK, network.size), dtype)

    def update(
        self,
        parameters: NDArray,
        gradient: NDArray,
        slots: dict[str, NDArray],
        ema: NDArray | None,
        rate: float,
        step: int,
    ) -> None:
        """Do step number `step` (from 1) in place at learning rate `rate`; `gradient` is spoilt."""
        c = self._config
        scale = self._clip_factor(gradient)
        for block in blocks(parameters.size):
            p, g = parameters[block], gradient[block]
            t = self._scratch[: p.size]
            if scale != 1.0:
                g *= scale
            if c.weight_decay and c.name == "adamw":
                p *= 1.0 - rate * c.weight_decay
            elif c.weight_decay and c.name != "lamb":
                np.multiply(p, c.weight_decay, out=t)
                g += t
            self._rule(c, p, g, t, rate, step, *(slots[name][block] for name in self._slots))
        if c.name == "lamb":
            self._apply_lamb(parameters, gradient, rate)
        if ema is not None:
            for block in blocks(ema.size):
                _average(ema[block], parameters[block], self._ema_decay, self._scratch[: ema[block].size])

    def _clip_factor(self, gradient: NDArray) -> float:
        """What `gradient` is multiplied by so that its norm is at most `clip_norm` (as `clip_grad_norm_`)."""
        if not self._config.clip_norm:
            return 1.0
        return min(1.0, self._config.clip_norm / (norm(gradient) + 1e-6))

    def _apply_lamb(self, parameters: NDArray, direction: NDArray, rate: float) -> None:
        """Step along `direction` (spoilt), scaled for every weight and bias by |parameters| / |direction|."""
        for layer in self._network.layers:
            for tensor in (layer.weight, layer.bias):
                p, u = parameters[tensor], direction[tensor]
                size, length = norm(p), norm(u)
                u *= rate * (size / length if size > 0 and length > 0 else 1.0)
                p -= u
