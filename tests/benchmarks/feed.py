"""How fast rows come from files in the page cache to the GPU, and what that leaves of the speed of training.

    python tests/benchmarks/feed.py --prepare --folder DIR
    python tests/benchmarks/feed.py --folder DIR --out tests/benchmarks/results/h200-feed.json [--scale S]

`rates`, in GB/s of inputs and targets: one thread of `h5py` into host memory; all rows as they lie into device memory,
as at the start of a run whose rows fit there (`resident`); an epoch in training order, window by window, unshuffled
(`streamed`) and shuffled, also of rows that lie in host memory; of compressed rows also where decoded chunks do not
stay in memory, and with `data.scratch`.
`training`: samples a second with rows resident and streamed. `larger`: a run whose data is larger than the memory of
GPU and host together, in a process of its own: the same shards under so many names. `loader`: a PyTorch DataLoader
over h5py (`feed_loader.py`). Every figure is told as it comes, and the results file is written anew after each.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from feed_rate import open_shards, timed, with_h5py, write

if TYPE_CHECKING:
    from distmlp.engine.fused import FusedEngine

FEATURES, STREAMS, BATCH = 784, 16, 8192
SHARDS = 8
GZIP = {"chunks": 256, "compression": "gzip", "compression_opts": 1, "shuffle": True}
LAYOUTS = (  # name, rows, columns, options of h5py
    ("contiguous, 784 columns", 1_000_000, FEATURES, {}),
    ("contiguous, 64 columns", 4_000_000, 64, {}),
    ("chunks of 256 rows, 784 columns", 1_000_000, FEATURES, {"chunks": 256}),
    ("gzip, chunks of 256 rows, 784 columns", 160_000, FEATURES, GZIP),
)
WIDE, NARROW = 0, 1  # of them
NETWORKS = (  # layout, layers
    (WIDE, [784, 4096, 4096, 1]),
    (WIDE, [784, 4096, 4096, 4096, 1]),
    (NARROW, [64, 512, 512, 512, 1]),
)
LARGER_SECONDS = 0.6  # of training between two looks at the memory held
T0 = time.monotonic()


def say(what: object) -> None:
    print(f"[{time.monotonic() - T0:.1f} s] {what}", file=sys.stderr, flush=True)


def settings(pattern: str, layers: list[int], residence: str) -> Any:
    """The configuration of a run on such rows."""
    from distmlp.config import RunConfig

    return RunConfig.model_validate({
        "model": {"layers": layers, "loss": "mse"},
        "data": {"train": pattern, "batch": BATCH, "streams": STREAMS, "residence": residence},
        "run": {"precision": "bf16", "steps": 1},
    })  # fmt: skip


def compile_all() -> None:
    """Every kernel that is needed, side by side, into the cache."""
    from distmlp.checkpoint.contents import network_of
    from distmlp.engine.compile import cubin
    from distmlp.engine.fused_state import describe_device, specialisations
    from distmlp.engine.optimizers import needs_norm, slot_names
    from distmlp.engine.plan import make_plan
    from distmlp.engine.plan_task import Device, Task

    device, jobs = Device(*describe_device()), {("order.cu", ()): ("order.cu", {}, 0)}
    for _, layers in NETWORKS:
        config = settings("rows.h5", layers, "auto")
        slots = slot_names(config.optimizer.name)
        task = Task(
            network_of(config), BATCH, "bf16", "mse", False, False, slots, False, 1, "f4", needs_norm(config.optimizer)
        )
        for source, macros in specialisations(config, make_plan(task, device, "auto")):
            jobs[source, tuple(sorted(macros.items()))] = (source, macros, 0)
    parts = [(source, macros, device.capability) for source, macros, _ in jobs.values()]
    say(f"{len(parts)} kernels to compile")
    with ProcessPoolExecutor(len(parts), get_context("spawn")) as pool:
        list(pool.map(cubin, *zip(*parts, strict=True)))
    say("compiled")


def make_files(folder: Path, scale: float) -> list[tuple[str, str, int, int]]:
    """The shards of every layout, written side by side unless they are there; (name, pattern, rows, columns)."""
    made, jobs = [], []
    for number, (name, rows, columns, options) in enumerate(LAYOUTS):
        each = max(BATCH, int(rows * scale) // SHARDS)
        paths = [folder / f"{number}-{shard}.h5" for shard in range(SHARDS)]
        jobs += [(path, each, columns, options) for path in paths if not path.exists()]
        made.append((name, str(folder / f"{number}-?.h5"), each * SHARDS, columns))
    if not jobs:
        return made
    with ProcessPoolExecutor(min(16, len(os.sched_getaffinity(0))), get_context("fork")) as pool:
        list(pool.map(write, *zip(*jobs, strict=True)))
    return made


class Arrivals:
    """Rows on their way to a device that does nothing with them."""

    def __init__(self, pattern: str, readers: int, shuffle: bool, scratch: str = "", place: str = "stream") -> None:
        import cupy

        from distmlp.comm.world import World
        from distmlp.data.feed import Feed
        from distmlp.engine.affine import Affine
        from distmlp.engine.device_memory import Ledger
        from distmlp.engine.device_rows import OwnRows
        from distmlp.order import Order

        shards = open_shards(pattern)
        self.order = Order(shards.rows, STREAMS, BATCH, 0, shuffle)
        self.feed = Feed(shards, self.order, World(), place, readers, scratch)
        self.bytes = shards.rows * shards.row_bytes
        self.ledger = Ledger(cupy.cuda.Stream(non_blocking=True))
        self.own = OwnRows(self.order, self.feed.streams)
        self.affine = Affine(None, np.float32)
        self.capability = int(cupy.cuda.Device().compute_capability)

    def resident(self) -> float:
        """GB/s of all rows, as they lie."""
        from distmlp.engine.device_rows import ResidentRows

        return timed(
            lambda: ResidentRows(self.feed, self.affine, self.own, self.ledger, self.capability), self.bytes, 3
        )

    def streamed(self, times: int = 1) -> float:
        """GB/s of an epoch in training order, the best of so many pairs of them."""
        from distmlp.engine.device_windows import WindowRows

        rows = WindowRows(self.feed, self.affine, self.own, self.ledger, self.capability)
        last, epochs = self.order.batches_per_epoch, iter(range(9))

        def epoch() -> None:
            number, first = next(epochs), 0
            while first < last:
                count = rows.steps_at_once(number, first, min(1024, last - first))
                rows.prepare(number, range(first, first + count))
                rows.launched()
                first += count
            self.ledger.stream.synchronize()

        epoch()
        return timed(lambda: (epoch(), epoch()), 2 * self.bytes, times)  # as much read ahead before as after


def rates(name: str, pattern: str, rows: int, columns: int, readers: int) -> dict[str, Any]:
    """GB/s of one layout."""
    row: dict[str, Any] = {"layout": name, "bytes": rows * 4 * (columns + 1)}
    one = Path(pattern.replace("?", "0"))
    row["h5py"] = timed(lambda: with_h5py(one, columns), row["bytes"] // SHARDS, 2)
    say(row)
    ways = [("resident", False, ""), ("streamed", False, ""), ("streamed_shuffled", True, "")]
    if "gzip" in name:
        ways += [("without_memory", True, ""), ("with_scratch", True, str(one.parent))]
    else:
        ways += [("host_shuffled", True, "")]
    for what, shuffle, scratch in ways:
        arrivals = Arrivals(pattern, readers, shuffle, scratch, "host" if "host" in what else "stream")
        if what == "without_memory":
            arrivals.feed.free_bytes = 256 << 20  # for decoded chunks, a quarter of it
        row[what] = arrivals.resident() if what == "resident" else arrivals.streamed(1 if "gzip" in name else 3)
        arrivals.feed.close()
        say(f"{what}: {row[what]} GB/s")
    return row


def open_fused(pattern: str, layers: list[int], residence: str, readers: int) -> FusedEngine:
    """A fused engine, ready to train on rows of these files."""
    from distmlp.checkpoint.contents import network_of
    from distmlp.comm.world import World
    from distmlp.data.feed import Feed
    from distmlp.engine import Standardization, State
    from distmlp.engine.fused import FusedEngine
    from distmlp.order import Order

    config, shards = settings(pattern, layers, residence), open_shards(pattern)
    network = network_of(config)
    feed = Feed(shards, Order(shards.rows, STREAMS, BATCH, 0, True), World(), residence, readers)
    engine = FusedEngine(config, network, World(), feed, Standardization())
    engine.load(State(network.initial(0, "he_normal")))
    return engine


def train(engine: FusedEngine, epoch: int) -> tuple[float, float]:
    """Samples a second and the share of time spent waiting for data, over an epoch."""
    order = engine._feed.order  # type: ignore[union-attr]
    started = time.perf_counter()
    report = engine.train(epoch, 0, np.full(order.batches_per_epoch, 1e-4))
    seconds = time.perf_counter() - started
    return order.rows / seconds, report.wait_seconds / seconds


def close(engine: FusedEngine) -> None:
    engine._feed.close()  # type: ignore[union-attr]
    engine.close()


def training(layout: str, pattern: str, layers: list[int], readers: int) -> dict[str, Any]:
    """Samples a second, resident and streamed, and the share of time waiting for data."""
    row: dict[str, Any] = {"layout": layout, "layers": layers, "batch": BATCH}
    for place in ("device", "stream"):
        engine = open_fused(pattern, layers, place, readers)
        train(engine, 0)
        speed, waited = max(train(engine, epoch) for epoch in (1, 2, 3))
        row[f"{place}_samples_per_second"] = round(speed)
        row["wait_share"] = round(waited, 4)
        row["kernel"] = engine.plan.special.name if engine.plan.special else "general"
        close(engine)
        say(row)
    row["needs_gigabytes_per_second"] = round(row["device_samples_per_second"] * 4 * (layers[0] + layers[-1]) / 1e9, 2)
    row["streamed_of_resident"] = round(row["stream_samples_per_second"] / row["device_samples_per_second"], 4)
    return row


def larger(pattern: str, layers: list[int], readers: int) -> dict[str, Any]:
    """A run on more rows than GPU and host can hold together, in this process: what it holds as it goes on."""
    import cupy

    from distmlp.data.memory import available_bytes

    free, total = cupy.cuda.runtime.memGetInfo()
    host = available_bytes()
    with tempfile.TemporaryDirectory(dir=Path(pattern).parent) as folder:
        shards = sorted(glob.glob(pattern))
        for number in range(int(1.1 * (total + host) / sum(map(os.path.getsize, shards))) + 1):
            for shard in shards:
                os.link(shard, Path(folder) / f"{number:05d}-{Path(shard).name}")
        started = time.perf_counter()
        engine = open_fused(f"{folder}/*.h5", layers, "auto", readers)
        opened = time.perf_counter() - started
        order, held, first = engine._feed.order, [], 0  # type: ignore[union-attr]
        for _ in range(5):
            started, before = time.perf_counter(), first
            while time.perf_counter() - started < LARGER_SECONDS and first + 256 <= order.batches_per_epoch:
                engine.train(0, first, np.full(256, 1e-4))
                first += 256
            rows = (first - before) * BATCH
            speed = rows / (time.perf_counter() - started)
            held.append(memory("/proc/self/status", "VmRSS"))
        found = {
            "data_bytes": engine._feed.resident_bytes(), "files": len(os.listdir(folder)),  # type: ignore[union-attr]
            "gpu_free_bytes": free, "host_free_bytes": host, "placed": engine._rows.about,  # type: ignore
            "layers": layers, "open_seconds": round(opened, 2), "rows_trained": first * BATCH,
            "rss_bytes": held, "rss_peak_bytes": memory("/proc/self/status", "VmHWM"),
            "gpu_bytes": total - cupy.cuda.runtime.memGetInfo()[0], "samples_per_second": round(speed),
        }  # fmt: skip
        close(engine)
    return found


def memory(path: str, name: str) -> int:
    """A figure of the kernel's, in bytes."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def apart(what: str, *arguments: str) -> subprocess.Popen[str]:
    """Another program of this folder, which waits for the end of its input before it begins."""
    command = [sys.executable, str(Path(__file__).parent / what), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What it prints; an error where it takes longer or fails."""
    try:
        out, _ = process.communicate("\n", timeout=seconds)
        return json.loads(out)
    except (subprocess.TimeoutExpired, ValueError) as error:
        process.kill()
        return {"error": type(error).__name__}


def about(readers: int) -> dict[str, Any]:
    import cupy

    from distmlp.engine.compile import kernel_sha256

    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(), "kernel_sha256": kernel_sha256(),
        "date": date.today().isoformat(), "readers": readers, "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), "h5py": h5py.__version__, "cupy": cupy.__version__},
    }  # fmt: skip


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("h200-feed.json"))
    made.add_argument("--readers", type=int, default=16)
    made.add_argument("--scale", type=float, default=1.0, help="of the rows")
    made.add_argument("--folder", type=Path, help="on a file system that keeps them in memory; for files that stay")
    made.add_argument("--prepare", action="store_true", help="only fill the cache of kernels, and write the files")
    made.add_argument("--larger", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.larger:
        sys.stdin.readline()
        print(json.dumps(larger(options.larger, NETWORKS[0][1], options.readers)))
        return
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), options.scale)
        say("files written")
        if options.prepare:
            compile_all()
            return
        measure(files, options.readers, options.out)


def measure(files: list[tuple[str, str, int, int]], readers: int, out: Path) -> None:
    """All figures, the most wanted first."""
    wide = files[WIDE][1]
    found = {**about(readers), "rates": [], "training": []}

    def keep() -> None:
        out.write_text(json.dumps(found, indent=1) + "\n")

    for name, pattern, rows, columns in files:
        found["rates"].append(rates(name, pattern, rows, columns, readers))
        keep()
    for layout, layers in NETWORKS:
        found["training"].append(training(*files[layout][:2], layers, readers))
        keep()
    loader = apart("feed_loader.py", wide.replace("?", "0"), str(BATCH), str(min(16, readers)), "2")
    found["larger"] = result_of(apart("feed.py", "--larger", wide, "--readers", str(readers)), 30)
    say(found["larger"])
    keep()
    found["loader"] = result_of(loader, 40)
    say(found["loader"])
    keep()


if __name__ == "__main__":
    main()
