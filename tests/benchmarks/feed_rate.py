"""How fast rows come from files in the page cache into host memory, by layout, reader threads and order.

    python tests/benchmarks/feed_rate.py [--rows N] [--features F] [--folder DIR] [--readers 1,8,16] > feed.json

`sequential`: all threads read the rows as they lie (`Feed.resident`). `shuffled`: an epoch streamed window by
window in the sample order. `h5py`: one thread reading 64 MB slices. GB/s of inputs and targets in memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np

from distmlp.comm.world import World
from distmlp.data.feed import Feed
from distmlp.data.shards import Shards
from distmlp.order import Order

LAYOUTS = {
    "contiguous": {},
    "chunks of 256 rows": {"chunks": 256},
    "chunks of 256 rows, gzip": {"chunks": 256, "compression": "gzip", "compression_opts": 1, "shuffle": True},
}


def write(path: Path, rows: int, features: int, options: dict) -> None:
    """A shard of float32 rows that gzip halves or so."""
    rng = np.random.default_rng(0)
    block = rng.integers(-99, 100, (4096, features)).astype("f4") / 16
    if "chunks" in options:
        options = {**options, "chunks": (options["chunks"], features)}
    with h5py.File(path, "w") as file:
        inputs = file.create_dataset("inputs", (rows, features), "f4", **options)
        file["targets"] = rng.normal(size=(rows, 1)).astype("f4")
        for start in range(0, rows, 4096):
            inputs[start : start + 4096] = block[: min(4096, rows - start)]


def open_shards(pattern: str) -> Shards:
    """The shards that `write` made."""
    names = SimpleNamespace(train=pattern, inputs="inputs", targets="targets", sample_weights="")
    return Shards.open(names, World(), loss="mse")


def timed(work: Callable[[], object], total_bytes: int, times: int = 3) -> float:
    """GB/s of the best of `times`."""
    best = min(_seconds(work) for _ in range(times))
    return round(total_bytes / best / 1e9, 3)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def epoch(feed: Feed) -> None:
    """Stream one epoch."""
    for number in range(feed.order.batches_per_epoch):
        feed.batch(0, number)


def with_h5py(path: Path, features: int) -> None:
    """Read everything with one thread of h5py."""
    with h5py.File(path, locking=False) as file:
        dataset = file["inputs"]
        step = (64 << 20) // (4 * features)
        buffer = np.empty((step, features), "f4")
        for start in range(0, len(dataset), step):
            count = min(step, len(dataset) - start)
            dataset.read_direct(buffer, np.s_[start : start + count], np.s_[:count])


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    made.add_argument("--rows", type=int, default=400_000)
    made.add_argument("--features", type=int, default=784)
    made.add_argument("--readers", default="1,2")
    made.add_argument("--folder", type=Path, default=None)
    options = made.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for layout, kind in LAYOUTS.items():
            path = Path(folder) / "rows.h5"
            write(path, options.rows, options.features, kind)
            shards, world = open_shards(str(path)), World()
            order = Order(shards.rows, 16, 4096, 0, True)
            total = shards.rows * shards.row_bytes
            row = {"layout": layout, "h5py": timed(lambda p=path: with_h5py(p, options.features), total)}
            for readers in map(int, options.readers.split(",")):
                feed = Feed(shards, order, world, "stream", readers)
                row[f"sequential, {readers} readers"] = timed(feed.resident, total)
                row[f"shuffled, {readers} readers"] = timed(lambda feed=feed: epoch(feed), total)
                feed.close()
            results.append(row)
    about = {
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "h5py": h5py.__version__,
    }
    print(
        json.dumps(
            {**about, "rows": options.rows, "features": options.features, "gigabytes_per_second": results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
