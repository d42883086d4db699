"""What the launcher's environment says about this process, read without any MPI library.

A launcher and an MPI library of different makes start N processes that each believe to be rank 0 of 1
(mpi4py#155, #280). The environment is the only witness, so it is read first and compared with MPI later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Launch:
    """How this process was started, as its environment tells."""

    launcher: str  # in words, for messages
    size: int | None  # processes of the job; None where the launcher does not say
    rank: int
    variable: str  # the variable that `size` (or else `rank`) was read from
    live: bool  # a running launcher's wiring is there too, so that every rank of the job really exists


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that `environ` describes, or None for a process started by itself.

    The variables of `mpirun` go before Slurm's: under `mpirun` every rank inherits its launcher's
    SLURM_PROCID and SLURM_NTASKS, which are then those of the launcher's own step.
    """
    pmix = any(key.startswith("PMIX_SERVER_URI") for key in environ)
    hydra = "MPI_LOCALNRANKS" in environ or "HYDI_CONTROL_FD" in environ
    pmi = _is_open(environ.get("PMI_FD", "")) or (hydra and "PMI_PORT" in environ)
    step = "SLURM_STEP_ID" in environ  # sbatch sets SLURM_NTASKS for the batch shell, but this for tasks of srun only
    srun = step and ("SLURM_SRUN_COMM_PORT" in environ or "SLURM_LAUNCH_NODE_IPADDR" in environ)
    pmi_launcher = (
        "mpiexec of MPICH or Intel MPI (hydra)" if hydra
        else "flux run" if "FLUX_TASK_RANK" in environ
        else "mpiexec of PALS (Cray)" if "PALS_RANKID" in environ
        else "srun (Slurm, PMI)" if step
        else "a PMI launcher (mpiexec of MPICH, Intel MPI, …)"
    )  # fmt: skip
    slurm_size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    candidates = (
        (
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "mpirun of Open MPI",
            pmix or "OMPI_MCA_orte_hnp_uri" in environ,
        ),
        ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun_rsh of MVAPICH", True),
        ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun", True),
        ("PMI_SIZE", "PMI_RANK", pmi_launcher, pmi or srun),
        ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run", "FLUX_KVS_NAMESPACE" in environ),
        (slurm_size if step else "", "SLURM_PROCID", "srun (Slurm)", srun),
        ("", "PALS_RANKID", "mpiexec of PALS (Cray)", "PALS_APID" in environ),
        ("", "PMIX_RANK", "prterun or another PMIx launcher", pmix),
    )
    for size_variable, rank_variable, launcher, live in candidates:
        if rank_variable == "SLURM_PROCID" and not step:
            continue
        size, rank = _number(environ, size_variable), _number(environ, rank_variable)
        if size is not None or rank is not None:
            return Launch(launcher, size, rank or 0, size_variable if size is not None else rank_variable, live)
    return None


def rank_hint() -> int:
    """This process's rank as a running launcher numbered it, 0 without one. No MPI is touched."""
    launch = read_launch()
    return launch.rank if launch is not None and launch.live else 0


def local_rank_hint(launch: Launch, environ: Mapping[str, str] = os.environ) -> int:
    """This process's place among those of its host as the launcher of `launch` numbered it; its rank where that
    launcher does not say."""
    variable = {
        "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_RANK",
        "FLUX_JOB_SIZE": "FLUX_TASK_LOCAL_ID",
        "PALS_RANKID": "PALS_LOCAL_RANKID",
        "PMI_SIZE": "SLURM_LOCALID" if "srun" in launch.launcher else "MPI_LOCALRANKID",
    }.get(launch.variable, "SLURM_LOCALID" if "srun" in launch.launcher else "")
    local = _number(environ, variable)
    return launch.rank if local is None else local


def is_terminal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody looks at `stream`. Open MPI gives every rank a pseudo-terminal even where the output of mpirun
    goes to a file, so there the launcher's own output is looked at; one on another host counts as none."""
    if not stream.isatty():
        return False
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def how_to_launch(launch: Launch, make: str) -> str:
    """One sentence on the right launch line for an MPI library of `make` ("Open MPI", "MPICH", "Intel MPI")."""
    slurm = "srun" in launch.launcher
    if make == "Open MPI":
        under_slurm = (
            "`srun --mpi=pmix` (where Slurm has PMIx) or this Open MPI's own `mpirun -n N` inside the allocation"
        )
        own = "the `mpirun` of this Open MPI"
    else:
        under_slurm = (
            f"`srun --mpi=pmi2` (some sites: `--mpi=pmix`) or the `mpirun -n N` of {make} inside the allocation"
        )
        own = f"the `mpirun` (mpiexec.hydra) of this {make}"
    if slurm:
        return f"launch with {under_slurm}"
    return (
        f"launch with {own}, or let mpi4py load the library of the launcher's make "
        "(MPI4PY_LIBMPI=/path/to/libmpi.so, or install distmlp where that MPI's module is loaded)"
    )


def _is_open(descriptor: str) -> bool:
    """Whether the launcher's wire is really there, and not only a variable left over from another shell."""
    try:
        os.fstat(int(descriptor))
    except (ValueError, OSError):
        return False
    return True


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    return int(text) if text.isdecimal() else None
