"""Time of a training step on one GPU for every preset: distmlp, PyTorch and JAX, in one run on one machine.

`python tests/benchmarks/step.py` writes results/GPU-step.json; report.py makes tables and charts from it. bf16
products with float32 master weights, mean squared error, Adam, the same data and initial weights for all. The
subjects' compilers run first, side by side; then each subject in turn has the GPU to itself. A subject that fails or
runs out of time leaves what it had measured, and the file says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from distmlp.tools.bench import PRESETS

HERE = Path(__file__).parent
SUBJECTS = ("distmlp", "torch", "jax")
SLOWEST_TO_COMPILE_FIRST = tuple(PRESETS)[::-1]
LEARNING_TOLERANCE = 0.03  # of the loss after the last step of the learning check, relative to distmlp's
PACKAGES = ("distmlp", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "jaxlib", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--seconds", type=float, default=480, help="for everything")
    parser.add_argument("--warm", type=int, default=min(12, os.cpu_count() or 1), help="compilers at a time; 0: none")
    parser.add_argument("--out", type=Path, help="default: results/GPU-step.json beside this program")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    presets, subjects = options.presets.split(","), options.subjects.split(",")
    with tempfile.TemporaryDirectory() as folder:
        environment = caches(Path(folder))
        if options.warm:
            warm_up(presets, subjects, Path(folder), environment, options.warm, 0.4 * options.seconds)
        lines: list[dict[str, Any]] = []
        for subject in subjects:
            out = Path(folder) / f"{subject}.jsonl"
            run(subject, presets, out, environment, end - time.monotonic())
            lines += [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    record = make_record(lines, presets)
    out = options.out or HERE / "results" / f"{device_slug(record['device'])}-step.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for complaint in (*record["missing"], *record["learning"]):
        print(complaint)
    print(f"{len(record['rows'])} rows in {out}")
    return 1 if record["missing"] or record["learning"] else 0


def caches(folder: Path) -> dict[str, str]:
    """The environment of all subjects: compilers keep what they made for the measuring processes."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def warm_up(
    presets: list[str], subjects: list[str], folder: Path, environment: dict[str, str], workers: int, seconds: float
) -> None:
    jobs = [(s, p) for p in SLOWEST_TO_COMPILE_FIRST if p in presets for s in subjects]
    end = time.monotonic() + seconds

    def job(pair: tuple[str, str]) -> None:
        run(pair[0], [pair[1]], folder / "warm.jsonl", environment, end - time.monotonic(), ["--warm"], quiet=True)

    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(job, jobs))
    print(f"compilers done after {time.monotonic() - started:.0f} s", flush=True)


def run(
    subject: str, presets: list[str], out: Path, environment: dict[str, str], seconds: float,
    arguments: list[str] | None = None, quiet: bool = False,
) -> None:  # fmt: skip
    command = [sys.executable, str(HERE / f"subject_{subject}.py"), "--presets", ",".join(presets), "--out", str(out)]
    try:
        subprocess.run(
            [*command, *(arguments or [])], env=environment, timeout=max(1.0, seconds),
            stdout=subprocess.DEVNULL if quiet else None, stderr=subprocess.DEVNULL if quiet else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{subject}: out of time", flush=True)


def make_record(lines: list[dict[str, Any]], presets: list[str]) -> dict[str, Any]:
    """The results file; see CONTRACT `Records`. `missing` and `learning` are empty when all is well."""
    from distmlp.engine.compile import kernel_sha256

    rows, missing = [], [f"{line['preset']}: {line['failed']}" for line in lines if "failed" in line]
    losses = {(line["preset"], line["subject"]): line["losses"] for line in lines if "losses" in line}
    for line in lines:
        if "losses" not in line:
            continue
        preset = PRESETS[line["preset"]]
        fixed = {"layers": list(preset.layers), "batch": preset.batch, "precision": "bf16", "optimizer": "adam"}
        measured = {key: value for key, value in line.items() if key not in ("preset", "losses")}
        rows.append({"preset": preset.name, **fixed, "ranks": 1, **measured, "loss_after": line["losses"][-1]})
    missing += [f"{p}: distmlp was not measured" for p in presets if (p, "distmlp") not in losses]
    name, driver = gpu()
    return {
        "kernel_sha256": kernel_sha256(),
        "device": name,
        "driver": driver,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "limits_us": {p: round(PRESETS[p].limit_us, 2) for p in presets},
        "missing": missing,
        "learning": disagreements(losses),
        "rows": sorted(rows, key=lambda row: list(PRESETS).index(row["preset"])),
    }


def disagreements(losses: dict[tuple[str, str], list[float]]) -> list[str]:
    """Subjects whose loss after the learning check is not distmlp's."""
    found = []
    for (preset, subject), values in losses.items():
        own = losses.get((preset, "distmlp"))
        if own is None or subject == "distmlp":
            continue
        for step in (0, len(own) - 1):
            if abs(values[step] / own[step] - 1) > LEARNING_TOLERANCE:
                found.append(f"{preset} {subject}: loss {values[step]:.6g} at step {step}, distmlp {own[step]:.6g}")
    return found


def gpu() -> tuple[str, str]:
    """Name and driver version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
        )
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return "cpu", ""
    return name, driver


def device_slug(name: str) -> str:
    return name.lower().replace("nvidia", "").strip().replace(" ", "-")


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
