"""How this machine starts several ranks: `srun` in a Slurm allocation, else `mpirun` beside this Python or on PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from distmlp.errors import ConfigError, SystemUnfitError

NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")


def find_mpirun() -> str | None:
    """Path of `mpirun` or its like; the environment of this Python goes first, as mpi4py's library does."""
    here = str(Path(sys.executable).parent)
    return next((path for name in NAMES for path in (shutil.which(name, path=here), shutil.which(name)) if path), None)


def make_of(mpirun: str) -> str:
    """ "Open MPI", "Intel MPI" or "MPICH": what `mpirun --version` says; "" where it does not run."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    text = (done.stdout + done.stderr).lower()
    marks = {"open mpi": "Open MPI", "openrte": "Open MPI", "intel": "Intel MPI", "hydra": "MPICH", "mpich": "MPICH"}
    return next((make for mark, make in marks.items() if mark in text), "")


def launch_command(ranks: int, wanted: str = "", environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words that go before a command to start it as `ranks` processes.

    `wanted`: the user's own launch line, in which `{ranks}` stands for their number; without it `-n RANKS` is
    appended. Raises ConfigError for a line that cannot be split, SystemUnfitError where there is no launcher.
    """
    if wanted:
        try:
            words = shlex.split(wanted)
        except ValueError as error:
            raise ConfigError(f"--launcher {wanted}: {error}") from None
        if not any("{ranks}" in word for word in words):
            return [*words, "-n", str(ranks)]
        return [word.replace("{ranks}", str(ranks)) for word in words]
    mpirun = find_mpirun()
    if "SLURM_JOB_ID" in environ and shutil.which("srun"):
        wiring = [] if "SLURM_MPI_TYPE" in environ else [f"--mpi={_srun_wiring(mpirun)}"]
        return ["srun", *wiring, "--kill-on-bad-exit=1", "-n", str(ranks)]
    if mpirun is None:
        raise SystemUnfitError(
            f"no launcher: none of {', '.join(NAMES)} is on PATH or beside {sys.executable}; load the cluster's MPI "
            "module, or `pip install 'distmlp[mpich]'`, or name one with --launcher"
        )
    return [mpirun, "-n", str(ranks)]


def _srun_wiring(mpirun: str | None) -> str:
    """What `srun --mpi=` must be for the MPI library here: Open MPI knows PMIx alone, the others PMI-2."""
    return "pmix" if mpirun is not None and make_of(mpirun) == "Open MPI" else "pmi2"
