"""Everything `distmlp doctor` looks at, as one nested dictionary of plain values."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from distmlp import __version__
from distmlp.comm.device_probe import DeviceProbe
from distmlp.comm.hints import Launch, read_launch
from distmlp.data.hdf5_facts import describe_library
from distmlp.tools.launcher import find_mpirun, make_of

CHILD_SECONDS = 30
VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_PATH|OMP_NUM_THREADS|HDF5_.*|MPI4PY_.*|I_MPI_(OFFLOAD|FABRICS).*|MPIR_CVAR_ENABLE_GPU|"
    r"MPICH_GPU_SUPPORT_ENABLED|UCX_TLS|SLURM_(JOB_ID|NTASKS|NNODES|MPI_TYPE)"
)
# What a launcher leaves in the environment: a child that starts MPI by itself must not find it.
_LAUNCH_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD", "PRTE_", "HYDI_", "MPI_LOCAL", "PALS_", "FLUX_")


def gather() -> dict[str, Any]:
    """The facts. Children run side by side; each has `CHILD_SECONDS`, and its death is a fact as well."""
    mpirun = find_mpirun()
    children = {"gpu": _start("gpu")}
    device = None
    mpi4py = _version("mpi4py")
    if mpi4py:
        children["library"] = _start("library")
        device = DeviceProbe()
        if mpirun:
            children["ranks"] = _start("ranks", [mpirun, "-n", "2"])
    facts: dict[str, Any] = {
        "distmlp": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        "hdf5": describe_library(),
        "slurm": _slurm(),
    }
    found = {name: _finish(child) for name, child in children.items()}
    facts["gpu"] = found["gpu"]
    facts["mpi"] = {
        "mpi4py": mpi4py,
        "launcher": {"path": mpirun, "make": make_of(mpirun)} if mpirun else None,
        "launched_by": _words(read_launch()),
        "device": asdict(device.result(CHILD_SECONDS)) if device else None,
        **{key: found[key] for key in ("library", "ranks") if key in found},
    }
    return facts


def _start(subject: str, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCH_PREFIXES)}
    return subprocess.Popen(
        [*(launcher or []), sys.executable, "-m", "distmlp.tools.doctor_child", subject],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip


def _finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What the child printed, or `error` with its last words."""
    try:
        out, err = child.communicate(timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"error": f"no answer within {CHILD_SECONDS} s"}
    if child.returncode < 0:
        return {"error": f"ended by signal {-child.returncode}"}
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode == 0 and answers:
        answer: dict[str, Any] = json.loads(answers[0])
        return answer | ({"answers": len(answers)} if len(answers) > 1 else {})
    said = [line for line in (err or out).splitlines() if line.strip("- =\t")]
    return {"error": " ".join(" ".join(said).split())[:600] or f"ended with code {child.returncode}"}


def _slurm() -> dict[str, Any] | None:
    """Slurm's version and the ways its `srun` wires MPI; `None` without it."""
    if shutil.which("srun") is None:
        return None
    version = _said("srun", "--version")
    if not version.startswith("slurm"):
        return {"error": version.splitlines()[-1] if version else "srun does not answer"}
    wirings = re.findall(r"\b(pmix(?:_v\d)?|pmi2|cray_shasta)\b", _said("srun", "--mpi=list"))
    number = re.search(r"\d[\w.]*", version)
    return {"version": number[0] if number else version, "wirings": sorted(set(wirings))}


def _said(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
        return (done.stdout + done.stderr).strip()  # some versions list on standard error
    return ""


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _words(launch: Launch | None) -> str | None:
    return f"{launch.launcher}, {launch.size or 'several'} processes" if launch and launch.live else None
