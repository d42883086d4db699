"""Start ranks the way a user does: with the `mpirun` that is on PATH, whatever its make.

Used by tests that need whole processes: their exit codes, what they print, how they die.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = (
    "PMI",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "HYDRA_",
    "HYDI_",
    "MPI_LOCAL",
    "I_MPI_",
    "SLURM_",
    "FLUX_",
    "PALS_",
)
# Settings that let ranks of each make start as root on few cores; unknown to the others and harmless there.
PERMISSIVE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_plm_rsh_agent": "true",  # Open MPI 4 wants to find ssh even for ranks of this machine, which need none
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
}


def mpirun_path() -> str | None:
    """`mpirun` on PATH, or beside this Python."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


@functools.cache
def mpirun_make() -> str:
    """ "Open MPI", "MPICH", "Intel MPI", or "" where there is no mpirun."""
    path = mpirun_path()
    if path is None:
        return ""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, env=clean_environment()).stdout
    return next((make for make in ("Open MPI", "Intel") if make in text), "MPICH").replace("Intel", "Intel MPI")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, with what lets `mpirun` start here, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_VARIABLES)}
    path = os.pathsep.join(filter(None, [(extra or {}).get("PYTHONPATH"), str(PROJECT), kept.get("PYTHONPATH")]))
    return {**kept, **PERMISSIVE, "OMP_NUM_THREADS": "1", **(extra or {}), "PYTHONPATH": path}


def start_mpi(
    ranks: int, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`argv` as `ranks` ranks (0: without a launcher), in a process group of its own, output captured as text."""
    launcher: list[str] = []
    if ranks > 0:
        path = mpirun_path()
        assert path is not None, "no mpirun on PATH: install an MPI, such as `pip install mpich`"
        launcher = [path, "-n", str(ranks)]
    return subprocess.Popen(
        [*launcher, *argv],
        cwd=cwd,
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Wait for a started job; one that outlives `timeout` is killed and fails the test with what it said."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {process.args}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a job that hangs. Ranks of Open MPI have process groups of their own, so the launcher is asked first."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def run_mpi(
    ranks: int,
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """`argv` as `ranks` ranks (0: without a launcher), to its end."""
    return finish(start_mpi(ranks, argv, cwd=cwd, env=env), timeout)


def run_python(
    ranks: int,
    script: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """The text of a Python program as `ranks` ranks, to its end."""
    return run_mpi(ranks, [sys.executable, "-c", script, *arguments], cwd=cwd, env=env, timeout=timeout)


def run_distmlp(
    args: Sequence[str],
    ranks: int = 1,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """`distmlp ARGS` as `ranks` ranks under `mpirun`, or by itself for 1, to its end."""
    argv = [sys.executable, "-m", "distmlp", *args]
    return run_mpi(ranks if ranks > 1 else 0, argv, cwd=cwd, env=env, timeout=timeout)
