"""Time of a training step on several GPUs of one host: distmlp by every transport, JAX (sharded scan), PyTorch DDP.

`python tests/benchmarks/ranks.py` writes results/GPUxRANKS-step.json, the batch a GPU as in the presets; all subjects
in one run, one after the other. mpirun is the one on PATH; its make decides whether `mpi` can be measured (README.md
says how to start Intel MPI). What cannot run here is named in `missing`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from step import HERE, LEARNING_TOLERANCE, device_slug, make_record

from distmlp.tools.bench import PRESETS, find_preset

TRANSPORTS = ("peer", "nccl", "mpi", "staged")
SUBJECTS = (*TRANSPORTS, "jax", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma separated; also WIDTHS@BATCH")
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256, help="of rows, about (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for everything (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: results/GPUxRANKS-step.json beside this program")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in options.subjects.split(","):
            out = Path(folder) / f"{subject}.jsonl"
            began = time.monotonic()
            run(subject, options, out, end - began)
            print(f"{subject}: {time.monotonic() - began:.0f} s", flush=True)
            lines += [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    record = ranks_record(lines, options.presets.split(","), options.ranks)
    path = options.out or HERE / "results" / f"{device_slug(record['device'])}x{options.ranks}-step.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    for complaint in (*record["missing"], *record["learning"]):
        print(complaint)
    print(f"{len(record['rows'])} rows in {path}")
    return 1 if record["missing"] or record["learning"] else 0


def run(subject: str, options: argparse.Namespace, out: Path, seconds: float) -> None:
    """One subject, all presets."""
    program = "distmlp_ranks" if subject in TRANSPORTS else {"jax": "jax", "torch": "torch_ranks"}[subject]
    command = [sys.executable, str(HERE / f"subject_{program}.py"), "--presets", options.presets, "--out", str(out)]
    command += ["--ranks", str(options.ranks), "--megabytes", str(options.megabytes)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "BENCHMARK_TRANSPORT": subject}
    if subject in TRANSPORTS:
        command = ["mpirun", "-n", str(options.ranks), *command]
    try:
        subprocess.run(command, env=environment, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        print(f"{subject}: out of time", flush=True)


def ranks_record(lines: list[dict[str, Any]], presets: list[str], ranks: int) -> dict[str, Any]:
    """The results file; see `Records` in README. `distmlp` of a preset is the row of its fastest transport."""
    record = make_record(lines, [find_preset(name) for name in presets], "bf16")
    losses = {(line["preset"], line["subject"]): line["losses"] for line in lines if "losses" in line}
    for row in record["rows"]:
        row["ranks"] = ranks
        if row["subject"].startswith("distmlp-"):
            row["subject"] = "distmlp"
    measured = {(row["preset"], row.get("transport")) for row in record["rows"]}
    failed = [text for text in record["missing"] if "distmlp was not measured" not in text]
    absent = [f"{p}: {t} was not measured" for p in presets for t in TRANSPORTS if (p, t) not in measured]
    record["missing"] = failed + absent
    record["learning"] = [
        f"{preset} {subject}: loss {values[step]:.6g} at step {step}, by peer memory {own[step]:.6g}"
        for (preset, subject), values in losses.items()
        if (own := losses.get((preset, "distmlp-peer")))
        for step in (0, len(own) - 1)
        if abs(values[step] / own[step] - 1) > LEARNING_TOLERANCE
    ]
    return record


if __name__ == "__main__":
    sys.exit(main())
