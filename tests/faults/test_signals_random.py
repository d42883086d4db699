"""Signals at random moments: each ends with code 75 and a checkpoint, and the end is the same (issue 7)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.faults import RunningJob, train_command, wait_for
from tests.faults.problem import losses, make_problem, newest_step, record, sha256, train
from tests.launching import mpirun_make

STEPS = 100_000  # more than the signals leave time for


def stop_again_and_again(folder: Path, ranks: int, signals: int) -> int:
    """Stop and resume a run `signals` times, let it end, and compare it with a run left alone; the steps it took."""
    toml = make_problem(folder, steps=STEPS, checkpoint_every="10000 steps", log_every=5)
    stopped, whole, rng = folder / "stopped", folder / "whole", random.Random(ranks)
    for _ in range(signals):
        stop_at_random(toml, stopped, ranks, rng)
    steps = newest_step(stopped) + 20
    length = ("--set", f"run.steps={steps}")
    train(toml, stopped, ranks, "--resume", *length)
    train(toml, whole, ranks, *length)
    assert sha256(stopped) == sha256(whole)
    logged = [step for step, _ in losses(stopped)]
    assert logged == sorted(set(logged))
    return steps


def stop_at_random(toml: Path, output: Path, ranks: int, rng: random.Random) -> None:
    """Start or resume the run and, once it trains, send a random signal to one rank, all ranks or the launcher."""
    before, metrics = newest_step(output), output / "metrics.jsonl"
    lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    job = RunningJob(ranks, train_command(toml, "--output", str(output), "--resume"))
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > lines)
    time.sleep(rng.uniform(0, 0.3))
    name = rng.choice(("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"))
    pids = [job.launcher.pid]
    # Launchers of each make swallow some of them: Open MPI kills on SIGINT and SIGTERM, hydra dies of SIGUSR2.
    passed_on = ("SIGUSR1", "SIGUSR2") if mpirun_make() == "Open MPI" else ("SIGTERM", "SIGINT", "SIGUSR1")
    if ranks and (name not in passed_on or rng.random() < 0.7):
        pids = job.ranks()
        pids = pids if rng.random() < 0.4 else [rng.choice(pids)]
    for pid in pids:
        os.kill(pid, getattr(signal, name))
    done = job.end(20)
    assert done.returncode == 75, f"{name} to {len(pids)} of {ranks}: {done.returncode}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert newest_step(output) > before


@pytest.mark.parametrize(("ranks", "signals"), [(3, 2)])
def test_every_signal_stops_with_a_checkpoint(tmp_path, ranks, signals):
    stop_again_and_again(tmp_path, ranks, signals)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "signals"), [(0, 50), (3, 50)])
def test_hundred_signals(tmp_path, ranks, signals):
    steps = stop_again_and_again(tmp_path, ranks, signals)
    record(f"signals-{max(ranks, 1)}-ranks", signals=signals, exits_with_75=signals, steps=steps, same_weights=True)
