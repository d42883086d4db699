"""Forward and backward through the layers for a block of rows, in buffers that are allocated once."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmlp.engine.functions import ACTIVATIONS
from distmlp.network import Network

Layers = list[tuple[NDArray, NDArray]]  # weight (fan_in, fan_out) and bias (fan_out,) of every layer: `Network.views`


class Backprop:
    """Buffers for up to `rows` rows: per layer its pre-activation, output and error.

    Where the derivative of the activation can be told from the output, pre-activation and output share a buffer.
    """

    def __init__(self, network: Network, rows: int, dtype: DTypeLike) -> None:
        self._network = network
        self._activations = [ACTIVATIONS[layer.activation] for layer in network.layers]
        self._inputs = np.empty((rows, network.inputs), dtype)
        self._z = [np.empty((rows, layer.fan_out), dtype) for layer in network.layers]
        self._outputs = [
            np.empty_like(z) if activation.reads_input else z
            for z, activation in zip(self._z, self._activations, strict=True)
        ]
        self._errors = [np.empty_like(z) for z in self._z]

    def inputs(self, rows: int) -> NDArray:
        """The buffer (rows, features) to put standardized inputs into."""
        return self._inputs[:rows]

    def output_gradient(self, rows: int) -> NDArray:
        """The buffer (rows, outputs) to put the derivative of the loss by the network's output into."""
        return self._errors[-1][:rows]

    def forward(self, layers: Layers, rows: int) -> NDArray:
        """Output (rows, outputs) for what lies in `inputs(rows)`; a view that the next call overwrites."""
        below = self._inputs[:rows]
        for (weight, bias), activation, z_buffer, output_buffer in zip(
            layers, self._activations, self._z, self._outputs, strict=True
        ):
            z = np.matmul(below, weight, out=z_buffer[:rows])  # (rows, fan_out)
            z += bias
            below = z if output_buffer is z_buffer else output_buffer[:rows]
            activation.apply(z, below)
        return below

    def backward(self, layers: Layers, gradients: Layers, rows: int) -> None:
        """Write the sums over the rows of the last `forward` to `gradients`, from `output_gradient(rows)`."""
        for k in range(len(layers) - 1, -1, -1):
            error = self._errors[k][:rows]  # derivative by this layer's output, then by its pre-activation
            self._activations[k].chain(error, self._z[k][:rows], self._outputs[k][:rows])
            below = self._outputs[k - 1][:rows] if k else self._inputs[:rows]
            weight_gradient, bias_gradient = gradients[k]
            np.matmul(below.T, error, out=weight_gradient)  # (fan_in, fan_out)
            np.add.reduce(error, axis=0, out=bias_gradient)
            if k:
                np.matmul(error, layers[k][0].T, out=self._errors[k - 1][:rows])
