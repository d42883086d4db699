"""A user's directory on the cluster: a small run to submit, and what jobs leave there."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from launching import PROJECT
from slurm.cluster import Cluster, Job, wait_for

TRAIN = PROJECT / "slurm" / "train.sbatch"
# The lines of train.sbatch that a user adapts, fitted to the pretended nodes.
SMALL = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0", "--time=5")


_RUN = """[model]
hidden = [256, 256]
[data]
train = "train-*.h5"
batch = 256
streams = 4
[run]
steps = 60
engine = "reference"
output = "out"
log_every = 10
checkpoint_every = "100 steps"
"""


@dataclass
class Site:
    """A user's directory on the cluster: shards and `run.toml`, and what jobs leave there."""

    cluster: Cluster
    folder: Path
    jobs: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, cluster: Cluster, folder: Path) -> Site:
        """A run of about a second for two ranks; `--set run.steps=…` makes it longer."""
        generator = np.random.default_rng(7)
        inputs = generator.normal(size=(2048, 32)).astype(np.float32)
        with h5py.File(folder / "train-0.h5", "w") as file:
            file["inputs"] = inputs
            file["targets"] = np.tanh(inputs @ generator.normal(size=(32, 4)).astype(np.float32))
        (folder / "run.toml").write_text(_RUN)
        return cls(cluster, folder)

    def program(self, text: str) -> str:
        """Make `text` the program `distmlp`; returns the PATH that finds it."""
        program = self.folder / "bin" / "distmlp"
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
        return f"{program.parent}:{os.environ['PATH']}"

    def submit(
        self,
        *arguments: str,
        options: tuple[str, ...] = (),
        launcher: str = "pmi2",
        script: Path = TRAIN,
        **variables: str,
    ) -> str:
        """Submit train.sbatch as a user would: options of sbatch, then arguments of `distmlp train`."""
        environment = Path(sys.executable).parent.parent
        variables = {"DISTMLP_LAUNCHER": launcher, "DISTMLP_VENV": str(environment)} | variables
        where = (f"--chdir={self.folder}", f"--output={self.folder}/job-%A_%a.log")
        job = self.cluster.submit(*SMALL, *where, *options, str(script), *arguments, **variables)
        self.jobs.append(job)
        return job

    def cancel(self) -> None:
        """End whatever is left of the jobs that were submitted here."""
        if self.jobs:
            self.cluster.call(["scancel", "--full", *self.jobs])

    def train(self, *arguments: str, options: tuple[str, ...] = (), launcher: str = "pmi2", **variables: str) -> Job:
        """Submit and wait for the end."""
        job = self.submit("run.toml", *arguments, options=options, launcher=launcher, **variables)
        return self.cluster.wait(job, 90)

    def log(self) -> str:
        """What all jobs printed so far."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("job-*.log")))

    def summary(self, output: str = "out") -> dict[str, Any]:
        """The run's `summary.json`; what the jobs printed where there is none."""
        path = self.folder / output / "summary.json"
        assert path.exists(), self.log()
        return json.loads(path.read_text())

    def wait_for_steps(self, steps: int, output: str = "out") -> None:
        """Wait until the run has logged that it passed `steps`."""
        path = self.folder / output / "metrics.jsonl"

        def passed() -> bool:
            lines = path.read_text().splitlines() if path.exists() else []
            return bool(lines) and json.loads(lines[-1])["step"] >= steps

        wait_for(passed, 60, f"step {steps}", self.log)
