"""Shards and ranks for the tests of the data layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from engine.fakes import FakeJob, FakeWorld, run_ranks

from distmlp.comm.faults import merge_faults
from distmlp.config import DataConfig
from distmlp.data.inspection import to_layout
from distmlp.data.layout import Layout
from distmlp.data.probe import probe
from distmlp.data.shards import Shards
from distmlp.errors import DistmlpError

SOFTMAX = "softmax_cross_entropy"


class Rank(FakeWorld):
    """A rank that is a thread, with all that the data layer asks of a world."""

    host, local_rank = "here", 0

    @property
    def local_size(self) -> int:
        return self.size

    def broadcast(self, value: Any) -> Any:
        return self._exchange(value)[0]

    def agree(self, function: Callable[[], Any], what: str = "") -> Any:
        if self.size == 1:
            return function()
        value, fault = None, None
        try:
            value = function()
        except DistmlpError as error:
            fault = (error.exit_code, str(error))
        faults = self._exchange(fault)
        if any(faults):
            raise merge_faults(faults, ["here"] * self.size, what)
        return value


def alone() -> Rank:
    """A world of one."""
    return Rank(FakeJob(1), 0)


def at(rank: int, ranks: int) -> Rank:
    """One rank of several, for what needs no collective."""
    return Rank(FakeJob(ranks), rank)


def on_ranks(ranks: int, body: Callable[[Rank], Any]) -> list[Any]:
    """`body(world)` on that many ranks; the results by rank."""
    return run_ranks(ranks, lambda world: body(Rank(world.job, world.rank)))


def names(pattern: Any, **fields: Any) -> DataConfig:
    """A [data] section for shards that match `pattern`."""
    return DataConfig(train=str(pattern), **fields)


def open_shards(
    folder: Path, loss: str = "mse", layers: tuple[int, ...] = (), world: Any = None, **fields: Any
) -> Shards:
    """All `*.h5` of a folder."""
    return Shards.open(names(folder / "*.h5", **fields), world or alone(), loss=loss, layers=layers)


def write_shard(path: Path, inputs: Any, targets: Any, **options: Any) -> Path:
    """A shard made by h5py; `options` of the inputs' dataset."""
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=inputs, **options)
        file["targets"] = targets
    return path


def write_ids(folder: Path, sizes: tuple[int, ...], features: int = 3, **options: Any) -> np.ndarray:
    """Shards whose inputs tell the global row: row r is r, r + 0.25, r + 0.5, …. Returns all inputs."""
    total = sum(sizes)
    inputs = (np.arange(total)[:, None] + np.arange(features) * 0.25).astype("f4")
    start = 0
    for number, size in enumerate(sizes):
        rows = slice(start, start + size)
        write_shard(folder / f"part-{number:02}.h5", inputs[rows], inputs[rows, :1], **options)
        start += size
    return inputs


def layout_of(path: Path, name: str = "inputs") -> Layout:
    """The layout of one dataset, looked up in this process: for files that are known to be good."""
    answer, payload = probe(str(path), {"inputs": name})
    return to_layout(str(path), answer["datasets"]["inputs"], payload)
