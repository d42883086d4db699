"""Whether shards can be read as fast as a network trains: `distmlp data check --for RUN.toml`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from distmlp.checkpoint.contents import network_of
from distmlp.comm.world import World
from distmlp.config import RunConfig
from distmlp.data.arrays import MemoryFeed
from distmlp.data.feed import Feed
from distmlp.data.shards import Shards
from distmlp.data.streaming import Window
from distmlp.engine import Standardization, State
from distmlp.engine.select import open_engine
from distmlp.order import Order

READ_SECONDS, STEP_SECONDS = 2.0, 0.5
STEPS = 4  # timed at once
SPARE = 0.8  # of the reading rate that a network may need: above it any hiccup of the disk is felt


@dataclass(frozen=True)
class Forecast:
    """What a step needs and what the files give, on this machine now."""

    engine: str
    batch: int
    row_bytes: int
    rows: int
    step_seconds: float
    rows_per_second: float  # read in training order
    readers: int

    @property
    def needed(self) -> float:
        """Rows a second that keep the network busy."""
        return self.batch / self.step_seconds

    @property
    def waiting(self) -> float:
        """Share of time that training would wait for rows."""
        return max(0.0, 1.0 - self.rows_per_second / self.needed)

    def __str__(self) -> str:
        megabyte = self.row_bytes / 1e6
        facts = (
            f"a step of {self.batch:,} rows takes {1e3 * self.step_seconds:.3g} ms on the {self.engine} engine here "
            f"and {self.batch * megabyte:.3g} MB: {self.needed * megabyte:,.0f} MB/s; read in training order by "
            f"{self.readers} threads these files give {self.rows_per_second * megabyte:,.0f} MB/s"
        )
        if self.needed <= SPARE * self.rows_per_second:
            return f"{facts}: they keep the network busy"
        verdict = f"training would wait {self.waiting:.0%} of its time" if self.waiting else "that is just enough"
        return (
            f"{facts}: streamed, {verdict}; not so once the {self.rows * self.row_bytes:,} bytes of all rows fit the "
            "memory of device or host; more reader threads (data.readers) or a faster layout (distmlp data convert) "
            "help"
        )


def forecast(run: Path, patterns: Sequence[str], overrides: Sequence[str] = ()) -> Forecast:
    """Time some steps of the configuration `run` and some reading of `patterns`, one rank's worth of each."""
    world = World()
    config = RunConfig.load(run, list(overrides))
    names = SimpleNamespace(
        train=tuple(patterns), inputs=config.data.inputs, targets=config.data.targets,
        sample_weights=config.data.sample_weights,
    )  # fmt: skip
    shards = Shards.open(names, world, loss=config.model.loss, layers=config.model.layers)
    config = config.with_layers(shards.features, shards.outputs)
    order = Order(shards.rows, config.data.streams, config.data.batch, config.run.seed, config.data.shuffle)
    feed = Feed(shards, order, world, "stream", config.data.readers, config.data.scratch)
    try:
        rate = _reading(feed)
    finally:
        feed.close()
    engine, seconds = _step(config, shards, world)
    batch = min(config.data.batch, shards.rows)
    return Forecast(engine, batch, shards.row_bytes, shards.rows, seconds, rate, feed.threads)


def _reading(feed: Feed) -> float:
    """Rows a second, in training order, as they lie in memory: what a GPU is fed with."""
    count, started = 0, time.perf_counter()
    if feed.fits_memory(2 * feed.room_rows() * feed.shards.row_bytes):
        rooms = [Window(feed.shards.empty(feed.room_rows())) for _ in range(2)]
        windows, number = feed.windows(rooms, lambda window, first, stop: None, places=False), 0
        started = time.perf_counter()
        while time.perf_counter() - started < READ_SECONDS:
            windows.get(number)
            count += sum(map(len, windows.filled(number)))
            number += 1
        windows.close()
    else:
        while time.perf_counter() - started < READ_SECONDS:
            count += len(feed.batch(0, count // feed.order.batch))
    return count / (time.perf_counter() - started)


def _step(config: RunConfig, shards: Shards, world: World) -> tuple[str, float]:
    """Name of the engine and seconds of a step on rows in memory, the best of a few."""
    batch = min(config.data.batch, shards.rows)
    rows = shards.read(0, min(shards.rows, STEPS * batch))
    order = Order(len(rows), min(config.data.streams, len(rows)), batch, 0, False)
    network = network_of(config)
    memory: Any = MemoryFeed(rows, order)
    engine, _ = open_engine(config, network, world, memory, Standardization())
    try:
        engine.load(State(network.initial(config.run.seed, config.model.init)))
        steps = max(1, len(rows) // batch)
        best, began = float("inf"), time.perf_counter()
        while time.perf_counter() - began < STEP_SECONDS or best == float("inf"):
            started = time.perf_counter()
            engine.train(0, 0, np.full(steps, 1e-6))
            best = min(best, (time.perf_counter() - started) / steps)
        return engine.name, best
    finally:
        engine.close()
