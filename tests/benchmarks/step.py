"""Time of a training step on one GPU for every preset: distmlp, PyTorch and JAX, in one run on one machine.

`python tests/benchmarks/step.py` writes results/GPU-step.json; report.py makes tables and charts from it. Float32
master weights, mean squared error, Adam, the same data and initial weights for all; products in bf16, or as
--precision says (results/GPU-step-PRECISION.json). `--random 30` draws networks and batches instead of the presets
(results/GPU-shapes.json). The subjects' compilers run first, side by side; then each subject in turn has the GPU to
itself. With several --devices the subjects are dealt out to them, each still alone on its GPU. A subject that fails
or runs out of time leaves what it had measured, and the file says what is missing.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from shapes import draw_shapes

from distmlp.tools.bench import PRESETS, Preset, find_preset

HERE = Path(__file__).parent
SUBJECTS = ("distmlp", "torch", "jax")
SHAPE_SUBJECTS = ("distmlp", "jax")
PRECISIONS = ("bf16", "tf32", "fp32")
LEARNING_TOLERANCE = 0.03  # of the loss after the last step of the learning check, relative to distmlp's
PACKAGES = ("distmlp", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "jaxlib", "numpy")
COMPILING_SHARE = 0.45  # of the time, at most


@dataclass(frozen=True)
class Session:
    """What all subjects of a run share."""

    presets: tuple[Preset, ...]
    precision: str
    folder: Path  # for results
    caches: Path  # of the compilers
    devices: tuple[str, ...]  # CUDA ordinals
    megabytes: int
    end: float  # of time.monotonic()

    def run(self, subject: str, presets: tuple[Preset, ...], out: Path, device: str, warm: bool, end: float) -> None:
        """One process of a subject, until `end`. `warm`: it only fills its compilers' caches."""
        command = [sys.executable, str(HERE / f"subject_{subject}.py"), "--out", str(out)]
        command += ["--presets", ",".join(p.name for p in presets), "--precision", self.precision]
        command += ["--megabytes", str(self.megabytes), *(["--warm"] if warm else [])]
        log = (self.folder / f"{subject}.log").open("a")
        try:
            subprocess.run(
                command, env=self.environment(device), timeout=max(1.0, end - time.monotonic()),
                stdout=log if warm else None, stderr=log,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{subject}{' (compiling)' if warm else ''}: out of time", flush=True)

    def environment(self, device: str) -> dict[str, str]:
        """Compilers keep what they made for the measuring processes."""
        return {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": device,
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.caches / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XDG_CACHE_HOME": str(self.caches),
        }

    def warm_up(self, subjects: list[str], workers: int, share: float) -> None:
        """Compile everything, `workers` processes at a time, the largest problems first; takes `share` of the time."""
        largest = sorted(self.presets, key=lambda preset: -preset.limit_us)
        jobs = [(subject, preset) for preset in largest for subject in subjects]
        started = time.monotonic()
        end = started + share * (self.end - started)

        def job(number: int) -> None:
            (subject, preset), device = jobs[number], self.devices[number % len(self.devices)]
            self.run(subject, (preset,), self.folder / "warm.jsonl", device, True, end)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(job, range(len(jobs))))
        print(f"compilers done after {time.monotonic() - started:.0f} s", flush=True)

    def measure(self, subjects: list[str]) -> list[dict[str, Any]]:
        """All lines that the subjects wrote; each has its GPU to itself while it measures."""
        outs = {subject: self.folder / f"{subject}.jsonl" for subject in subjects}

        def turns(number: int) -> None:
            for subject in subjects[number :: len(self.devices)]:
                began = time.monotonic()
                self.run(subject, self.presets, outs[subject], self.devices[number], False, self.end)
                print(f"{subject}: {time.monotonic() - began:.0f} s", flush=True)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            list(pool.map(turns, range(len(self.devices))))
        return [json.loads(line) for out in outs.values() if out.exists() for line in out.read_text().splitlines()]


def main() -> int:
    options = parse()
    presets = [find_preset(name) for name in options.presets.split(",")]
    subjects = options.subjects.split(",") if options.subjects else list(SUBJECTS)
    if options.random:
        presets = draw_shapes(options.random, options.seed)
        subjects = options.subjects.split(",") if options.subjects else list(SHAPE_SUBJECTS)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            tuple(presets), options.precision, Path(folder), options.caches or Path(folder),
            tuple(options.devices.split(",")), options.megabytes, time.monotonic() + options.seconds,
        )  # fmt: skip
        if options.warm:
            session.warm_up(subjects, options.warm, 1.0 if options.warm_only else COMPILING_SHARE)
        if options.warm_only:
            return 0
        lines = session.measure(subjects)
        logs = {subject: (Path(folder) / f"{subject}.log").read_text() for subject in subjects}
    record = make_record(lines, presets, options.precision)
    kind = "shapes" if options.random else "step"
    name = "-".join(
        [device_slug(record["device"]), kind, *([options.precision] if options.precision != "bf16" else [])]
    )
    out = options.out or HERE / "results" / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for complaint in (*record["missing"], *record["learning"]):
        print(complaint)
    if record["missing"]:
        print(*(f"{subject}: …{log[-1500:]}" for subject, log in logs.items() if "Traceback" in log), sep="\n")
    print(f"{len(record['rows'])} rows in {out}")
    return 1 if record["missing"] or record["learning"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma separated; also WIDTHS@BATCH")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="so many random networks instead")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--subjects", default="", help=f"default: {','.join(SUBJECTS)}; --random: without torch")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the matrix products")
    parser.add_argument("--devices", default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0", help="comma separated")
    parser.add_argument("--megabytes", type=int, default=2048, help="of rows, about (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="for everything (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=min(32, os.cpu_count() or 1), help="compilers at a time; 0: none")
    parser.add_argument("--caches", type=Path, help="folder of the compilers' caches; default: a temporary one")
    parser.add_argument("--warm-only", action="store_true", help="fill --caches, measure nothing")
    parser.add_argument("--out", type=Path, help="default: results/GPU-step.json beside this program")
    return parser.parse_args()


def make_record(lines: list[dict[str, Any]], presets: list[Preset], precision: str) -> dict[str, Any]:
    """The results file; see `Records` in README. `missing` and `learning` are empty when all is well."""
    from distmlp.engine.compile import kernel_sha256

    rows, missing = [], [f"{line['preset']}: {line['failed']}" for line in lines if "failed" in line]
    losses = {(line["preset"], line["subject"]): line["losses"] for line in lines if "losses" in line}
    by_name = {preset.name: preset for preset in presets}
    for line in lines:
        if "losses" not in line:
            continue
        preset = by_name[line["preset"]]
        fixed = {"layers": list(preset.layers), "batch": preset.batch, "precision": precision, "optimizer": "adam"}
        measured = {key: value for key, value in line.items() if key not in ("preset", "losses")}
        rows.append({"preset": preset.name, **fixed, "ranks": 1, **measured, "loss_after": line["losses"][-1]})
    missing += [f"{p}: distmlp was not measured" for p in by_name if (p, "distmlp") not in losses]
    name, driver = gpu()
    return {
        "kernel_sha256": kernel_sha256(),
        "device": name,
        "driver": driver,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "limits_us": {p.name: round(p.limit_us, 2) for p in presets} if precision == "bf16" else {},
        "missing": missing,
        "learning": disagreements(losses),
        "rows": sorted(rows, key=lambda row: list(by_name).index(row["preset"])),
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
