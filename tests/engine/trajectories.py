"""The update rules that are compared with PyTorch's, and the gradients that drive them."""

from __future__ import annotations

from itertools import product

import numpy as np

STEPS, RATE = 20, 0.05
SHAPE = (2, 2)  # a network of one layer: weight (2, 2), bias (2,)
START = [0.5, -1.2, 2.0, 0.03, -0.4, 1.1]  # weight by rows, then bias

RULES = ["sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw"]
CASES = [
    {"name": name, "learning_rate": RATE, "weight_decay": decay, "clip_norm": clip}
    for name, decay, clip in product(RULES, [0.0, 0.1], [0.0, 0.8])
]


def key(case: dict) -> str:
    return f"{case['name']} weight_decay={case['weight_decay']} clip_norm={case['clip_norm']}"


def gradient(values: np.ndarray, step: int) -> np.ndarray:
    """Of the six parameters at `step` (from 0): a bowl with a push that changes from step to step."""
    return np.array([3.0, 0.5, 1.0, 8.0, 0.1, 2.0]) * values + np.sin(step + 1.7 * np.arange(6))
