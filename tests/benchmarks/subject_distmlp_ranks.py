"""distmlp on several GPUs, to be started by mpirun with one process a GPU; see ranks.py.

As subject_distmlp.py, the batch a GPU unchanged: the global batch is the preset's times the ranks. `--transport` names
what sums the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import perf_counter

from subjects import BLOCK_SECONDS, BLOCKS, Measurement, Problem, run_subject

from distmlp.comm.policy import guarded
from distmlp.comm.world import World, open_world
from distmlp.config import RunConfig
from distmlp.data.arrays import MemoryFeed
from distmlp.data.shards import Rows
from distmlp.engine import Engine, Standardization, State
from distmlp.engine.select import open_engine
from distmlp.order import Order, owned_streams
from distmlp.tools.bench import rates

TRANSPORT = os.environ.get("BENCHMARK_TRANSPORT", "auto")


class OwnFeed(MemoryFeed):
    """One rank's stream of rows in memory."""

    def __init__(self, rows: Rows, order: Order, world: World) -> None:
        super().__init__(rows, order)
        self.streams = owned_streams(order.streams, world.size, world.rank)

    def resident(self) -> Rows:
        owned = self.order.owned_rows(self.streams)
        return self._rows.map(lambda array: array[owned.start : owned.stop])


def open_ranks(problem: Problem, world: World) -> tuple[Engine, str]:
    """The engine that training would take, with its initial weights, and how its ranks are joined."""
    preset = problem.preset
    config = RunConfig.parse(
        {
            "model": {"layers": list(preset.layers)},
            "data": {"train": "none.h5", "batch": preset.batch, "standardize": "none", "streams": world.size},
            "run": {"precision": problem.precision, "transport": TRANSPORT},
        }
    )
    order = Order(len(problem.rows.inputs), world.size, preset.batch, 0, False)
    feed = OwnFeed(problem.rows, order, world)
    engine, reason = open_engine(config, problem.network, world, feed, Standardization())  # type: ignore[arg-type]
    engine.load(State(problem.network.initial(0, "he_normal")))
    return engine, reason.splitlines()[-1]


def measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    world = open_world()
    engine, joined = open_ranks(problem, world)

    def epochs(count: int) -> float:
        world.barrier()
        started = perf_counter()
        for _ in range(count):
            engine.train(0, 0, rates(problem.batches))
        return max(world.all_gather((perf_counter() - started) / count))

    try:
        if warm:
            return
        losses = engine.train(0, 0, rates(problem.learn_steps)).losses.tolist()
        epochs(1)
        count = max(1, round(BLOCK_SECONDS / epochs(1)))
        times = [epochs(count) / problem.batches * 1e6 for _ in range(BLOCKS)]
        before = engine.transfers()["kernel_launches"]
        report = engine.train(0, 0, rates(problem.batches))
        extra = {
            "launches_per_step": round((engine.transfers()["kernel_launches"] - before) / problem.batches, 4),
            "transport": engine.transport,  # type: ignore[attr-defined]
            "path": engine.plan.regime,  # type: ignore[attr-defined]
            "kernel": engine.plan.kernel,  # type: ignore[attr-defined]
            "all_reduce_us": round(report.communication_seconds / problem.batches * 1e6, 2),
            "joined": joined,
            "same_bits": len(set(world.all_gather(problem.network.fingerprint(engine.state().parameters)))) == 1,
        }
        if world.rank == 0:
            yield Measurement(f"distmlp-{engine.transport}", times, losses, extra)  # type: ignore[attr-defined]
    finally:
        engine.close()


def main() -> int:
    open_world(try_devices=True)
    run_subject(measure)
    return 0


if __name__ == "__main__":
    guarded(main)
