"""Time of a training step on several GPUs of one host: distmlp by every transport, JAX (sharded scan), PyTorch DDP.

`python tests/benchmarks/ranks.py` writes results/GPUxRANKS-step.json, the batch a GPU as in the presets. `alone` is
distmlp and JAX taking the same steps on one GPU, each on a GPU of its own: what a step on several is compared with.
Then all subjects one after the other, every transport in processes of its own; the file is written after each, so that
it holds what was measured whatever happens later, and a call with the same --keep adds to what another one measured on
the same machine. mpirun is the one on PATH; its make decides whether `mpi` can be measured (README.md says how to start
Intel MPI). `--warm-only` fills the compilers' caches in --caches, side by side. `--add-alone results/GPU-step.json`
takes the steps on one GPU from there. `--share-gpu --devices 0 --subjects distmlp-ranks` tries the program where there
is one GPU: the ranks take turns there, so times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from step import HERE, LEARNING_TOLERANCE, PRECISIONS, Session, device_slug, make_record

from distmlp.tools.bench import PRESETS, Preset, find_preset

TRANSPORTS = ("peer", "nccl", "mpi", "staged")
ALONE = ("distmlp", "jax")  # one GPU each
SUBJECTS = ("alone", "distmlp-ranks", "jax", "torch-ranks")


@dataclass(frozen=True)
class Ranks:
    """What all subjects of a run share."""

    session: Session
    ranks: int
    transports: tuple[str, ...]
    launcher: tuple[str, ...]
    block_seconds: float
    share_gpu: bool

    def run(
        self,
        subject: str,
        ranks: int,
        presets: tuple[Preset, ...],
        warm: bool = False,
        device: str = "",
        end: float = 0,
        transport: str = "",
    ) -> None:
        """One process a subject, or as many as it has ranks, until `end` of time.monotonic()."""
        session = self.session
        command = [sys.executable, str(HERE / f"subject_{subject.replace('-', '_')}.py")]
        command += ["--presets", ",".join(p.name for p in presets), "--precision", session.precision]
        command += ["--ranks", str(ranks), "--megabytes", str(session.megabytes * ranks)]
        command += ["--block-seconds", str(self.block_seconds)]
        command += ["--out", str(self.out("warm" if warm else subject, ranks)), *(["--warm"] if warm else [])]
        environment = session.environment(device or ",".join(session.devices))
        if transport:
            command = [*self.launcher, *command]
            environment |= {"BENCHMARK_TRANSPORT": transport, "BENCHMARK_SHARE_GPU": str(int(self.share_gpu))}
        name = f"{subject} on {ranks}" + (f" by {transport}" if transport else "")
        began = time.monotonic()
        with (session.folder / "log").open("a") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log if warm else None, stderr=log, start_new_session=True
            )
            try:
                process.wait(max(1.0, (end or session.end) - began))
            except subprocess.TimeoutExpired:
                print(f"{name}{' (compiling)' if warm else ''}: out of time", flush=True)
                process.terminate()  # a launcher ends its ranks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not warm:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    def out(self, subject: str, ranks: int) -> Path:
        return self.session.folder / f"{subject}-{ranks}.jsonl"

    def warm_up(self, subjects: list[str], workers: int) -> None:
        """Compile everything, `workers` processes at a time, the largest problems first."""
        kinds = [(s, self.ranks) for s in subjects if s in ("distmlp-ranks", "jax")]
        kinds += [(subject, 1) for subject in ALONE if "alone" in subjects]
        largest = sorted(self.session.presets, key=lambda preset: -preset.limit_us)
        jobs = [(subject, ranks, preset) for preset in largest for subject, ranks in kinds]
        began = time.monotonic()

        def job(number: int) -> None:
            subject, ranks, preset = jobs[number]
            devices = self.session.devices
            device = "" if ranks > 1 and subject == "jax" else devices[number % len(devices)]
            self.run(subject, ranks, (preset,), True, device)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(job, range(len(jobs))))
        print(f"compilers done after {time.monotonic() - began:.0f} s", flush=True)

    def alone(self) -> None:
        """One GPU a subject, side by side where there are two."""
        devices = self.session.devices

        def turns(place: int) -> None:
            for subject in ALONE[place :: len(devices)]:
                self.run(subject, 1, self.session.presets, device=devices[place])

        with ThreadPoolExecutor(len(devices)) as pool:
            list(pool.map(turns, range(len(devices))))

    def turns(self, subjects: list[str]) -> list[tuple[str, str]]:
        """`(subject, transport)` in the order in which they are measured."""
        each = {"distmlp-ranks": self.transports}
        return [(subject, transport) for subject in subjects for transport in each.get(subject, ("",))]

    def record(self) -> dict[str, Any]:
        """The results file of what was measured so far."""

        def lines(subject: str, ranks: int) -> list[dict[str, Any]]:
            path = self.out(subject, ranks)
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

        together = [line for subject in SUBJECTS[1:] for line in lines(subject, self.ranks)]
        alone = [line for subject in ALONE for line in lines(subject, 1)]
        presets = list(self.session.presets)
        return ranks_record(together, alone, presets, self.ranks, self.transports, self.session.precision)


def main() -> int:
    options = parse()
    if options.add_alone:
        record = with_alone(json.loads(options.out.read_text()), json.loads(options.add_alone.read_text()))
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    end = time.monotonic() + options.seconds
    presets = tuple(find_preset(name) for name in options.presets.split(","))
    subjects = options.subjects.split(",")
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        session = Session(
            presets, options.precision, kept, options.caches or Path(folder), tuple(options.devices.split(",")),
            options.megabytes, end,
        )  # fmt: skip
        launcher = tuple(options.launcher.replace("{ranks}", str(options.ranks)).split())
        run = Ranks(
            session, options.ranks, tuple(options.transports.split(",")), launcher, options.block_seconds,
            options.share_gpu,
        )  # fmt: skip
        if options.warm or options.warm_only:
            run.warm_up(subjects, options.warm or os.cpu_count() or 1)
        if options.warm_only:
            print((session.folder / "log").read_text()[-3000:])
            return 0
        path = options.out
        turns = run.turns(subjects)
        for number, (subject, transport) in enumerate(turns, 1):
            if subject == "alone":
                run.alone()
            else:
                later = len(turns) - number  # the last ones must get something too
                run.run(subject, options.ranks, presets, end=end - later * options.reserve, transport=transport)
            record = run.record()
            path = path or HERE / "results" / f"{device_slug(record['device'])}x{options.ranks}-step.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
        if record["missing"]:
            print((session.folder / "log").read_text()[-6000:])
    for complaint in (*record["missing"], *record["learning"]):
        print(complaint)
    print(f"{len(record['rows'])} rows in {path}")
    return 1 if record["missing"] or record["learning"] else 0


def with_alone(record: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """`record` with the steps on one GPU that step.py measured, where it has none of its own. Raises SystemExit where
    the two are of other kernels, GPUs or precisions."""
    for key in ("kernel_sha256", "device", "driver"):
        if record[key] != single[key]:
            raise SystemExit(f"{key} differs: {record[key]} and {single[key]}")
    have = {(row["preset"], row["subject"]) for row in record["rows"] if row["ranks"] == 1}
    together = {row["preset"]: row["precision"] for row in record["rows"]}
    taken = [
        row for row in single["rows"]
        if row["subject"] in ("distmlp", "jax-scan") and together.get(row["preset"]) == row["precision"]
        and (row["preset"], row["subject"]) not in have
    ]  # fmt: skip
    order = list(together)
    rows = sorted(record["rows"] + taken, key=lambda row: (order.index(row["preset"]), row["ranks"]))
    names = {row["preset"] for row in rows if row["ranks"] == 1 and row["subject"] == "distmlp"}
    missing = [text for text in record["missing"] if "(one GPU)" not in text or text.split(":")[0] not in names]
    return {**record, "rows": rows, "missing": missing}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma separated; also WIDTHS@BATCH")
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="default: %(default)s")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the matrix products")
    parser.add_argument("--devices", default="0,1", help="that the ranks have, comma separated (default: %(default)s)")
    parser.add_argument("--launcher", default="mpirun -n {ranks}", help="default: %(default)s")
    parser.add_argument("--megabytes", type=int, default=256, help="of rows a GPU, about (default: %(default)s)")
    parser.add_argument("--block-seconds", type=float, default=0.05, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for everything (default: %(default)s)")
    parser.add_argument("--reserve", type=float, default=40, help="of them, for every measurement still to come")
    parser.add_argument("--share-gpu", action="store_true", help="ranks may share one: to try, not to measure")
    parser.add_argument("--warm", type=int, default=min(32, os.cpu_count() or 1), help="compilers at a time; 0: none")
    parser.add_argument("--keep", type=Path, help="folder of what was measured; default: a temporary one")
    parser.add_argument("--caches", type=Path, help="folder of the compilers' caches; default: a temporary one")
    parser.add_argument("--warm-only", action="store_true", help="fill --caches, measure nothing")
    parser.add_argument(
        "--add-alone", type=Path, metavar="FILE", help="measure nothing: put step.py's results into --out"
    )
    parser.add_argument("--out", type=Path, help="default: results/GPUxRANKS-step.json beside this program")
    return parser.parse_args()


def ranks_record(
    lines: list[dict[str, Any]], alone: list[dict[str, Any]], presets: list[Preset], ranks: int,
    transports: tuple[str, ...] = TRANSPORTS, precision: str = "bf16",
) -> dict[str, Any]:  # fmt: skip
    """The results file; see `Records` in README: rows of `ranks`, and of one GPU (`alone`). Pure but for its stamp."""
    record = make_record(lines, presets, precision)
    learnt = {(line["preset"], line["subject"]): line for line in lines if "losses" in line}
    for row in record["rows"]:
        row["ranks"] = ranks
        if row["subject"].startswith("distmlp-"):
            row["subject"] = "distmlp"
    measured = {(row["preset"], row.get("transport")) for row in record["rows"]}
    failed = [text for text in record["missing"] if "distmlp was not measured" not in text]
    absent = [f"{p.name}: {t} was not measured" for p in presets for t in transports if (p.name, t) not in measured]
    single = make_record(alone, presets, precision)
    order = [preset.name for preset in presets]
    record["rows"] = sorted(single["rows"] + record["rows"], key=lambda row: (order.index(row["preset"]), row["ranks"]))
    record["missing"] = failed + absent + [f"{text} (one GPU)" for text in single["missing"]]
    record["learning"] = single["learning"] + [
        f"{preset} {subject}: loss {values[step]:.6g} at step {step}, by peer memory {own[step]:.6g}"
        for (preset, subject), line in learnt.items()
        if (peer := learnt.get((preset, "distmlp-peer")))
        and peer.get("batches") == line.get("batches")  # the same rows
        for values, own in [(line["losses"], peer["losses"])]
        for step in (0, len(own) - 1)
        if abs(values[step] / own[step] - 1) > LEARNING_TOLERANCE
    ]
    return record


if __name__ == "__main__":
    sys.exit(main())
