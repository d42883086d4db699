"""`distmlp scaling`: train at several rank counts, or read finished runs, and report how well it scales."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distmlp.comm.device_probe import DeviceProbe
from distmlp.comm.hints import read_launch
from distmlp.comm.threads import USER_VARIABLES
from distmlp.config import RunConfig
from distmlp.errors import ConfigError, DistmlpError, SystemUnfitError
from distmlp.tools.launcher import launch_command
from distmlp.tools.scaling_build import build_report
from distmlp.tools.scaling_model import AllReduce
from distmlp.tools.scaling_report import require_packages, write_report
from distmlp.tools.scaling_runs import FinishedRun, modes_of

BLOCKS = 7  # timed blocks a point, beside the first log interval, which is warm-up
BLOCK_SECONDS = 0.3
CALIBRATION_STEPS = 20  # in a block of the short run that finds how long a step takes
NEVER = "1000000000 steps"
MODES = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}


class ChildFailed(DistmlpError):
    """A run of the sweep ended with a fault; it has the exit code of that run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Sweep:
    """What all runs of a sweep share."""

    configuration: Path
    overrides: tuple[str, ...]
    launcher: str
    directory: Path
    environment: dict[str, str]
    timed: tuple[str, ...]  # --set words that give the runs their length

    def train(self, name: str, ranks: int, batch: int, streams: int) -> FinishedRun:
        """Run one point and read what it left. Raises ChildFailed with its last words."""
        output = self.directory / name
        settings = [*self.overrides, f"data.batch={batch}", f"data.streams={streams}", *self.timed]
        command = ["train", str(self.configuration), "--output", str(output), "--overwrite"]
        for setting in settings:
            command += ["--set", setting]
        self.start(ranks, ["-m", "distmlp", *command], f"{name}, {ranks} ranks")
        shutil.rmtree(output / "checkpoints", ignore_errors=True)  # may be large, and nobody asked for them
        return FinishedRun.read(output)

    def start(self, ranks: int, python_arguments: Sequence[str], what: str) -> str:
        """Run this Python as `ranks` processes; returns what it printed. Raises ChildFailed, SystemUnfitError."""
        prefix = launch_command(ranks, self.launcher) if ranks > 1 or self.launcher else []
        command = [*prefix, sys.executable, *python_arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=self.environment, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise SystemUnfitError(f"scaling, {what}: cannot start {command[0]}: {error.strerror}") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
            text = "\n".join(f"  {line}" for line in said)
            words = " ".join(command[: len(prefix) + 1])
            raise ChildFailed(
                f"scaling, {what}: `{words} …` ended with code {done.returncode}:\n{text}",
                _exit_code(done.returncode, done.stderr),
            )
        return done.stdout


def run_scaling(
    run: Path | None,
    ranks: str,
    mode: str,
    out: Path,
    *,
    from_: Sequence[Path] = (),
    set_: Sequence[str] = (),
    launcher: str = "",
    steps: int = 0,
    target_loss: float | None = None,
) -> int:
    """Sweep over `ranks` ("1,2,4") and write the report to `out`; or report on the finished runs `from_`.

    `mode`: weak keeps the batch per rank, strong the global batch, both does both. `set_`: overrides for every
    run. `launcher`: a launch line instead of the one found. `steps`: steps of a point, warm-up included (0: as many
    as give blocks of about 0.3 s). `target_loss`: the runs go their configured length, and the report says when
    each first reached this loss. Returns 0. Raises DistmlpError; a point that fails ends the sweep, with a report on
    those before it where there are any.
    """
    require_packages()
    if from_:
        report = build_report(modes_of([FinishedRun.read(path) for path in from_]), target_loss=target_loss)
        return _conclude(report, out)
    if run is None:
        raise ConfigError("scaling: give a RUN.toml, or finished runs with --from")
    if mode not in MODES:
        raise ConfigError(f"scaling --mode {mode}: expected weak, strong or both")
    if (launch := read_launch()) is not None and launch.live:
        raise ConfigError(f"scaling starts its ranks itself; run it without {launch.launcher}")
    config = RunConfig.load(run, set_)
    counts = _counts(ranks)
    sweep = Sweep(
        run.absolute(), tuple(set_), launcher, (out / "runs").absolute(), _environment(max(counts)),
        _settings(steps, config, target_loss),
    )  # fmt: skip
    if not sweep.timed:
        sweep = _calibrated(sweep, config, max(counts))
    return _sweep(sweep, config, counts, MODES[mode], out, target_loss)


def _exit_code(code: int, said: str) -> int:
    """The child's own code where it is one of ours; a launcher's is this environment's fault."""
    if code in (2, 3, 4, 5, 75):
        return code
    return 1 if "Traceback (most recent call last)" in said else SystemUnfitError.exit_code


def _sweep(
    sweep: Sweep, config: RunConfig, counts: Sequence[int], modes: Sequence[str], out: Path, target_loss: float | None
) -> int:
    batch, streams = config.data.batch, max(config.data.streams, *counts)
    points: list[tuple[str, FinishedRun]] = []
    exchanges: list[AllReduce] = []
    notes = _thread_notes(sweep.environment, max(counts))
    try:
        alone = sweep.train("ranks-1", 1, batch, streams)
        points = [(mode, alone) for mode in modes]
        _tell("ranks-1", alone)
        for count in counts[1:]:
            for mode in modes:
                name = f"{mode}-ranks-{count}"
                finished = sweep.train(name, count, batch * count if mode == "weak" else batch, streams)
                points.append((mode, finished))
                _tell(name, finished)
            exchanges += _exchanges(sweep, count, alone, notes)
    except ChildFailed as failure:
        if points:
            print(f"the sweep ended early; the report in {out} holds the points before that")
            _conclude(build_report(points, exchanges, target_loss, [*notes, f"ended early: {failure}"]), out)
        raise
    return _conclude(build_report(points, exchanges, target_loss, notes), out)


def _conclude(report: dict, out: Path) -> int:
    write_report(report, out)
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    print(f"wrote {out / 'report.json'}, report.html, speedup.png, speedup.svg")
    return 0


def _tell(name: str, run: FinishedRun) -> None:
    blocks = run.blocks()
    times = [1e6 * block.seconds / block.steps for block in blocks]
    print(
        f"{name}: {np.median(times):,.1f} µs a step ({min(times):,.1f} to {max(times):,.1f} in {len(blocks)} blocks "
        f"of {blocks[0].steps})",
        flush=True,
    )


def _counts(text: str) -> list[int]:
    """Rank counts, ascending, the one-rank baseline always among them."""
    if not re.fullmatch(r"[1-9]\d{0,6}(\s*,\s*[1-9]\d{0,6})*", text.strip()):
        raise ConfigError(f"scaling --ranks {text}: expected rank counts such as 1,2,4")
    return sorted({1, *map(int, text.split(","))})


def _settings(steps: int, config: RunConfig, target_loss: float | None) -> tuple[str, ...]:
    """The --set words of a timed run; none where its length is still to be found."""
    if target_loss is not None:  # to the end as configured, or the target would be missed
        return (f"run.checkpoint_every={NEVER}", "run.tensorboard=false")
    if not steps:
        return ()
    block = steps // (BLOCKS + 1)
    if block < 1:
        raise ConfigError(f"scaling --steps {steps}: expected at least {BLOCKS + 1}: {BLOCKS} blocks and a warm-up")
    return _timed(block, BLOCKS + 1)


def _timed(block_steps: int, blocks: int) -> tuple[str, ...]:
    return (
        f"run.steps={block_steps * blocks}", f"run.log_every={block_steps}", f"run.checkpoint_every={NEVER}",
        f"run.validate_every={NEVER}", "run.early_stopping=0", "run.tensorboard=false", "data.validation=",
    )  # fmt: skip


def _calibrated(sweep: Sweep, config: RunConfig, most: int) -> Sweep:
    """The sweep with blocks of about `BLOCK_SECONDS`, by the step time of a short one-rank run."""
    with tempfile.TemporaryDirectory(prefix="distmlp-scaling-") as directory:
        trial = replace(sweep, directory=Path(directory), timed=_timed(CALIBRATION_STEPS, 3))
        block = trial.train("calibration", 1, config.data.batch, max(config.data.streams, most)).blocks()[-1]
    steps = int(np.clip(BLOCK_SECONDS * block.steps / block.seconds, 5, 20000))
    return replace(sweep, timed=_timed(steps, BLOCKS + 1))


def _environment(most: int) -> dict[str, str]:
    """The same number of BLAS threads a rank in every run, or one rank alone would use the cores of all."""
    environment = dict(os.environ)
    if not any(variable in environment for variable in USER_VARIABLES):
        nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        threads = max(1, _cores() * nodes // most)
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = str(threads)
    return environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _thread_notes(environment: dict[str, str], most: int) -> list[str]:
    cores = _cores()
    if "SLURM_JOB_ID" in environment or most <= cores:
        return []
    return [f"{most} ranks were to share {cores} cores: beyond {cores} ranks the CPU itself limits speed-up"]


def _exchanges(sweep: Sweep, ranks: int, alone: FinishedRun, notes: list[str]) -> list[AllReduce]:
    """All-reduces over `ranks` ranks, measured by themselves in runs of their own; a note where that fails."""
    ways = ["host"]
    if alone.summary["engine"] == "fused":
        ways += ["device MPI"] if DeviceProbe().result().works else []
        ways += ["NCCL"] if importlib.util.find_spec("cupy_backends.cuda.libs.nccl") else []
    found = []
    for way in ways:
        arguments = ["-m", "distmlp.tools.scaling_exchange", str(4 * alone.network.parameter_count), way]
        try:
            said = sweep.start(ranks, arguments, f"{way} all-reduce, {ranks} ranks")
            times = json.loads(said.strip().splitlines()[-1])
        except (ChildFailed, ValueError, IndexError) as failure:
            notes.append(f"the {way} all-reduce over {ranks} ranks was not measured by itself: {failure}")
            continue
        found += [AllReduce(ranks, size, us, way) for _, size, us in times]
    return found
