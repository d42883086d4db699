"""What the ready data sets are learnt to: Fashion-MNIST and digits, on the GPU in every precision and on the CPU.

`python tests/benchmarks/accuracy.py` trains datasets/fashion.toml and datasets/digits.toml as they stand (build the
shards first: datasets/fashion_mnist.py, datasets/digits.py) and writes results/GPU-accuracy.json: accuracy on the
test rows, loss, and rows a second in the training loop. The reference engine on the CPU is what the GPU must match.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from step import device_slug, gpu, versions

from distmlp import RunConfig, train
from distmlp.comm.policy import guarded
from distmlp.engine.compile import kernel_sha256
from distmlp.engine.device import find_obstacle

DATASETS = Path(__file__).parents[2] / "datasets"
RUNS = (("reference", "fp32"), ("fused", "fp32"), ("fused", "tf32"), ("fused", "bf16"))
TOLERANCE = 0.01  # of the accuracy, between engines and precisions


def learn(dataset: str, engine: str, precision: str, output: Path, overrides: list[str]) -> dict[str, Any]:
    """Train `dataset` to its end; a row of the results."""
    settings = [f"run.engine={engine}", f"run.precision={precision}", "run.log_every=1000", *overrides]
    summary = train(RunConfig.load(DATASETS / f"{dataset}.toml", settings, output=str(output)))
    assert summary.validation is not None
    return {
        "dataset": dataset,
        "engine": summary.engine,
        "precision": summary.precision,
        "accuracy": summary.validation["accuracy"],
        "validation_loss": summary.validation["loss"],
        "loss": summary.loss,
        "epochs": summary.epochs,
        "steps": summary.steps,
        "samples_per_second": round(summary.samples_per_second or 0.0),
        "seconds": round(summary.seconds, 2),
        "kernel_launches": summary.transfers["kernel_launches"],
        "weights_sha256": summary.weights_sha256,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="fashion,digits", help="comma separated (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every run")
    parser.add_argument("--out", type=Path, help="default: results/GPU-accuracy.json beside this program")
    options = parser.parse_args()
    obstacle = find_obstacle()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for dataset in options.datasets.split(","):
            for engine, precision in RUNS[:1] if obstacle else RUNS:
                output = Path(folder) / f"{dataset}-{engine}-{precision}"
                rows.append(learn(dataset, engine, precision, output, options.set))
                row = rows[-1]
                print(
                    f"{dataset} {engine} {precision}: accuracy {row['accuracy']:.4f}, "
                    f"{row['samples_per_second']:,} samples/s",
                    flush=True,
                )
    name, driver = gpu()
    record = {
        "kernel_sha256": kernel_sha256(),
        "device": name,
        "driver": driver,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "off": off(rows),
        "rows": rows,
    }
    out = options.out or Path(__file__).parent / "results" / f"{device_slug(name)}-accuracy.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(*record["off"], f"{len(rows)} rows in {out}", sep="\n")
    return 1 if record["off"] else 0


def off(rows: list[dict[str, Any]]) -> list[str]:
    """Runs whose accuracy is below the reference engine's by more than `TOLERANCE`."""
    wanted = {row["dataset"]: row["accuracy"] for row in rows if row["engine"] == "reference"}
    return [
        f"{row['dataset']} {row['precision']}: accuracy {row['accuracy']:.4f}, reference {wanted[row['dataset']]:.4f}"
        for row in rows
        if row["accuracy"] < wanted[row["dataset"]] - TOLERANCE
    ]


if __name__ == "__main__":
    guarded(main)
