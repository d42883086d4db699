"""How this machine starts several ranks: `srun` in a Slurm allocation, else `mpirun` beside this Python or on PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from distmlp.comm.threads import host_cores
from distmlp.errors import ConfigError, SystemUnfitError

NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")
_RANKS_PER_CORE = 8
# Where mpirun finds the hosts of a job: PBS, LSF, Grid Engine, hydra, Intel MPI, Open MPI 4 and 5.
_HOST_LISTS = (
    "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile",
)  # fmt: skip


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
    appended. Raises ConfigError for a line that cannot be split, SystemUnfitError where
    there is no launcher, and for more ranks than one host can hold where it is the only one.
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
    most = max(64, int(_RANKS_PER_CORE * host_cores()))
    if ranks > most and not any(name in environ for name in _HOST_LISTS):
        raise SystemUnfitError(
            f"{ranks:,} ranks: more than the {most} that are started on one host of {host_cores():g} cores, where each "
            "takes some 100 MB; start so many inside a Slurm job, or with a launch line of your own: --launcher"
        )
    return [mpirun, "-n", str(ranks)]


def _srun_wiring(mpirun: str | None) -> str:
    """What `srun --mpi=` must be for the MPI library here: Open MPI knows PMIx alone, the others PMI-2."""
    return "pmix" if mpirun is not None and make_of(mpirun) == "Open MPI" else "pmi2"
