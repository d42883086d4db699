"""Output directories of runs that never ran, with chosen times: what a scaling report reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distmlp.config import RunConfig

GPUS = [{"rank": rank, "host": "node1", "name": "NVIDIA H200", "uuid": f"GPU-{rank}"} for rank in range(8)]


def write_run(
    path: Path,
    ranks: int,
    batch: int,
    step_us: float,
    communication_us: float = 0.0,
    wait_us: float = 0.0,
    spread: float = 0.01,
    blocks: int = 5,
    **summary: Any,
) -> Path:
    """A run of blocks of 100 steps, after a slow first one; block k takes `step_us` (1 ± spread), alternately."""
    config = RunConfig.parse(
        {
            "model": {"layers": [64, 256, 10], "loss": "softmax_cross_entropy"},
            "data": {"train": "digits.h5", "batch": batch},
            "run": {"steps": 100 * (blocks + 1), "log_every": 100},
        }
    )
    path.mkdir(parents=True)
    (path / "run.toml").write_text(config.to_toml())
    seconds, lines = 3.0, []
    for block in range(blocks + 1):
        took = 1e-4 * step_us * (1 + spread * (block % 3 - 1))
        seconds += took if block else 0.0
        lines.append({
            "step": 100 * (block + 1), "epoch": 0, "loss": 1.0 / (block + 1), "learning_rate": 1e-3,
            "samples_per_second": batch / step_us * 1e6, "seconds": seconds, "train_seconds": 0.98 * took,
            "data_wait_seconds": 1e-4 * wait_us, "communication_seconds": 1e-4 * communication_us,
        })  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "status": "finished", "steps": 100 * (blocks + 1), "epochs": 1.0, "samples": 100 * (blocks + 1) * batch,
        "ranks": ranks, "hosts": ["node1"], "engine": "fused", "transport": "mpi" if ranks > 1 else "none",
        "precision": "bf16", "loss": 0.2, "validation": None, "seconds": seconds, "samples_per_second": 1.0,
        "weights_sha256": "0" * 64, "transfers": {}, "versions": {"distmlp": "0.1.0", "numpy": "2"},
        "devices": GPUS[:ranks],
    } | summary  # fmt: skip
    (path / "summary.json").write_text(json.dumps(content))
    return path


def write_sweep(directory: Path) -> list[Path]:
    """One, two and four ranks, weak and strong, that lose a little more with every rank."""
    runs = [write_run(directory / "one", 1, 1024, 100.0)]
    for ranks, exchange in ((2, 10.0), (4, 20.0)):
        runs.append(write_run(directory / f"weak{ranks}", ranks, 1024 * ranks, 100.0 + exchange, exchange))
        runs.append(
            write_run(directory / f"strong{ranks}", ranks, 1024, 20.0 + 80.0 / ranks + exchange, exchange, wait_us=1.0)
        )
    return runs
