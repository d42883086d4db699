"""Scaling reports of the network presets over one and two GPUs, weak and strong, with every transport.

    python tests/benchmarks/scaling.py [--presets seed-1024] [--transports peer,nccl,mpi,staged] [--launcher LINE]
    python tests/benchmarks/scaling.py --draw [--readme README.md]

The first trains through `distmlp train`, as `distmlp scaling` does, on shards of random rows, and writes
results/scaling/GPUxRANKS-PRESET-TRANSPORT/report.json; one one-rank run serves all transports of a preset. `--warm`
beforehand compiles the kernels of all points, side by side, and measures nothing. The second makes report.html,
speedup.png and speedup.svg of every report.json there, and the overview results/GPUxRANKS-scaling.md, .svg and .png,
which goes into the README between its marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import h5py
from scaling_overview import draw
from step import device_slug

from distmlp.engine.compile import kernel_sha256
from distmlp.errors import DistmlpError
from distmlp.tools.bench import Preset, find_preset, make_rows
from distmlp.tools.scaling import tell
from distmlp.tools.scaling_build import build_report
from distmlp.tools.scaling_runs import FinishedRun
from distmlp.tools.scaling_sweep import Findings, Sweep, child_environment, timed

RESULTS = Path(__file__).parent / "results"
MODES = ("weak", "strong")
MOST_BATCHES, MOST_BYTES = 100, 1 << 29  # of the weak sweep's largest batch
WARM_STEPS = timed(1, 2)

CONFIG = """
[model]
layers = {layers}
[data]
train = "rows.h5"
batch = {batch}
standardize = "none"
[run]
precision = "{precision}"
output = "run"
"""


def prepare(preset: Preset, folder: Path, ranks: int, precision: str) -> Path:
    """Rows and a configuration in `folder`; returns the latter. What is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "run.toml"
    if not configuration.exists():
        a_batch = 4 * preset.batch * ranks * (preset.layers[0] + preset.layers[-1])
        batches = max(2, min(MOST_BATCHES, MOST_BYTES // a_batch))
        rows = make_rows(preset, ranks * batches)
        with h5py.File(folder / "rows.h5", "w") as file:
            file["inputs"], file["targets"] = rows.inputs, rows.targets
        configuration.write_text(CONFIG.format(layers=list(preset.layers), batch=preset.batch, precision=precision))
    return configuration


def warm_up(sweep: Sweep, preset: Preset, ranks: int, transports: list[str]) -> None:
    """Compile the kernels of all points by a step or two of each, side by side; faults will show when measuring."""
    jobs = [("one", 1, preset.batch), ("half", 1, -(-preset.batch // ranks))]
    kinds = {"kernel": "peer", "host": next((t for t in transports if t != "peer"), "")}
    jobs += [(f"{t}-weak", ranks, preset.batch * ranks) for t in kinds.values() if t in transports]
    jobs += [(f"{t}-strong", ranks, preset.batch) for t in kinds.values() if t in transports]

    def run(job: tuple[str, int, int]) -> None:
        name, count, batch = job
        short = Sweep(sweep.configuration, (f"run.transport={name.split('-')[0]}",) if count > 1 else (),
                      sweep.launcher, sweep.directory / "warm", sweep.environment, WARM_STEPS)  # fmt: skip
        try:
            short.train(name, count, batch, 16)
        except DistmlpError as error:
            print(f"warm-up {name}: {error}", flush=True)

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(run, jobs))


def measure(sweep: Sweep, preset: Preset, ranks: int, transports: list[str], out: Path) -> None:
    """One report for one rank, and one for every transport, into folders of `out`."""
    began = time.monotonic()
    alone = sweep.train("ranks-1", 1, preset.batch, 16, step_seconds=1e-6 * max(10.0, 2 * preset.limit_us))
    tell(f"{preset.name} ranks-1", alone)
    gpu = device_slug(alone.summary["devices"][0]["name"]) if alone.summary.get("devices") else "cpu"
    store(build_report([("weak", alone)]), out / f"{gpu}-{preset.name}")
    if ranks == 1:
        return
    shared = Findings()
    shared.time_all_reduces(sweep, ranks, alone)
    references: list[FinishedRun] = []
    for transport in transports:
        found = Findings(references=references, exchanges=list(shared.exchanges), notes=list(shared.notes))
        print(f"[{time.monotonic() - began:.1f} s] {preset.name}, {transport}", flush=True)
        try:
            chosen = replace(sweep, overrides=(*sweep.overrides, f"run.transport={transport}"))
            found.run_points(chosen, [1, ranks], MODES, alone, tell)
        except DistmlpError as error:
            print(f"{transport}: {error}", flush=True)
            continue
        references = found.references
        report = build_report(found.points, found.exchanges, None, found.notes, found.references)
        store(report, out / f"{gpu}x{ranks}-{preset.name}-{transport}")
    print(f"[{time.monotonic() - began:.1f} s] {preset.name} done", flush=True)


def store(report: dict[str, Any], folder: Path) -> None:
    """Write `report.json`, without the folders of the machine it was measured on, and with the kernels it is of."""
    report["kernel_sha256"] = kernel_sha256()
    report["config"]["data"]["train"] = "rows.h5"
    report["config"]["run"]["output"] = "run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="seed-1024", help="comma separated (default: %(default)s)")
    parser.add_argument("--transports", default="peer,nccl,mpi,staged", help="comma separated (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="beside one; 1: no more than that (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--launcher", default="", help="launch line; default: the mpirun that is found")
    parser.add_argument("--block-seconds", type=float, default=0.06, help="of a timed block (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keeps rows and runs there; default: a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling", help="default: results/scaling")
    parser.add_argument("--warm", action="store_true", help="compile for all points, measure nothing; takes --folder")
    parser.add_argument("--draw", action="store_true", help="pages and pictures of the reports that are in --out")
    parser.add_argument("--readme", type=Path, help="with --draw: to put the overview into")
    options = parser.parse_args()
    if options.draw:
        draw(options.out.absolute(), RESULTS, options.readme)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        transports = options.transports.split(",")
        for name in options.presets.split(","):
            preset, place = find_preset(name), folder.absolute() / name
            sweep = Sweep(
                prepare(preset, place, options.ranks, options.precision), (), options.launcher, place,
                child_environment(options.ranks), (), options.block_seconds,
            )  # fmt: skip
            if options.warm:
                warm_up(sweep, preset, options.ranks, transports)
            else:
                measure(sweep, preset, options.ranks, transports, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
