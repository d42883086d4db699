"""Update rules against values that PyTorch gave (data/make_torch_trajectories.py) and against formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from engine.trajectories import CASES, RATE, RULES, SHAPE, START, STEPS, gradient, key

from distmlp.config import OptimizerConfig
from distmlp.engine.optimizers import Optimizer, norm, slot_names
from distmlp.network import Network

TORCH = json.loads((Path(__file__).parent / "data" / "torch-trajectories.json").read_text(encoding="utf-8"))["paths"]
NETWORK = Network.build(SHAPE, "relu", "identity")


def pack(values, dtype=np.float64):
    flat = np.zeros(NETWORK.size, dtype)
    weight, bias = NETWORK.views(flat)[0]
    weight[...], bias[...] = np.reshape(values[:4], (2, 2)), values[4:]
    return flat


def unpack(flat):
    weight, bias = NETWORK.views(flat)[0]
    return np.concatenate([weight.ravel(), bias])


def trajectory(config, dtype, ema_decay=0.0):
    """Six parameters after each step, and the average's."""
    optimizer = Optimizer(config, ema_decay, NETWORK, dtype)
    parameters = pack(START, dtype)
    slots = {name: np.zeros(NETWORK.size, dtype) for name in slot_names(config.name)}
    ema = parameters.copy() if ema_decay else None
    path, averages = [], []
    for step in range(STEPS):
        slope = pack(gradient(unpack(parameters).astype(np.float64), step), dtype)
        optimizer.update(parameters, slope, slots, ema, RATE, step + 1)
        path.append(unpack(parameters).copy())
        averages.append(None if ema is None else unpack(ema).copy())
    return np.array(path), averages


@pytest.mark.parametrize("case", CASES, ids=key)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_trajectory_is_pytorchs(case, dtype, tolerance):
    path, _ = trajectory(OptimizerConfig(**case), dtype)
    assert path.dtype == dtype
    np.testing.assert_allclose(path, TORCH[key(case)], rtol=tolerance, atol=tolerance)


def test_clipping_and_decay_do_change_the_stored_trajectories():
    """So that none of the cases above can pass by leaving something out."""
    for name in RULES:
        ends = {tuple(TORCH[key(case)][-1]) for case in CASES if case["name"] == name}
        assert len(ends) == 4, name


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.8])
def test_lamb_is_its_formula(decay, clip):
    """You et al. 2020, algorithm 2, with bias correction; weight and bias each with a trust ratio of its own."""
    config = OptimizerConfig(name="lamb", learning_rate=RATE, weight_decay=decay, clip_norm=clip)
    x, m, v = np.array(START), np.zeros(6), np.zeros(6)
    wanted = []
    for step in range(STEPS):
        g = gradient(x, step)
        if clip:
            g = g * min(1, clip / (np.linalg.norm(g) + 1e-6))
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        u = m_hat / (np.sqrt(v_hat) + 1e-8) + decay * x
        for tensor in (slice(0, 4), slice(4, 6)):
            ratio = np.linalg.norm(x[tensor]) / np.linalg.norm(u[tensor])
            x[tensor] -= RATE * ratio * u[tensor]
        wanted.append(x.copy())
    path, _ = trajectory(config, np.float64)
    np.testing.assert_allclose(path, wanted, rtol=1e-12, atol=1e-14)


def test_lamb_moves_a_tensor_that_is_zero():
    """The trust ratio is 1 where a norm is 0: biases start there."""
    config = OptimizerConfig(name="lamb")
    parameters, slots = np.zeros(NETWORK.size), {name: np.zeros(NETWORK.size) for name in slot_names("lamb")}
    Optimizer(config, 0.0, NETWORK, np.float64).update(parameters, pack(np.ones(6)), slots, None, 0.1, 1)
    np.testing.assert_allclose(unpack(parameters), -0.1, rtol=1e-7)


@pytest.mark.parametrize("name", [*RULES, "lamb"])
def test_average_of_the_weights(name):
    path, averages = trajectory(OptimizerConfig(name=name), np.float64, ema_decay=0.8)
    wanted = np.array(START)
    for parameters, average in zip(path, averages, strict=True):
        wanted = 0.8 * wanted + 0.2 * parameters
        np.testing.assert_allclose(average, wanted, rtol=1e-11)


@pytest.mark.parametrize("name", [*RULES, "lamb"])
def test_blocks_do_not_change_the_result(name, monkeypatch):
    config = OptimizerConfig(name=name, weight_decay=0.1, clip_norm=0.5)
    whole, _ = trajectory(config, np.float64, ema_decay=0.9)
    monkeypatch.setattr("distmlp.engine.optimizers.BLOCK", 5)
    pieces, _ = trajectory(config, np.float64, ema_decay=0.9)
    np.testing.assert_allclose(pieces, whole, rtol=1e-11)


def test_a_gradient_below_the_limit_is_not_scaled():
    slope = pack([0.1, 0.2, 0.3, 0.1, 0.0, 0.2])
    ends = []
    for clip in (0.0, 1.0):
        parameters = pack(START)
        Optimizer(OptimizerConfig(name="sgd", clip_norm=clip), 0.0, NETWORK, np.float64).update(
            parameters, slope.copy(), {}, None, 0.1, 1
        )
        ends.append(parameters)
    np.testing.assert_array_equal(*ends)


def test_norm_does_not_overflow_in_float32():
    assert norm(np.full(10**5, 1e18, np.float32)) == pytest.approx(math.sqrt(1e5) * 1e18, rel=1e-6)
