"""Raw rows through the network: sums of gradients, predictions, metrics. In blocks, so that memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmlp.config import ModelConfig
from distmlp.engine import Evaluation, Standardization
from distmlp.engine import tally as slot
from distmlp.engine.affine import Affine
from distmlp.engine.backprop import Backprop, Layers
from distmlp.engine.functions import row_losses
from distmlp.engine.tally import TALLY, Sums
from distmlp.network import Network

ROW_BLOCK = 1024  # rows that go through the network at once, fewer where a layer is wider than
BLOCK_ELEMENTS = 1 << 24  # elements of one layer's buffer


class RowPasses:
    """`rows`: how many rows at once to be ready for; grows up to the largest block where more come."""

    def __init__(
        self, model: ModelConfig, network: Network, standardization: Standardization, dtype: DTypeLike, rows: int
    ) -> None:
        self._model, self._network, self._dtype = model, network, np.dtype(dtype)
        self._inputs, self._targets = Affine(standardization.inputs, dtype), Affine(standardization.targets, dtype)
        self._most = max(1, min(ROW_BLOCK, BLOCK_ELEMENTS // max(network.widths)))
        self._rows = min(rows, self._most)
        self._backprop = Backprop(network, self._rows, dtype)
        self._block: Sums | None = None  # where a batch has more than one block

    def sums(self, layers: Layers, inputs: NDArray, targets: NDArray, weights: NDArray | None, out: Sums) -> None:
        """Write the weighted sums of gradient and loss over raw rows, and what they weigh, to `out`."""
        out.tally[:] = 0
        if not len(inputs):
            out.gradient[:] = 0
        for block in self._blocks(len(inputs)):
            part = out
            if block.start:
                if self._block is None:
                    self._block = Sums(self._network, np.zeros(self._network.size + TALLY, self._dtype))
                part = self._block
            own = None if weights is None else weights[block]
            self._block_sums(layers, inputs[block], targets[block], own, part)
            if block.start:
                out.buffer += part.buffer

    def _block_sums(
        self, layers: Layers, inputs: NDArray, targets: NDArray, weights: NDArray | None, out: Sums
    ) -> None:
        rows = len(inputs)
        output = self._forward(layers, inputs)
        gradient = self._backprop.output_gradient(rows)
        losses = self._losses(output, targets, gradient)
        if weights is not None:
            own = weights.astype(self._dtype)
            losses *= own
            gradient *= own[:, None]
        self._backprop.backward(layers, out.layers, rows)
        out.tally[slot.LOSS] = losses.sum(dtype=np.float64)
        out.tally[slot.WEIGHT] = rows if weights is None else weights.sum(dtype=np.float64)
        out.tally[slot.ROWS] = rows

    def _blocks(self, rows: int) -> Iterator[slice]:
        for start in range(0, rows, self._most):
            yield slice(start, min(start + self._most, rows))

    def _forward(self, layers: Layers, inputs: NDArray) -> NDArray:
        """Output (rows, outputs), a view that the next call overwrites."""
        rows = len(inputs)
        if rows > self._rows:
            self._rows, self._backprop = rows, Backprop(self._network, rows, self._dtype)
        self._inputs.apply(inputs, self._backprop.inputs(rows))
        return self._backprop.forward(layers, rows)

    def _losses(self, output: NDArray, targets: NDArray, gradient: NDArray | None) -> NDArray:
        if targets.ndim == 1:
            standardized = targets.astype(np.intp, copy=False)  # class labels
        else:
            standardized = self._targets.apply(targets, np.empty(targets.shape, self._dtype))
        return row_losses(self._model.loss, output, standardized, gradient, self._model.huber_delta)

    def predict(self, layers: Layers, inputs: NDArray) -> NDArray:
        """Output layer (rows, outputs), float32, in raw target units."""
        predictions = np.empty((len(inputs), self._network.outputs), np.float32)
        for block in self._blocks(len(inputs)):
            predictions[block] = self._targets.invert(self._forward(layers, inputs[block]))
        return predictions

    def evaluate(self, layers: Layers, inputs: NDArray, targets: NDArray, weights: NDArray | None) -> Evaluation:
        """Sums of loss (of standardized targets) and metrics (in raw units) over raw rows."""
        classes = "cross_entropy" in self._model.loss
        width = 1 if classes else self._network.outputs
        total = Evaluation(squared=np.zeros(width), target=np.zeros(width), target_squared=np.zeros(width))
        for block in self._blocks(len(inputs)):
            wanted = targets[block]
            own = np.ones(len(wanted)) if weights is None else weights[block].astype(np.float64)
            output = self._forward(layers, inputs[block])
            total.rows += len(wanted)
            total.weight += float(own.sum())
            total.loss += float(own @ self._losses(output, wanted, None))
            if classes:
                total.correct += float(own @ _hits(self._model.loss, output, wanted))
            else:
                truth = wanted.astype(np.float64)
                error = self._targets.invert(output) - truth
                total.absolute += float(own @ np.abs(error).sum(axis=1))
                total.squared += own @ (error * error)
                total.target += own @ truth
                total.target_squared += own @ (truth * truth)
        return total


def _hits(loss: str, output: NDArray, targets: NDArray) -> NDArray:
    """1 where the class is right (rows,), float64; with several binary outputs the fraction that is."""
    if loss == "binary_cross_entropy":
        return ((output > 0) == (targets > 0.5)).mean(axis=1)
    labels = targets if targets.ndim == 1 else targets.argmax(axis=1)
    return (output.argmax(axis=1) == labels).astype(np.float64)
