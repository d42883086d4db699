"""Fashion-MNIST on several GPUs by every transport, and on one: all are to learn the same.

`python tests/benchmarks/accuracy_ranks.py` trains datasets/fashion.toml through `mpirun -n RANKS distmlp train` (build
the shards first: datasets/fashion_mnist.py) and writes results/GPUxRANKS-accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from ranks_report import TRANSPORTS
from step import device_slug, gpu, versions

from distmlp.engine.compile import kernel_sha256

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.005  # of the accuracy, between one GPU and several
ALONE = "none"


def learn(transport: str, launcher: str, settings: list[str], output: Path) -> dict[str, Any]:
    """Train to the end; a row of the results. `transport` ALONE: one rank."""
    command = [sys.executable, "-m", "distmlp", "train", str(ROOT / "datasets" / "fashion.toml")]
    command += ["--output", str(output), "--set", "run.log_every=1000"]
    for setting in settings:
        command += ["--set", setting]
    if transport != ALONE:
        command = [*launcher.split(), *command, "--set", f"run.transport={transport}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        return {"transport": transport, "failed": (done.stderr.strip() or done.stdout.strip())[-600:]}
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return {
        "dataset": "fashion",
        "transport": summary["transport"],
        "ranks": summary["ranks"],
        "precision": summary["precision"],
        "accuracy": summary["validation"]["accuracy"],
        "validation_loss": summary["validation"]["loss"],
        "loss": summary["loss"],
        "steps": summary["steps"],
        "samples_per_second": round(summary["samples_per_second"] or 0.0),
        "weights_sha256": summary["weights_sha256"],
    }


def off(rows: list[dict[str, Any]]) -> list[str]:
    """What failed, and runs on several GPUs whose accuracy is not that on one, within `TOLERANCE`."""
    found = [f"{row['transport']}: {row['failed']}" for row in rows if "failed" in row]
    wanted = next((row["accuracy"] for row in rows if row["transport"] == ALONE and "failed" not in row), None)
    for row in rows:
        if "failed" not in row and wanted is not None and abs(row["accuracy"] - wanted) > TOLERANCE:
            found.append(f"{row['transport']}: accuracy {row['accuracy']:.4f}, on one GPU {wanted:.4f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="comma separated (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", default="mpirun -n {ranks}", help="default: %(default)s")
    parser.add_argument("--precision", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every run")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other: rates then mean nothing")
    parser.add_argument("--out", type=Path, help="default: results/GPUxRANKS-accuracy.json beside this program")
    options = parser.parse_args()
    launcher = options.launcher.replace("{ranks}", str(options.ranks))
    settings = [f"run.precision={options.precision}", *options.set]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        wanted = [ALONE, *options.transports.split(",")]
        for row in pool.map(lambda name: learn(name, launcher, settings, Path(folder) / name), wanted):
            rows.append(row)
            print(json.dumps(row), flush=True)
    name, driver = gpu()
    record = {
        "kernel_sha256": kernel_sha256(),
        "device": name,
        "driver": driver,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "off": off(rows),
        "rows": [row for row in rows if "failed" not in row],
    }
    out = options.out or Path(__file__).parent / "results" / f"{device_slug(name)}x{options.ranks}-accuracy.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(*record["off"], f"{len(record['rows'])} rows in {out}", sep="\n")
    return 1 if record["off"] else 0


if __name__ == "__main__":
    sys.exit(main())
