"""The runs of a scaling sweep: one child job a point, and all-reduces timed by themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from distmlp.comm.device_probe import DeviceProbe
from distmlp.comm.threads import USER_VARIABLES
from distmlp.config import RunConfig
from distmlp.errors import DistmlpError, SystemUnfitError
from distmlp.tools.launcher import launch_command
from distmlp.tools.scaling_model import AllReduce
from distmlp.tools.scaling_runs import FinishedRun, way_of

BLOCKS = 7  # timed blocks a point, beside the first log interval, which is warm-up
BLOCK_SECONDS = 0.3
CALIBRATION_STEPS = 20  # in a block of the short run that finds how long a step takes
NEVER = "1000000000 steps"


class ChildFailed(DistmlpError):
    """A run of the sweep ended with a fault; it has the exit code of that run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Sweep:
    """What all runs of a sweep share."""

    configuration: Path
    overrides: tuple[str, ...]  # --set words of the user
    launcher: str
    directory: Path  # of the runs
    environment: dict[str, str]
    length: tuple[str, ...] = ()  # --set words that give the runs their length; none: blocks of `block_seconds`
    block_seconds: float = BLOCK_SECONDS

    @property
    def config(self) -> RunConfig:
        return RunConfig.load(self.configuration, self.overrides)

    def train(self, name: str, ranks: int, batch: int, streams: int, step_seconds: float | None = None) -> FinishedRun:
        """Run one point and read what it left. Raises ChildFailed with its last words.

        `step_seconds`: about how long a step takes; None: found out by a short run before.
        """
        length = self.length
        if not length:
            if step_seconds is None:
                step_seconds = self._time_a_step(ranks, batch, streams)
            steps = int(np.clip(self.block_seconds / step_seconds, 5, 20000))
            length = timed(steps, BLOCKS + 1)
        return self._run(self.directory / name, name, ranks, batch, streams, length)

    def _time_a_step(self, ranks: int, batch: int, streams: int) -> float:
        with tempfile.TemporaryDirectory(prefix="distmlp-scaling-") as directory:
            length = timed(CALIBRATION_STEPS, 3)
            block = self._run(Path(directory) / "run", "calibration", ranks, batch, streams, length).blocks()[-1]
        return block.seconds / block.steps

    def _run(self, output: Path, name: str, ranks: int, batch: int, streams: int, length: Sequence[str]) -> FinishedRun:
        settings = [*self.overrides, f"data.batch={batch}", f"data.streams={streams}", *length]
        command = ["train", str(self.configuration), "--output", str(output), "--overwrite"]
        for setting in settings:
            command += ["--set", setting]
        self.start(ranks, ["-m", "distmlp", *command], f"{name}, {ranks} rank{'s' * (ranks > 1)}")
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


@dataclass
class Findings:
    """What a sweep has measured so far."""

    points: list[tuple[str, FinishedRun]] = field(default_factory=list)  # (mode, run)
    references: list[FinishedRun] = field(default_factory=list)  # one-rank runs over the rows that a rank has elsewhere
    exchanges: list[AllReduce] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def time_all_reduces(self, sweep: Sweep, ranks: int, alone: FinishedRun) -> None:
        """All-reduces over `ranks` ranks, by themselves, in runs of their own; a note where that fails."""
        size = 4 * alone.network.parameter_count
        for way in _ways(alone):
            arguments = ["-m", "distmlp.tools.scaling_exchange", str(size), way]
            try:
                said = sweep.start(ranks, arguments, f"{way} all-reduce, {ranks} ranks")
                times = json.loads(said.strip().splitlines()[-1])
            except (ChildFailed, ValueError, IndexError) as failure:
                self.notes.append(f"the {way} all-reduce over {ranks} ranks was not measured by itself: {failure}")
                continue
            self.exchanges += [AllReduce(ranks, size, us, way) for _, size, us in times]

    def run_points(
        self, sweep: Sweep, counts: Sequence[int], modes: Sequence[str], alone: FinishedRun,
        tell: Callable[[str, FinishedRun], None],
    ) -> None:  # fmt: skip
        """One run for every count above 1 and mode, beside `alone`, the one-rank run; each is told as it ends.

        Raises ChildFailed; what was measured before stays.
        """
        config = sweep.config
        batch, streams = config.data.batch, max(config.data.streams, *counts)
        self.points += [(mode, alone) for mode in modes]
        for count in (count for count in counts if count > 1):
            if all(exchange.ranks != count for exchange in self.exchanges):
                self.time_all_reduces(sweep, count, alone)
            guess = _step_seconds(alone) + self._exchange_seconds(count, config.run.transport, alone)
            for mode in modes:
                total = batch * count if mode == "weak" else batch
                run = sweep.train(f"{mode}-ranks-{count}", count, total, streams, guess)
                self.points.append((mode, run))
                tell(f"{mode}-ranks-{count}", run)
                rows = -(-total // count)
                if not way_of(run) and all(rows != other.batch for other in (alone, *self.references)):
                    # the kernel itself exchanges: what that costs shows only beside one rank's step over as many rows
                    self.references.append(sweep.train(f"ranks-1-batch-{rows}", 1, rows, streams, _step_seconds(alone)))
                    tell(f"ranks-1-batch-{rows}", self.references[-1])

    def _exchange_seconds(self, ranks: int, transport: str, alone: FinishedRun) -> float:
        """About what the sum of the gradients takes; the fastest way seen, where it is not known which is taken."""
        size = 4 * alone.network.parameter_count
        times = {e.way: e.us for e in self.exchanges if e.ranks == ranks and e.bytes == size}
        wanted = "host" if alone.summary["engine"] == "reference" else way_of(alone, transport)
        return 1e-6 * times.get(wanted, min(times.values(), default=0.0))


def timed(block_steps: int, blocks: int) -> tuple[str, ...]:
    """The --set words of a run of `blocks` log intervals and nothing else."""
    return (
        f"run.steps={block_steps * blocks}", f"run.log_every={block_steps}", f"run.checkpoint_every={NEVER}",
        f"run.validate_every={NEVER}", "run.early_stopping=0", "run.tensorboard=false", "data.validation=",
    )  # fmt: skip


def child_environment(most: int) -> dict[str, str]:
    """The same number of BLAS threads a rank in every run, or one rank alone would use the cores of all."""
    environment = dict(os.environ)
    if not any(variable in environment for variable in USER_VARIABLES):
        nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        threads = max(1, cores() * nodes // most)
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = str(threads)
    return environment


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _exit_code(code: int, said: str) -> int:
    """The child's own code where it is one of ours; a launcher's is this environment's fault."""
    if code in (2, 3, 4, 5, 75):
        return code
    return 1 if "Traceback (most recent call last)" in said else SystemUnfitError.exit_code


def _step_seconds(run: FinishedRun) -> float:
    return float(np.median([block.seconds / block.steps for block in run.blocks()]))


def _ways(alone: FinishedRun) -> list[str]:
    """How gradients of these runs could be summed outside a kernel, as scaling_exchange.py names it."""
    if alone.summary["engine"] != "fused":
        return ["host"]
    device = ["device MPI"] if DeviceProbe().result().works else []
    nccl = ["NCCL"] if importlib.util.find_spec("cupy_backends.cuda.libs.nccl") else []
    return ["host", *device, *nccl]
