"""A PyTorch DataLoader over h5py whose batches go to the GPU: what `feed.py` sets beside distmlp's own feeding.

    python tests/benchmarks/feed_loader.py SHARD.h5 BATCH WORKERS SECONDS < /dev/null

Prints a line of JSON. `rows`: the usual data set, a row at a time, shuffled. `slices`: a whole batch at a time as it
lies in the file, only the batches shuffled, which is as fast as such a loader gets. Waits for a line (or the end) of
its standard input before it begins, so that its imports do not disturb what is measured before it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import h5py
import torch


class Shard(torch.utils.data.Dataset):
    """Rows of one file, or whole batches of them; every worker opens the file for itself."""

    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch, self.file = path, batch, None
        with h5py.File(path, locking=False) as file:
            self.rows = len(file["inputs"])

    def __len__(self) -> int:
        return self.rows // self.batch

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.file = self.file or h5py.File(self.path, locking=False)
        place = number if self.batch == 1 else slice(number * self.batch, (number + 1) * self.batch)
        return torch.from_numpy(self.file["inputs"][place]), torch.from_numpy(self.file["targets"][place])


def rate(loader: Any, rows: int, seconds: float) -> float:
    """Rows a second that arrive on the GPU, after the first batch."""
    done, started = 0, 0.0
    while True:
        for parts in loader:
            for part in parts:
                part.cuda(non_blocking=True)
            torch.cuda.synchronize()
            now = time.perf_counter()
            if not started:
                started = now
                continue
            done += rows
            if now - started > seconds:
                return done / (now - started)


def main() -> None:
    path, batch, workers, seconds = sys.argv[1], *map(int, sys.argv[2:5])
    loader = torch.utils.data.DataLoader
    common = {"num_workers": workers, "pin_memory": True, "persistent_workers": True}
    sys.stdin.readline()
    rows = rate(loader(Shard(path, 1), batch, shuffle=True, drop_last=True, **common), batch, seconds)
    slices = rate(loader(Shard(path, batch), None, shuffle=True, **common), batch, seconds)
    found = {"workers": workers, "torch": torch.__version__, "rows": round(rows), "slices": round(slices)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
