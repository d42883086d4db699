"""Checkpoints for tests: made up, and damaged or forged on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from distmlp.checkpoint import Checkpoint, network_of, save
from distmlp.checkpoint.seal import SEAL_BYTES, Seal, Sealing
from distmlp.config import RunConfig
from distmlp.engine import Standardization, State
from distmlp.engine.optimizers import slot_names


def configuration(
    widths: tuple[int, ...] = (5, 7, 3), optimizer: str = "adam", ema_decay: float = 0.0, **run: Any
) -> RunConfig:
    return RunConfig.parse(
        {
            "model": {"layers": list(widths)},
            "data": {"train": "shards/*.h5"},
            "optimizer": {"name": optimizer},
            "run": {"ema_decay": ema_decay, **run},
        }
    )


def sample(config: RunConfig | None = None, seed: int = 0, **fields: Any) -> Checkpoint:
    """A checkpoint with random tensors; `fields` replace those of the defaults."""
    config = config or configuration()
    network = network_of(config)
    random = np.random.default_rng(seed)

    def flat() -> np.ndarray:
        buffer = np.zeros(network.size, np.float32)  # the gaps between tensors are zero, as in a run
        for weight, bias in network.views(buffer):
            weight[...] = random.normal(size=weight.shape)
            bias[...] = random.normal(size=bias.shape)
        return buffer

    slots = {name: flat() for name in slot_names(config.optimizer.name)}
    state = State(flat(), slots, flat() if config.run.ema_decay else None, step=17)
    inputs = (random.normal(size=network.inputs), random.uniform(1, 2, size=network.inputs))
    defaults = {"epoch": 1, "step": 18, "step_in_epoch": 4, "skipped": 1, "rows": 100, "versions": {"distmlp": "0"}}
    return Checkpoint(config, state, Standardization(inputs=inputs), **(defaults | fields))


def write(path: Path, checkpoint: Checkpoint | None = None) -> Path:
    checkpoint = checkpoint or sample()
    save(path, checkpoint, checkpoint.network)
    return path


def reseal(path: Path) -> None:
    """Give a changed checkpoint a valid seal, as someone would who means harm."""
    content = path.read_bytes()[SEAL_BYTES:]
    sealing = Sealing(Seal(18, None, SEAL_BYTES + len(content)), [content])
    path.write_bytes(b"".join(sealing)[SEAL_BYTES:])
    path.write_bytes(sealing.block() + content)


def assert_equal(one: Checkpoint, two: Checkpoint) -> None:
    """Every tensor and figure the same, bit for bit."""
    for name in ("parameters", "ema"):
        np.testing.assert_array_equal(getattr(one.state, name), getattr(two.state, name))
    assert one.state.slots.keys() == two.state.slots.keys()
    for slot in one.state.slots:
        np.testing.assert_array_equal(one.state.slots[slot], two.state.slots[slot])
    for side in ("inputs", "targets"):
        ones, twos = getattr(one.standardization, side), getattr(two.standardization, side)
        assert (ones is None) == (twos is None)
        for a, b in zip(ones or (), twos or (), strict=True):
            np.testing.assert_array_equal(a, b)
    figures = [
        {k: v for k, v in vars(c).items() if k not in ("state", "standardization")} | {"updates": c.state.step}
        for c in (one, two)
    ]
    assert figures[0] == figures[1]
