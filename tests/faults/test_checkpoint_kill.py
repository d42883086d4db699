"""Killed while saving, again and again: every resume finds a complete checkpoint, the end is the same (E01)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.problem import losses, make_problem, newest_step, record, sha256, train
from tests.launching import finish, start_mpi

STEPS = 2500  # more than the kills leave time for; the last resume goes to the end


def kill_at_random(toml: Path, output: Path, ranks: int, rng: random.Random) -> None:
    """Start or resume the run, let it save a few times (or none), then kill one rank or the whole job."""
    before = newest_step(output)
    job = start_mpi(ranks, [sys.executable, "-m", "distmlp", "train", str(toml), "--output", str(output), "--resume"])
    wanted = before + rng.choice((0, 1, 1, 2, 5, 20))
    deadline = time.monotonic() + 60
    while job.poll() is None and newest_by_name(output) < wanted:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02 if wanted > before else 0.8))
    victims = rank_processes(job.pid)
    whole = ranks == 0 or rng.random() < 0.5
    for pid in [job.pid, *victims] if whole else rng.sample(victims, min(1, len(victims))):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    done = finish(job, 30)
    assert "Traceback" not in done.stderr  # it was killed, and did not fail by itself
    assert ranks or not done.stderr
    for pid in victims:
        while alive(pid):  # the launcher ends the others
            assert time.monotonic() < deadline
            time.sleep(0.005)


def mean_loss(output: Path) -> float:
    return json.loads((output / "summary.json").read_text())["loss"]


def newest_by_name(output: Path) -> int:
    names = [path.name for path in (output / "checkpoints").glob("step-*.h5")]
    return max((int(re.sub(r"\D", "", name.removesuffix(".h5"))) for name in names), default=0)


def rank_processes(root: int) -> list[int]:
    """The ranks below the launcher `root`: Python processes among its descendants."""
    parents, pythons = {}, set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if b"python" in (entry / "cmdline").read_bytes().split(b"\0")[0]:
                pythons.add(pid)
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted((below & pythons) - {root})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(0, 8), (3, 4), pytest.param(0, 120, marks=pytest.mark.full), pytest.param(3, 80, marks=pytest.mark.full)],
)
def test_every_kill_leaves_a_complete_checkpoint(tmp_path, ranks, kills):
    toml = make_problem(tmp_path, steps=STEPS, log_every=7, ema_decay=0.9)
    killed, rng = tmp_path / "killed", random.Random(ranks)
    reached = 0
    for _ in range(kills):
        kill_at_random(toml, killed, ranks, rng)
        step = newest_step(killed)  # loads it, and fails on a damaged one
        assert step >= reached
        reached = step
    assert reached > 0
    total = f"run.steps={reached + 20}"
    train(toml, killed, ranks, "--resume", "--set", total)
    train(toml, tmp_path / "whole", ranks, "--set", total, "--set", "run.checkpoint_every='1 hour'")
    assert sha256(killed) == sha256(tmp_path / "whole")
    assert mean_loss(killed) == mean_loss(tmp_path / "whole")
    steps = [step for step, _ in losses(killed)]
    assert steps == sorted(set(steps))
    left = sorted(path.name for path in killed.rglob("*") if path.name.startswith("."))
    assert left == []  # neither temporary files nor a lock
    if kills > 50:
        record(f"kills-{max(ranks, 1)}-ranks", kills=kills, resumes=kills, steps=reached + 20, same_weights=True)
