"""The engine's gradient against central differences of its loss, in float64, for every activation and loss."""

from __future__ import annotations

import numpy as np
import pytest
from engine.fakes import FakeRows, make_config, make_network

from distmlp.engine import Standardization
from distmlp.engine import tally as slot
from distmlp.engine.functions import ACTIVATIONS
from distmlp.engine.rows import RowPasses
from distmlp.engine.tally import TALLY, Sums

LOSSES = ["mse", "mae", "huber", "binary_cross_entropy", "softmax_cross_entropy"]
STEP = 1e-5
CLEARANCE = 2e-4  # no unit may be so near a kink that a difference could step over it


class Problem:
    """A network, random rows and parameters, none of them near a kink."""

    def __init__(self, config, rows, outputs, labels=False, weights=True):
        self.network = make_network(config)
        self.config = config
        rng = np.random.default_rng()
        self.passes = RowPasses(config.model, self.network, Standardization(), np.float64, rows)
        for _ in range(200):
            self.flat = np.zeros(self.network.size)
            for weight, bias in self.network.views(self.flat):
                weight[...] = rng.normal(size=weight.shape) / np.sqrt(weight.shape[0])
                bias[...] = rng.normal(size=bias.shape) / 2
            inputs = rng.normal(size=(rows, config.model.layers[0]))
            targets = rng.integers(0, outputs, rows) if labels else rng.uniform(0, 1, (rows, outputs))
            self.rows = FakeRows(inputs, targets, rng.uniform(0.1, 3, rows) if weights else None)
            if self._clearance() > CLEARANCE:
                return
        raise AssertionError("200 draws, all near a kink")

    def _clearance(self):
        below, nearest = self.rows.inputs, np.inf
        for layer, (weight, bias) in zip(self.network.layers, self.network.views(self.flat), strict=True):
            below = below @ weight + bias
            if layer.activation in ("relu", "leaky_relu", "elu"):
                nearest = min(nearest, np.abs(below).min())
            out = np.empty_like(below)
            ACTIVATIONS[layer.activation].apply(below, out)
            below = out
        if self.config.model.loss in ("mae", "huber"):
            error = np.abs(below - self.rows.targets)
            nearest = min(nearest, error.min(), np.abs(error - self.config.model.huber_delta).min())
        return nearest

    def sums(self, flat):
        out = Sums(self.network, np.full(self.network.size + TALLY, np.nan))
        out.gradient[...] = 0  # the gaps of the layout stay as they are
        for weight, bias in out.layers:
            weight[...] = bias[...] = np.nan  # every element must be written
        self.passes.sums(self.network.views(flat), self.rows.inputs, self.rows.targets, self.rows.weights, out)
        return out

    def check(self):
        gradient = self.sums(self.flat).gradient.copy()
        places = np.concatenate([np.r_[layer.weight, layer.bias] for layer in self.network.layers])
        differences = np.zeros_like(gradient)
        for k in places:
            up, down = self.flat.copy(), self.flat.copy()
            up[k] += STEP
            down[k] -= STEP
            differences[k] = (self.sums(up).tally[slot.LOSS] - self.sums(down).tally[slot.LOSS]) / (2 * STEP)
        scale = max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_with_sample_weights(activation, loss):
    model = {"activation": activation, "loss": loss, "huber_delta": 0.4}
    Problem(make_config([3, 5, 4, 2], model), rows=5, outputs=2, labels=loss == "softmax_cross_entropy").check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_through_an_output_activation(activation):
    model = {"activation": "tanh", "output_activation": activation, "loss": "mse"}
    Problem(make_config([2, 3, 2], model), rows=3, outputs=2).check()


@pytest.mark.parametrize("layers", [[1, 1], [17, 3], [1, 17, 1], [3, 1, 17, 3], [17, 1, 1, 3]])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("weights", [False, True])
def test_gradient_at_odd_widths(layers, rows, weights):
    Problem(make_config(layers, {"activation": "relu"}), rows, layers[-1], weights=weights).check()


def test_gradient_with_a_list_of_activations():
    model = {"activation": ["gelu", "sine", "softplus"], "loss": "softmax_cross_entropy"}
    Problem(make_config([3, 5, 4, 6, 3], model), rows=4, outputs=3).check()


def test_tally_counts_rows_and_weights():
    problem = Problem(make_config([3, 2]), rows=6, outputs=2)
    tally = problem.sums(problem.flat).tally
    assert tally[slot.ROWS] == 6
    assert tally[slot.WEIGHT] == pytest.approx(problem.rows.weights.sum())
    assert list(tally[slot.STOP :]) == [0] * (TALLY - slot.STOP)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_of_rows_add_up(dtype, monkeypatch):
    """A batch that goes through in blocks gives the sums of one that goes through at once."""
    rng = np.random.default_rng()
    config = make_config([5, 9, 3], {"loss": "softmax_cross_entropy"})
    network = make_network(config)
    rows = FakeRows(rng.normal(size=(23, 5)), rng.integers(0, 3, 23), rng.uniform(1, 2, 23))
    layers = network.views(network.initial(1, "he_normal", dtype))
    results = []
    for block in (1000, 10, 1):
        monkeypatch.setattr("distmlp.engine.rows.ROW_BLOCK", block)
        out = Sums(network, np.zeros(network.size + TALLY, dtype))
        passes = RowPasses(config.model, network, Standardization(), dtype, 23)
        passes.sums(layers, rows.inputs, rows.targets, rows.weights, out)
        results.append(out.buffer)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=0, atol=50 * np.finfo(dtype).eps * np.abs(results[0]).max())
