"""distmlp on several GPUs, to be started by mpirun with one process a GPU; see ranks.py.

As subject_distmlp.py, the batch a GPU unchanged: the global batch is the preset's times the ranks. The transport is
that of BENCHMARK_TRANSPORT; with BENCHMARK_SHARE_GPU=1 ranks may share a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from time import perf_counter

from subjects import BLOCKS, Measurement, Problem, arguments, run_subject

from distmlp.comm.policy import guarded
from distmlp.comm.world import World, open_world
from distmlp.config import RunConfig
from distmlp.data.arrays import MemoryFeed, take
from distmlp.data.shards import Rows
from distmlp.engine import Engine, Standardization, State
from distmlp.engine.select import open_engine
from distmlp.order import Order, owned_streams
from distmlp.tools.bench import rates


class OwnFeed(MemoryFeed):
    """One rank's stream of rows in memory."""

    def __init__(self, rows: Rows, order: Order, world: World) -> None:
        super().__init__(rows, order)
        self.streams = owned_streams(order.streams, world.size, world.rank)

    def batch(self, epoch: int, number: int) -> Rows:
        return take(self._rows, self.order.batch_rows(epoch, number, self.streams))

    def resident(self) -> Rows:
        owned = self.order.owned_rows(self.streams)
        return self._rows.map(lambda array: array[owned.start : owned.stop])


def configure(problem: Problem, ranks: int, transport: str) -> RunConfig:
    return RunConfig.parse(
        {
            "model": {"layers": list(problem.preset.layers)},
            "data": {"train": "none.h5", "batch": problem.preset.batch, "standardize": "none", "streams": ranks},
            "run": {
                "precision": problem.precision, "transport": transport, "stall_timeout": "10 seconds",
                "share_gpu": os.environ.get("BENCHMARK_SHARE_GPU") == "1",
            },
        }
    )  # fmt: skip


def compile_kernels(problem: Problem, ranks: int) -> None:
    """Those of a rank, without the others."""
    from distmlp.engine import compile as compiler
    from distmlp.engine.fused_setup import make_task
    from distmlp.engine.fused_state import describe_device, peer_specialisation, specialisations
    from distmlp.engine.plan import make_plan
    from distmlp.engine.plan_task import Device

    config, rows, device = configure(problem, ranks, "auto"), problem.some_rows(), Device(*describe_device())
    order = Order(len(rows.inputs), ranks, problem.preset.batch, 0, False)
    plan = make_plan(make_task(config, problem.network, order, rows, None, ranks), device)
    joined = peer_specialisation(config, plan)
    for part in (*specialisations(config, plan), *([joined] if joined else [])):
        compiler.cubin(*part, device.capability)


def open_ranks(problem: Problem, world: World, transport: str) -> tuple[Engine, str]:
    """The engine that training would take, with its initial weights, and how its ranks are joined."""
    rows = problem.rows
    feed = OwnFeed(rows, Order(len(rows.inputs), world.size, problem.preset.batch, 0, False), world)
    engine, reason = open_engine(
        configure(problem, world.size, transport), problem.network, world, feed, Standardization()  # type: ignore[arg-type]
    )  # fmt: skip
    engine.load(State(problem.network.initial(0, "he_normal")))
    return engine, reason.splitlines()[-1]


def measure(problem: Problem, warm: bool, transport: str = "auto") -> Iterator[Measurement]:
    if warm:
        compile_kernels(problem, arguments().ranks)
        return
    world = open_world()
    engine, joined = open_ranks(problem, world, transport)

    def epochs(count: int) -> float:
        world.barrier()
        started = perf_counter()
        for _ in range(count):
            engine.train(0, 0, rates(problem.batches))
        return max(world.all_gather((perf_counter() - started) / count))

    try:
        losses = engine.train(0, 0, rates(problem.learn_steps)).losses.tolist()
        epochs(1)
        count = max(1, round(problem.block_seconds / epochs(1)))
        times = [epochs(count) / problem.batches * 1e6 for _ in range(BLOCKS)]
        before = engine.transfers()["kernel_launches"]
        report = engine.train(0, 0, rates(problem.batches))
        plan = getattr(engine, "plan", None)
        used = getattr(engine, "transport", transport)
        extra = {
            "launches_per_step": round((engine.transfers()["kernel_launches"] - before) / problem.batches, 4),
            "transport": used,
            "path": plan.regime if plan else "reference",
            "kernel": plan.kernel if plan else "reference",
            "all_reduce_us": round(report.communication_seconds / problem.batches * 1e6, 2),
            "joined": joined,
            "same_bits": len(set(world.all_gather(problem.network.fingerprint(engine.state().parameters)))) == 1,
        }
        if world.rank == 0:
            yield Measurement(f"distmlp-{used}", times, losses, extra)
    finally:
        engine.close()


def main() -> int:
    if arguments().warm:
        run_subject(measure)
        return 0
    world = open_world(try_devices=True)
    transport = os.environ.get("BENCHMARK_TRANSPORT", "auto")
    run_subject(partial(measure, transport=transport), quiet=world.rank > 0, name=transport)
    return 0


if __name__ == "__main__":
    guarded(main)
