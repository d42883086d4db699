"""How fast rows come from files in the page cache to the GPU, and what that leaves of the speed of training.

    python tests/benchmarks/feed.py [--rows N] [--folder DIR] [--readers N] > tests/benchmarks/results/h200-feed.json

GB/s (of inputs and targets, 784 float32 and one) of one `h5py` thread into host memory; of the rows as they lie into
device memory (`resident`: all of them at the start); of an epoch streamed in training order, shuffled or not. Then
`training`: samples a second with rows resident and streamed, the peak of memory beside the size of the data, and a
PyTorch DataLoader over h5py whose batches go to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import h5py
import numpy as np
from feed_rate import timed, with_h5py, write

from distmlp.checkpoint.contents import network_of
from distmlp.comm.world import World
from distmlp.config import RunConfig
from distmlp.data.feed import Feed
from distmlp.data.shards import Shards
from distmlp.engine import Standardization, State
from distmlp.engine.affine import Affine
from distmlp.engine.compile import kernel_sha256
from distmlp.engine.device_rows import ResidentRows
from distmlp.engine.fused import FusedEngine
from distmlp.order import Order

FEATURES, STREAMS = 784, 16
NARROW = 64
GZIP = {"chunks": 256, "compression": "gzip", "compression_opts": 1, "shuffle": True}
BATCH = 8192
NETWORKS = ([784, 1024, 1024, 1], [784, 2048, 2048, 2048, 1], [784, 4096, 4096, 4096, 1])


def engine_over(path: Path, layers: list[int], residence: str, readers: int, shuffle: bool = True) -> FusedEngine:
    """A fused engine whose rows come from `path`."""
    config = RunConfig.model_validate({
        "model": {"layers": layers, "loss": "mse"},
        "data": {"train": str(path), "batch": BATCH, "streams": STREAMS, "residence": residence, "shuffle": shuffle},
        "run": {"precision": "bf16", "steps": 1},
    })  # fmt: skip
    names = SimpleNamespace(train=str(path), inputs="inputs", targets="targets", sample_weights="")
    shards = Shards.open(names, World(), loss="mse")
    feed = Feed(shards, Order(shards.rows, STREAMS, BATCH, 0, shuffle), World(), residence, readers)
    network = network_of(config)
    engine = FusedEngine(config, network, World(), feed, Standardization())
    engine.load(State(network.initial(0, "he_normal")))
    return engine


def close(engine: FusedEngine) -> None:
    """End engine and feed."""
    engine._feed.close()
    engine.close()


def to_device(path: Path, readers: int, features: int, shuffle: bool) -> float:
    """GB/s of an epoch's rows, streamed to the device and not used there."""
    engine = engine_over(path, [features, 8, 1], "stream", readers, shuffle)
    order, rows = engine._feed.order, engine._rows
    total = order.rows * engine._feed.shards.row_bytes
    last, epochs = order.batches_per_epoch, iter(range(9))

    def epoch() -> None:
        number, first = next(epochs), 0
        while first < last:
            count = rows.steps_at_once(number, first, min(1024, last - first))
            rows.prepare(number, range(first, first + count))
            rows.launched()
            first += count
        engine._ledger.stream.synchronize()

    epoch()
    rate = timed(epoch, total)
    close(engine)
    return rate


def resident(path: Path, readers: int, features: int) -> float:
    """GB/s of all rows to the device, as they lie."""
    engine = engine_over(path, [features, 8, 1], "device", readers)
    shards = engine._feed.shards

    def load() -> None:
        ResidentRows(engine._feed, Affine(None, np.float32), engine._own, engine._ledger, engine._device.capability)

    rate = timed(load, shards.rows * shards.row_bytes)
    close(engine)
    return rate


def training(path: Path, layers: list[int], readers: int) -> dict[str, Any]:
    """Samples a second, resident and streamed, and the share of time waiting for data."""
    row: dict[str, Any] = {"layers": layers, "batch": BATCH}
    for place in ("device", "stream"):
        engine = engine_over(path, layers, place, readers)
        order = engine._feed.order
        steps = min(order.batches_per_epoch, 1024)
        engine.train(0, 0, np.full(steps, 1e-4))
        best, waited = 0.0, 0.0
        for epoch in (1, 2):
            started = time.perf_counter()
            report = engine.train(epoch, 0, np.full(steps, 1e-4))
            seconds = time.perf_counter() - started
            if steps * BATCH / seconds > best:
                best, waited = steps * BATCH / seconds, report.wait_seconds / seconds
        row[f"{place}_samples_per_second"] = round(best)
        row["wait_share"] = round(waited, 4)
        close(engine)
    row["needs_gigabytes_per_second"] = round(row["device_samples_per_second"] * 4 * (FEATURES + 1) / 1e9, 2)
    row["streamed_of_resident"] = round(row["stream_samples_per_second"] / row["device_samples_per_second"], 4)
    return row


def with_dataloader(path: Path, workers: int, seconds: float) -> dict[str, Any]:
    """Samples a second of a PyTorch DataLoader over h5py: sorted random rows of a batch, pinned, sent to the GPU."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            if not hasattr(self, "file"):
                self.file = h5py.File(path, locking=False)
            inputs = self.file["inputs"]
            chosen = np.sort(np.random.default_rng(number).choice(len(inputs), BATCH, replace=False))
            return torch.from_numpy(inputs[chosen]), torch.from_numpy(self.file["targets"][chosen])

    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=None, num_workers=workers, pin_memory=True, multiprocessing_context="fork"
    )
    count, started = 0, None
    for inputs, targets in loader:
        for part in (inputs, targets):
            part.cuda(non_blocking=True)
        torch.cuda.synchronize()
        started = started or time.perf_counter()  # the first batch is warm-up
        count += 1
        if time.perf_counter() - started > seconds:
            break
    rate = (count - 1) * BATCH / (time.perf_counter() - started)
    return {"workers": workers, "samples_per_second": round(rate), "gigabytes_per_second": round(rate * 3140 / 1e9, 3)}


def memory_bytes(field: str) -> int:
    """Of this process: VmHWM, the peak, or VmRSS."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    made.add_argument("--rows", type=int, default=2_000_000)
    made.add_argument("--readers", type=int, default=16)
    made.add_argument("--folder", type=Path, default=None, help="on a file system that keeps them in memory")
    options = made.parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    out: dict[str, Any] = {
        "device": properties["name"].decode(), "driver": cupy.cuda.runtime.driverGetVersion(),
        "kernel_sha256": kernel_sha256(), "date": date.today().isoformat(), "readers": options.readers,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), "h5py": h5py.__version__, "cupy": cupy.__version__},
        "gigabytes_per_second": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        wide = Path(folder) / "wide.h5"
        files = (
            ("contiguous, 784 columns", wide, options.rows, FEATURES, {}),
            ("contiguous, 64 columns", Path(folder) / "narrow.h5", options.rows * 2, NARROW, {}),
            ("gzip, chunks of 256 rows, 784 columns", Path(folder) / "gzip.h5", options.rows // 16, FEATURES, GZIP),
        )
        for layout, path, rows, features, kind in files:
            write(path, rows, features, kind)
            row = {"layout": layout, "bytes": rows * 4 * (features + 1)}
            row["h5py"] = timed(lambda path=path, n=features: with_h5py(path, n), row["bytes"])
            row["resident"] = resident(path, options.readers, features)
            row["streamed"] = to_device(path, options.readers, features, False)
            row["streamed_shuffled"] = to_device(path, options.readers, features, True)
            out["gigabytes_per_second"].append(row)
        before = memory_bytes("VmRSS")
        out["training"] = [training(wide, layers, options.readers) for layers in NETWORKS]
        out["memory"] = {
            "data_bytes": out["gigabytes_per_second"][0]["bytes"], "resident_before_training_bytes": before,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        try:
            out["dataloader"] = with_dataloader(wide, 8, 5.0)
        except Exception as error:
            out["dataloader"] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
