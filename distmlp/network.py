"""The layout of a multilayer perceptron in one flat parameter buffer, and its initial values.

Parameters, gradients and every optimizer slot share this layout: weight of layer 0 (fan_in x fan_out,
C order), bias of layer 0, weight of layer 1, … Each tensor begins at a multiple of `ALIGNMENT`
elements, so that device code may use vector accesses; the gaps are always zero.
Pure: NumPy only, no files, no ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 32  # elements: 128 bytes of float32


@dataclass(frozen=True)
class Layer:
    """One dense layer: `output = activation(input @ weight + bias)`."""

    index: int
    fan_in: int
    fan_out: int
    activation: str
    weight_offset: int  # elements into the flat buffer
    bias_offset: int

    @property
    def weight(self) -> slice:
        return slice(self.weight_offset, self.weight_offset + self.fan_in * self.fan_out)

    @property
    def bias(self) -> slice:
        return slice(self.bias_offset, self.bias_offset + self.fan_out)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Network:
    """Widths and activations of a network and where its parameters lie in the flat buffer."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]  # one per layer, the output layer's last

    @classmethod
    def build(cls, widths: Sequence[int], activation: str | Sequence[str], output_activation: str) -> Network:
        """A network of `len(widths) - 1` layers; `activation` is one name or one per hidden layer."""
        hidden = len(widths) - 2
        names = [activation] * hidden if isinstance(activation, str) else list(activation)
        if len(names) != hidden:
            raise ValueError(f"{len(names)} activations for {hidden} hidden layers")
        return cls(tuple(int(w) for w in widths), (*names, output_activation))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        layers, offset = [], 0
        for index, (fan_in, fan_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            bias_offset = _aligned(offset + fan_in * fan_out)
            layers.append(Layer(index, fan_in, fan_out, self.activations[index], offset, bias_offset))
            offset = _aligned(bias_offset + fan_out)
        return tuple(layers)

    @property
    def inputs(self) -> int:
        return self.widths[0]

    @property
    def outputs(self) -> int:
        return self.widths[-1]

    @cached_property
    def size(self) -> int:
        """Elements of the flat buffer, gaps included."""
        return _aligned(self.layers[-1].bias.stop)

    @cached_property
    def parameter_count(self) -> int:
        """Weights and biases, gaps not counted."""
        return sum(layer.fan_in * layer.fan_out + layer.fan_out for layer in self.layers)

    def views(self, flat: NDArray) -> list[tuple[NDArray, NDArray]]:
        """`(weight (fan_in, fan_out), bias (fan_out,))` of every layer, views into `flat`."""
        return [(flat[layer.weight].reshape(layer.fan_in, layer.fan_out), flat[layer.bias]) for layer in self.layers]

    def initial(self, seed: int, init: str, dtype: DTypeLike = np.float32) -> NDArray:
        """Initial parameters: weights drawn from `init`, biases zero.

        Each layer draws from a counter-based generator keyed by (seed, layer), so the values depend
        neither on the rank nor on the other layers. Sources: He et al. 2015, Glorot & Bengio 2010,
        LeCun et al. 1998.
        """
        flat = np.zeros(self.size, dtype)
        for layer, (weight, _) in zip(self.layers, self.views(flat), strict=True):
            generator = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, layer.index]))
            weight[...] = _draw(generator, init, layer.fan_in, layer.fan_out)
        return flat

    def fingerprint(self, flat: NDArray) -> str:
        """Tells buffers (float32) of ranks that should be equal apart, ten times as fast as a cryptographic hash.

        Exclusive or and sum of the 64-bit words, gaps included: any one changed word changes both.
        """
        words = flat.view(np.uint64)
        return f"{np.bitwise_xor.reduce(words):016x}{np.add.reduce(words):016x}"

    def sha256(self, flat: NDArray) -> str:
        """SHA-256 over the float32 little-endian weights and biases in layer order."""
        digest = hashlib.sha256()
        for weight, bias in self.views(flat):
            for tensor in (weight, bias):
                digest.update(np.ascontiguousarray(tensor, "<f4").data)
        return digest.hexdigest()


def _draw(generator: np.random.Generator, init: str, fan_in: int, fan_out: int) -> NDArray:
    shape = (fan_in, fan_out)
    if init == "zeros":
        return np.zeros(shape)
    scheme, _, distribution = init.partition("_")
    variance = {"he": 2.0 / fan_in, "glorot": 2.0 / (fan_in + fan_out), "lecun": 1.0 / fan_in}[scheme]
    if distribution == "uniform":
        bound = math.sqrt(3.0 * variance)
        return generator.uniform(-bound, bound, shape)
    return generator.normal(0.0, math.sqrt(variance), shape)
