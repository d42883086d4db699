"""Stand-ins for World and Feed: ranks are threads, rows lie in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distmlp.config import RunConfig
from distmlp.engine import Standardization, State
from distmlp.engine.reference import ReferenceEngine
from distmlp.errors import AgreedError, DistmlpError
from distmlp.network import Network
from distmlp.order import Order, owned_streams


class FakeJob:
    """What `size` ranks share."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.deposits = size, threading.Barrier(size, timeout=30), [None] * size


@dataclass
class FakeWorld:
    """One rank. `calls` counts collectives; the sum is taken in the order of the ranks."""

    job: FakeJob = field(default_factory=lambda: FakeJob(1))
    rank: int = 0
    calls: list[str] = field(default_factory=list)
    hosts: tuple[str, ...] = ("host",)
    mpi_version: str = ""
    device_probe: Any = None

    @property
    def size(self) -> int:
        return self.job.size

    def _exchange(self, value: Any) -> list[Any]:
        self.job.deposits[self.rank] = value
        self.job.barrier.wait()
        everyone = list(self.job.deposits)
        self.job.barrier.wait()
        return everyone

    def all_reduce(self, buffer: np.ndarray) -> None:
        self.calls.append("all_reduce")
        buffers = self._exchange(buffer.copy())
        total = buffers[0]
        for other in buffers[1:]:
            total = total + other
        buffer[...] = total

    def all_gather(self, value: Any) -> list[Any]:
        self.calls.append("all_gather")
        return self._exchange(value)

    def agree(self, function: Callable[[], Any], what: str = "") -> Any:
        self.calls.append("agree")
        result, fault = None, None
        try:
            result = function()
        except DistmlpError as error:
            fault = error
        faults = [f for f in self._exchange(fault) if f is not None]
        if faults:
            raise AgreedError("; ".join(str(f) for f in faults), faults[0].exit_code)
        return result


def run_ranks(size: int, body: Callable[[FakeWorld], Any]) -> list[Any]:
    """Run `body(world)` on `size` threads; results by rank. An exception on any rank is raised here."""
    job = FakeJob(size)
    results: list[Any] = [None] * size
    faults: list[BaseException] = []

    def rank_body(rank: int) -> None:
        try:
            results[rank] = body(FakeWorld(job, rank))
        except BaseException as error:
            faults.append(error)
            job.barrier.abort()

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise next((f for f in faults if not isinstance(f, threading.BrokenBarrierError)), faults[0])
    return results


@dataclass
class FakeRows:
    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None


@dataclass
class FakeFeed:
    """Rows in memory, served in the real order. `broken`: batches (epoch, number) that raise `fault`."""

    rows: FakeRows
    order: Order
    size: int = 1
    rank: int = 0
    broken: tuple[tuple[int, int], ...] = ()
    fault: Exception | None = None
    wait_seconds: float = 0.0

    @property
    def streams(self) -> range:
        return owned_streams(self.order.streams, self.size, self.rank)

    def batch(self, epoch: int, number: int) -> FakeRows:
        if (epoch, number) in self.broken and self.fault:
            raise self.fault
        chosen = self.order.batch_rows(epoch, number, self.streams)
        weights = None if self.rows.weights is None else self.rows.weights[chosen]
        return FakeRows(self.rows.inputs[chosen], self.rows.targets[chosen], weights)


def make_config(layers: list[int], model: dict | None = None, **sections: dict) -> RunConfig:
    return RunConfig.parse(
        {"model": {"layers": layers, **(model or {})}, "data": {"train": "unused.h5"}, **sections}
        if "data" not in sections
        else {"model": {"layers": layers, **(model or {})}, **sections}
    )


def make_network(config: RunConfig) -> Network:
    return Network.build(config.model.layers, config.model.activation, config.model.output_activation)


def make_engine(
    config: RunConfig,
    rows: FakeRows,
    world: FakeWorld | None = None,
    standardization: Standardization | None = None,
    dtype: Any = np.float64,
    **options: Any,
) -> ReferenceEngine:
    """A loaded engine with initial parameters; `broken` and `fault` go to its feed."""
    world = world or FakeWorld()
    network = make_network(config)
    data = config.data
    order = Order(len(rows.inputs), data.streams, data.batch, config.run.seed, data.shuffle)
    feed = FakeFeed(rows, order, world.size, world.rank, options.pop("broken", ()), options.pop("fault", None))
    engine = ReferenceEngine(config, network, world, feed, standardization or Standardization(), dtype=dtype, **options)
    engine.load(State(network.initial(config.run.seed, config.model.init, dtype)))
    return engine
