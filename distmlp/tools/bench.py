"""`distmlp bench`: time per training step of the network presets, beside the limit of the hardware.

The steps are those of training: the same engine, rows resident where it keeps them, batches chosen by the sample
order. What one call of the training loop costs the host is part of the time.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.world import open_world
from distmlp.config import RunConfig
from distmlp.data.arrays import MemoryFeed
from distmlp.data.memory import available_bytes
from distmlp.data.shards import Rows
from distmlp.engine import Engine, Standardization, State
from distmlp.engine.device import find_obstacle
from distmlp.engine.select import open_engine
from distmlp.errors import ConfigError, SystemUnfitError
from distmlp.network import Network
from distmlp.order import Order

# Measured on one H200: a large bf16 product, and a large device-to-device copy counting bytes read and written.
H200_FLOPS = 790e12
H200_BYTES = 4.3e12
DATA_BYTES = 512 << 20  # of rows: well beyond any cache where a batch is large enough
POOL = 1 << 22  # random numbers drawn; more rows than that repeat them
BLOCK_SECONDS = 0.1
CPU_PARAMETERS = 1 << 20  # presets with more take too long without a GPU
CPU_BATCH = 4096
CPU_BATCHES = 8


@dataclass(frozen=True)
class Preset:
    """A network and its batch per rank: ReLU, mean squared error, Adam."""

    name: str
    layers: tuple[int, ...]
    batch: int

    @property
    def parameters(self) -> int:
        return sum(i * o + o for i, o in pairwise(self.layers))

    @property
    def limit_us(self) -> float:
        """No step on an H200 is faster: the products' operations, or the bytes that must move.

        A product each for forward, backward (not into the data) and the weight gradient; 24 bytes a parameter for
        Adam (read and write three floats), and the batch.
        """
        pairs = [i * o for i, o in pairwise(self.layers)]
        operations = 2 * self.batch * (3 * sum(pairs) - pairs[0])
        moved = 24 * self.parameters + 4 * self.batch * (self.layers[0] + self.layers[-1])
        return max(operations / H200_FLOPS, moved / H200_BYTES) * 1e6

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return self.batches_in(DATA_BYTES)

    def batches_in(self, size_bytes: int) -> int:
        """Batches of an epoch whose rows take about so many bytes."""
        return int(np.clip(size_bytes // (4 * self.batch * (self.layers[0] + self.layers[-1])), 2, 1000))

    @property
    def fits_cpu(self) -> bool:
        return self.parameters <= CPU_PARAMETERS and self.batch <= CPU_BATCH


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("seed-32", (100, 1000, 1000, 1000, 2), 32),
        Preset("seed-1024", (100, 1000, 1000, 1000, 2), 1024),
        Preset("mnist-128", (784, 512, 512, 10), 128),
        Preset("mnist-1024", (784, 512, 512, 10), 1024),
        Preset("narrow64-1k", (32, 64, 64, 64, 64, 16), 1024),
        Preset("narrow64-64k", (32, 64, 64, 64, 64, 16), 65536),
        Preset("narrow128-64k", (32, 128, 128, 128, 128, 16), 65536),
        Preset("mid256-4k", (256,) * 6, 4096),
        Preset("mid512-16k", (512,) * 6, 16384),
        Preset("mid1024-8k", (1024,) * 6, 8192),
        Preset("wide4096-8k", (4096,) * 5, 8192),
    )
}


def find_preset(name: str) -> Preset:
    """A preset by its name, or a network of one's own as WIDTHS@BATCH: 784-512x2-10@1024. Raises ConfigError."""
    if name in PRESETS:
        return PRESETS[name]
    part = r"[1-9]\d{0,6}(?:[x×][1-9]\d?)?"
    if not re.fullmatch(rf"{part}(?:-{part})*@[1-9]\d{{0,8}}", name) or (preset := _parse(name)) is None:
        raise ConfigError(
            f"bench: unknown preset {name}; known: {', '.join(PRESETS)}; or a network of your own as WIDTHS@BATCH, "
            "such as 784-512x2-10@1024"
        )
    return preset


def _parse(name: str) -> Preset | None:
    widths, batch = name.split("@")
    layers: tuple[int, ...] = ()
    for part in widths.replace("×", "x").split("-"):
        width, _, times = part.partition("x")
        layers += (int(width),) * int(times or 1)
    return Preset(name, layers, int(batch)) if len(layers) > 1 else None


def run_bench(preset: str | None, as_json: bool) -> int:
    """Time one preset (or network, see `find_preset`) or all presets that fit this machine; print a table or JSON.

    Raises ConfigError for an unknown preset.
    """
    obstacle = find_obstacle()
    chosen = [p for p in PRESETS.values() if not obstacle or p.fits_cpu] if preset is None else [find_preset(preset)]
    if not as_json:
        if obstacle:
            print(f"No GPU to be used ({obstacle}): the reference engine is timed, on small presets.")
        print(f"{'preset':14} {'layers':28} {'batch':>6} {'µs a step':>10} {'min':>9} {'max':>9} {'H200 limit':>11}")
    rows = []
    for entry in chosen:
        row = time_preset(entry, "fp32", CPU_BATCHES) if obstacle else time_preset(entry, "bf16", entry.batches)
        rows.append(row)
        if not as_json:
            widths = shorten(entry.layers)
            times = f"{row['us_median']:10.1f} {row['us_min']:9.1f} {row['us_max']:9.1f}"
            print(f"{entry.name:14} {widths:28} {entry.batch:6d} {times} {entry.limit_us:11.1f}", flush=True)
    if as_json:
        print(json.dumps({"engine": "reference" if obstacle else "fused", "rows": rows}))
    return 0


def time_preset(preset: Preset, precision: str, batches: int, blocks: int = 5) -> dict[str, Any]:
    """A row as `tests/benchmarks/results` has them, for distmlp on this machine; epochs of `batches` batches."""
    engine = open_preset(preset, precision, make_rows(preset, batches))
    try:
        times = time_steps(engine, batches, blocks)
        before = engine.transfers()
        engine.train(0, 0, rates(batches))
        launches = (engine.transfers()["kernel_launches"] - before["kernel_launches"]) / batches
        plan = getattr(engine, "plan", None)
        return {
            "preset": preset.name,
            "layers": list(preset.layers),
            "batch": preset.batch,
            "precision": engine.precision,
            "optimizer": "adam",
            "ranks": 1,
            "subject": "distmlp",
            **summary(times),
            "launches_per_step": round(launches, 4),
            "transport": "none",
            "path": "reference" if plan is None else plan.regime,
        }
    finally:
        engine.close()


def summary(times: list[float]) -> dict[str, float | int]:
    """Median and spread of the blocks' µs per step."""
    return {
        "us_median": round(statistics.median(times), 3),
        "us_min": round(min(times), 3),
        "us_max": round(max(times), 3),
        "blocks": len(times),
    }


def open_preset(preset: Preset, precision: str, rows: Rows, shuffle: bool = True) -> Engine:
    """The engine that training would take, loaded with the initial weights."""
    config = RunConfig.parse(
        {
            "model": {"layers": list(preset.layers)},
            "data": {"train": "none.h5", "batch": preset.batch, "standardize": "none", "streams": 1},
            "run": {"precision": precision},
        }
    )
    network = Network.build(preset.layers, "relu", "identity")
    feed = MemoryFeed(rows, Order(len(rows.inputs), 1, preset.batch, 0, shuffle))
    engine, _ = open_engine(config, network, open_world(), feed, Standardization())  # type: ignore[arg-type]
    engine.load(State(network.initial(0, "he_normal")))
    return engine


def make_rows(preset: Preset, batches: int, seed: int = 0) -> Rows:
    """Rows of `batches` batches: normal inputs, targets that are functions of them. Raises SystemUnfitError."""
    count, features, outputs = batches * preset.batch, preset.layers[0], preset.layers[-1]
    needed, free = 8 * count * (features + outputs), available_bytes()  # once more while they are put together
    if needed > free:
        raise SystemUnfitError(f"bench {preset.name}: its rows need {needed:,} bytes, and {free:,} are free")
    random = np.random.default_rng(seed)
    drawn = min(count, max(preset.batch, POOL // features))
    inputs = random.standard_normal((drawn, features), np.float32)
    picks = np.arange(outputs) % features
    targets = np.sin(inputs[:, picks] + inputs[:, (picks * 7 + 3) % features])
    whole = -(-count // drawn)
    return Rows(np.tile(inputs, (whole, 1))[:count], np.tile(targets, (whole, 1))[:count], None)


def time_steps(engine: Engine, batches: int, blocks: int) -> list[float]:
    """µs a step in each of `blocks` blocks of whole epochs, after a warm-up of two."""
    epoch = 0
    for _ in range(2):
        started = perf_counter()
        engine.train(epoch, 0, rates(batches))
        seconds = perf_counter() - started
        epoch += 1
    epochs = max(1, round(BLOCK_SECONDS / seconds))
    times = []
    for _ in range(blocks):
        started = perf_counter()
        for _ in range(epochs):
            engine.train(epoch, 0, rates(batches))
            epoch += 1
        times.append((perf_counter() - started) / (epochs * batches) * 1e6)
    return times


def rates(count: int) -> NDArray:
    """The learning rate of `count` steps."""
    return np.full(count, 1e-3)


def shorten(layers: tuple[int, ...]) -> str:
    """32-64×4-16 for 32-64-64-64-64-16."""
    parts: list[tuple[int, int]] = []
    for width in layers:
        if parts and parts[-1][0] == width:
            parts[-1] = (width, parts[-1][1] + 1)
        else:
            parts.append((width, 1))
    return "-".join(f"{width}×{times}" if times > 1 else str(width) for width, times in parts)
