"""Kill a run at random moments, resume it, and compare its end with that of a run left alone."""

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

from tests.faults.problem import losses, make_problem, newest_step, sha256, train
from tests.launching import finish, start_mpi

STEPS = 2500  # more than the kills leave time for; the last resume goes to the end


def kill_again_and_again(folder: Path, ranks: int, kills: int, *arguments: str) -> int:
    """Kill and resume a run that saves every step `kills` times, then let it end; the steps it took.

    Each time the newest checkpoint must be complete and none be lost; in the end weights, loss and metrics
    are those of a run that was left alone, and nothing else is left behind. `arguments` are for every run.
    """
    toml = make_problem(folder, steps=STEPS, log_every=7, ema_decay=0.9)
    killed, whole, rng = folder / "killed", folder / "whole", random.Random(ranks)
    reached = 0
    for _ in range(kills):
        kill_at_random(toml, killed, ranks, rng, *arguments)
        step = newest_step(killed)  # loads it, and fails on a damaged one
        assert step >= reached
        reached = step
    assert reached > 0
    steps = reached + 20
    length = ("--set", f"run.steps={steps}", *arguments)
    train(toml, killed, ranks, "--resume", *length)
    train(toml, whole, ranks, "--set", "run.checkpoint_every='1 hour'", *length)
    assert sha256(killed) == sha256(whole)
    assert mean_loss(killed) == mean_loss(whole)
    logged = [step for step, _ in losses(killed)]
    assert logged == sorted(set(logged))
    assert [path.name for path in killed.rglob(".*")] == []  # neither temporary files nor a lock
    return steps


def kill_at_random(toml: Path, output: Path, ranks: int, rng: random.Random, *arguments: str) -> None:
    """Start or resume the run, let it save a few times (or none), then kill one rank or the whole job."""
    before = newest_step(output)
    command = [sys.executable, "-m", "distmlp", "train", str(toml), "--output", str(output), "--resume", *arguments]
    job = start_mpi(ranks, command)
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
    assert "distmlp: error" not in done.stderr or ranks
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
