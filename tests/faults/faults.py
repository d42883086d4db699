"""Real jobs with faults put in from outside, and what must be true when they have ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.launching import finish, start_mpi

INJECT = Path(__file__).parent / "inject"
SECONDS = 15.0  # within which every process of the job has to be gone
MARK = "DISTMLP_TEST_JOB"


def injection(*faults: dict[str, object]) -> dict[str, str]:
    """The environment that puts these faults into the ranks they name; see inject/sitecustomize.py."""
    return {"PYTHONPATH": str(INJECT), "DISTMLP_TEST_FAULTS": json.dumps(faults)}


def train_command(toml: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "distmlp", "train", str(toml), *arguments]


class RunningJob:
    """A job under way: its launcher, and its ranks found by a mark in their environments."""

    def __init__(self, ranks: int, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._ranks = ranks
        self._mark = uuid.uuid4().hex
        self.launcher = start_mpi(ranks, argv, env={**(env or {}), MARK: self._mark})

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in their order, once all are there."""
        found: dict[int, int] = {}

        def complete() -> bool:
            for entry in Path("/proc").iterdir():
                with suppress(OSError, ValueError):
                    if self._mark.encode() not in (entry / "environ").read_bytes():
                        continue
                    words = (entry / "environ").read_text().split("\0")
                    variables = dict(word.split("=", 1) for word in words if "=" in word)
                    rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK"))
                    if b"distmlp" in (entry / "cmdline").read_bytes().partition(b"-m\0")[2] and rank is not None:
                        found[int(rank)] = int(entry.name)
            return len(found) == self._ranks

        wait_for(complete)
        return [found[rank] for rank in range(self._ranks)]

    def end(self, within: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Wait for the job's end, which has to come `within` seconds, and check that no process is left of it."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if self._is_ours(entry)]
        done = finish(self.launcher, within)
        wait_for(lambda: not any(alive(pid) for pid in pids), 2)
        return done

    def _is_ours(self, entry: Path) -> bool:
        with suppress(OSError):
            return entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes()
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 40) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs, and is not only waiting to be collected."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def one_traceback(text: str) -> bool:
    return text.count("Traceback (most recent call last)") == 1
