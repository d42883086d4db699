"""Run as ranks by test_transports.py: what a transport did to training, as one JSON object in a file.

mpirun -n 2 python tests/gpu/transport_ranks.py TRANSPORT REPORT.json [share] [hosts]
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import numpy as np  # noqa: E402
from gpu.cases import Case, error  # noqa: E402
from gpu.test_transports import CASES, FOUR_CASES, RANKED  # noqa: E402

from distmlp.comm.binding import bind  # noqa: E402
from distmlp.comm.policy import guarded  # noqa: E402
from distmlp.comm.transport import choose_transport  # noqa: E402
from distmlp.comm.world import World, open_world  # noqa: E402
from distmlp.engine import State  # noqa: E402
from distmlp.errors import AgreedError, DataError  # noqa: E402

SPIN = r"""
extern "C" __global__ void write_late(float* values, long long count, float value, long long cycles) {
    const long long began = clock64();
    while (clock64() - began < cycles) {}
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        values[i] = value;
}
"""
SIZES = (1, 1000, 1 << 18, 1 << 24)  # 4 bytes to 64 MB
ROUNDS = 12
CYCLES = 8_000_000  # about 5 ms
STARTED = time.monotonic()
STAGES: dict[str, float] = {}  # when each began


def main() -> int:
    transport, path = sys.argv[1], Path(sys.argv[2])
    faulthandler.dump_traceback_later(220, file=sys.__stderr__)  # the test waits 240 s
    world = open_world(try_devices=True)
    binding = bind(world, share_gpu="share" in sys.argv)
    if "hosts" in sys.argv:
        split(world)
    import cupy

    cupy.cuda.Device(binding.ordinal).use()
    from distmlp.engine.transports import find_facts

    facts = find_facts(transport, world, binding.shared)
    choice = world.agree(lambda: choose_transport(transport, facts))
    report: dict[str, Any] = {
        "transport": choice.transport,
        "library": world.mpi_version,
        "gpus": len({seat.gpu.uuid for seat in binding.seats}),
        "device_mpi": facts.device_mpi.reason,
        "training": [train(world, choice.transport, case) for case in (CASES if world.size == 2 else FOUR_CASES)],
        "faults": faults(world, choice.transport),
        "wrong_sums": spin(world, choice.transport),
    }
    say(world, "done")
    report["stages"] = STAGES
    if world.rank == 0:
        path.write_text(json.dumps(report, indent=1))
    return 0


def split(world: World) -> None:
    """As if the ranks were on two hosts."""
    half = world.size // 2
    world.hosts, world.rank_hosts = ("a", "b"), ("a",) * half + ("b",) * (world.size - half)
    world.neighbours = tuple(rank for rank in range(world.size) if (rank < half) == (world.rank < half))


def say(world: World, stage: str) -> None:
    """For whoever looks why this took long or did not end."""
    STAGES[stage] = round(time.monotonic() - STARTED, 1)
    if world.rank == 0:
        print(f"{STAGES[stage]} s: {stage}", file=sys.__stderr__, flush=True)


def train(world: World, transport: str, case: Case) -> dict[str, Any]:
    """Steps one by one, the bits of all ranks compared after each; then again at once, and on one rank."""

    def bits(engine: Any) -> bytes:
        state = engine.state()
        digest = hashlib.sha256()
        for values in (state.parameters, average(state), *state.slots.values()):
            digest.update(values)
        return digest.digest()

    def average(state: State) -> np.ndarray:
        return np.empty(0) if state.ema is None else state.ema

    def run(engine: Any, at_once: int) -> tuple[np.ndarray, list[int]]:
        losses, differing = [], []
        for epoch in range(2):
            for first in range(0, case.order.batches_per_epoch, at_once):
                count = min(at_once, case.order.batches_per_epoch - first)
                losses.append(engine.train(epoch, first, np.full(count, 1e-3)).losses)
                if len(set(world.all_gather(bits(engine)))) > 1:
                    differing.append(len(losses))
        return np.concatenate(losses), differing

    first, second, alone = (
        case.fused(world=world, transport=transport),
        case.fused(world=world, transport=transport, poison=0x3C),
        case.fused(),
    )
    say(world, f"train {case}")
    losses, differing = run(first, 1)
    again, _ = run(second, 1000)
    wanted, _ = run(alone, 1000)
    found = {
        "steps_with_differing_ranks": differing,
        "repeats": again.tobytes() == losses.tobytes() and bits(first) == bits(second),
        "loss_error": error(losses, wanted),
        "weight_error": error(first.state().parameters, alone.state().parameters),
        "average_error": error(average(first.state()), average(alone.state())),
        "communication_seconds": second.train(2, 0, np.full(5, 1e-3)).communication_seconds,
        "transfers": second.transfers(),
    }
    for engine in (first, second, alone):
        engine.close()
    return found


def faults(world: World, transport: str) -> dict[str, Any]:
    """A rank that asks to stop, one that cannot read its rows, a value that is not finite: all see it at once."""
    say(world, "faults")
    asked = iter([False, False, True])
    stopping = RANKED.fused(world=world, transport=transport, stop=lambda: world.rank == 1 and next(asked, True))
    report = stopping.train(0, 0, np.full(8, 1e-3))
    while not report.stopped:  # asked once a launch
        report = stopping.train(0, 0, np.full(8, 1e-3))
    stopping.close()

    broken = RANKED.but(residence="stream").fused(world=world, transport=transport)
    prepare = broken._rows.prepare

    def damaged(epoch: int, batches: range) -> Any:
        if world.rank == 1 and 4 in batches:
            raise DataError("rows 4 to 5 of part.h5 are damaged")
        return prepare(epoch, batches)

    broken._rows.prepare = damaged
    try:
        broken.train(0, 0, np.full(8, 1e-3))
        told = "nothing"
    except AgreedError as error:
        told = str(error)
    broken.close()

    rows = RANKED.data()
    rows.targets[RANKED.order.batch_rows(0, 3, range(2, 4))[0], 0] = np.nan
    bad = RANKED.fused(world=world, transport=transport, rows=rows)
    nonfinite = bad.train(0, 0, np.full(8, 1e-3)).nonfinite
    bad.close()
    found = {"stopped": [report.stopped, report.steps], "told": told, "nonfinite": nonfinite}
    assert len(set(map(str, world.all_gather(found)))) == 1
    return found


def spin(world: World, transport: str) -> list[str]:
    """Sums of what a kernel is still writing when the sum is asked for, and that is overwritten right after."""
    import cupy

    from distmlp.comm.device_sums import ExchangeSum, LibrarySum, StagedSum
    from distmlp.engine.device_memory import Ledger, allocate, pinned
    from distmlp.engine.gpu import Gpu, NcclSum

    if transport == "peer":  # it sums in the kernel that made the gradient
        return []
    ledger = Ledger(cupy.cuda.Stream(non_blocking=True))
    kernel, largest = cupy.RawKernel(SPIN, "write_late"), max(SIZES)
    memory, kept = allocate(4 * largest, "test"), allocate(4 * largest, "test")
    sums: list[Any] = {
        "staged": lambda: [StagedSum(Gpu(ledger), world, pinned(4 * largest).view(np.float32)[:largest])],
        "nccl": lambda: [NcclSum(Gpu(ledger), world, ledger)],
        "mpi": lambda: [LibrarySum(Gpu(ledger), world), ExchangeSum(Gpu(ledger), world, largest)],
    }[transport]()
    wrong = []
    for each in sums:
        for count in SIZES:
            say(world, f"{each.name}, {count} elements")
            for turn in range(ROUNDS):
                arguments = (
                    np.uint64(memory.ptr),
                    np.int64(count),
                    np.float32(world.rank + 1 + turn),
                    np.int64(CYCLES),
                )
                with ledger.stream:
                    kernel((64,), (256,), arguments)
                each.run(memory.ptr, count)
                kept.copy_from_device_async(memory, 4 * count, ledger.stream)
                memory.memset_async(0xFF, 4 * count, ledger.stream)
                result = np.empty(count, np.float32)
                ledger.download(kept.ptr, result)
                if not (result == sum(rank + 1 + turn for rank in range(world.size))).all():
                    wrong.append(f"{each.name}, {count} elements, round {turn}: {result[:3]}")
        each.close()
    return [text for part in world.all_gather(wrong) for text in part]


if __name__ == "__main__":
    guarded(main)
