"""Real jobs with faults put in from outside, and what must be true when they have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.launching import finish, start_mpi

INJECT = Path(__file__).parent / "inject"
SECONDS = 15.0  # within which every process of the job has to be gone


def injection(*faults: dict[str, object]) -> dict[str, str]:
    """The environment that puts these faults into the ranks they name; see inject/sitecustomize.py."""
    return {"PYTHONPATH": str(INJECT), "DISTMLP_TEST_FAULTS": json.dumps(faults)}


def train_command(toml: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "distmlp", "train", str(toml), *arguments]


def run_job(ranks: int, argv: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a job that is to end by itself, within `SECONDS` plus the time to start on a busy machine."""
    return finish(start_mpi(ranks, argv, env=env), 15 + SECONDS)


def wait_for(condition: object, seconds: float = 40) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Process ids of the job's ranks in the order of the ranks, from the launcher's variables in their environments."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            variables = dict(pair.split("=", 1) for pair in (entry / "environ").read_text().split("\0") if "=" in pair)
            if variables.get("DISTMLP_TEST_JOB") == str(id(job)) and b"distmlp" in (entry / "cmdline").read_bytes():
                rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK"))
                if rank is not None:
                    found[int(rank)] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def alive(pids: Sequence[int]) -> list[int]:
    """Those of `pids` that still run (and are not only waiting to be collected)."""
    running = []
    for pid in pids:
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                running.append(pid)
    return running
