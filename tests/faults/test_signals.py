"""Signals (C07, C08): one checkpoint at an agreed step and code 75, or the end at once; never a process left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.faults import RunningJob, injection, train_command, wait_for
from tests.faults.problem import losses, make_problem, newest_step, sha256, train
from tests.launching import mpirun_make, run_python

STEPS = 160
STOP_SECONDS = 10.0

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Hash and losses of the run that nobody disturbs, by number of ranks."""
    toml = make_problem(tmp_path_factory.mktemp("whole"), steps=STEPS, checkpoint_every="80 steps", log_every=20)
    train(toml, toml.parent / "3", 3)
    return sha256(toml.parent / "3")


def start(folder: Path, ranks: int = 3, *faults: dict[str, object], **run: object) -> tuple[RunningJob, Path, Path]:
    toml = make_problem(folder, steps=STEPS, **({"checkpoint_every": "80 steps", "log_every": 20} | run))
    job = RunningJob(ranks, train_command(toml), injection(*faults) if faults else None)
    return job, toml, folder / "run"


def wait_for_step(output: Path, step: int) -> None:
    def there() -> bool:
        path = output / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return bool(lines) and json.loads(lines[-1])["step"] >= step

    wait_for(there)


# Feed.batch naps on one rank at one early step, so that the signal comes while steps are still to be done.
NAP = {"rank": 0, "target": "distmlp.data.feed:Feed.batch", "call": 60, "action": "sleep", "seconds": 1.5}


@pytest.mark.parametrize(
    ("name", "whom"),
    [
        ("SIGTERM", "one"),
        pytest.param("SIGUSR1", "launcher", marks=pytest.mark.full),
        pytest.param("SIGUSR1", "one", marks=pytest.mark.full),
        pytest.param("SIGUSR2", "all", marks=pytest.mark.full),
        pytest.param("SIGTERM", "all", marks=pytest.mark.full),
        pytest.param("SIGINT", "one", marks=pytest.mark.full),
        pytest.param("SIGTERM", "launcher", marks=pytest.mark.full),
    ],
)
def test_signal_stops_at_a_step_and_the_resumed_run_is_the_same(tmp_path, uninterrupted, name, whom):
    if (name, whom) == ("SIGTERM", "launcher") and mpirun_make() == "Open MPI":
        pytest.skip("Open MPI's mpirun kills its ranks after half a second; see launch/mpirun")
    job, toml, output = start(tmp_path, 3, NAP)
    ranks = job.ranks()
    wait_for_step(output, 40)
    targets = {"one": ranks[1:2], "all": ranks, "launcher": [job.launcher.pid]}[whom]
    for pid in targets:
        os.kill(pid, getattr(signal, name))
    done = job.end(STOP_SECONDS)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("--resume") == 1
    assert "Traceback" not in done.stderr
    stopped = newest_step(output)
    assert 40 <= stopped < STEPS
    assert json.loads((output / "summary.json").read_text())["status"] == "stopped"
    text = train(toml, output, 3, "--resume")
    assert f"{STEPS}/{STEPS}" in text
    assert sha256(output) == uninterrupted
    steps = [step for step, _ in losses(output)]
    assert steps == sorted(set(steps))


def test_interrupt_of_the_launcher_leaves_no_process(tmp_path):
    job, _, output = start(tmp_path, 3, NAP, checkpoint_every="10 steps")
    wait_for_step(output, 40)
    job.launcher.send_signal(signal.SIGINT)
    done = job.end(STOP_SECONDS)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("distmlp:") <= 3
    assert newest_step(output) >= 30


def test_second_interrupt_ends_at_once(tmp_path):
    slow = {**NAP, "seconds": 60}
    job, _, output = start(tmp_path, 3, slow, checkpoint_every="10 steps")
    wait_for_step(output, 40)
    time.sleep(0.5)  # rank 0 naps, the others wait for it inside MPI
    victim = job.ranks()[1]
    os.kill(victim, signal.SIGTERM)
    time.sleep(1)
    os.kill(victim, signal.SIGTERM)
    done = job.end(STOP_SECONDS)
    assert done.returncode == 128 + signal.SIGTERM
    assert newest_step(output) >= 30


def test_interrupt_repeated_by_terminal_and_launcher_counts_once(tmp_path):
    job, _, output = start(tmp_path, 3, NAP)
    wait_for_step(output, 40)
    for pid in [*job.ranks(), *job.ranks()]:
        os.kill(pid, signal.SIGINT)
    assert job.end(STOP_SECONDS).returncode == 75


def test_interrupt_while_a_reader_blocks_does_not_wait_for_it(tmp_path):
    stuck = {**NAP, "rank": 2, "seconds": 1000}
    job, _, output = start(tmp_path, 3, stuck, checkpoint_every="10 steps")
    wait_for_step(output, 40)
    time.sleep(0.5)
    for pid in job.ranks():
        os.kill(pid, signal.SIGINT)
    done = job.end(STOP_SECONDS)
    assert done.returncode == 130
    assert done.stderr.count("interrupted: rank 2 on host") == 1
    assert newest_step(output) >= 30


def test_signal_during_a_save_is_not_lost(tmp_path):
    slow = {"rank": 0, "target": "distmlp.checkpoint.saving:save", "call": 2, "action": "sleep", "seconds": 2}
    job, toml, output = start(tmp_path, 3, slow, checkpoint_every="20 steps")
    wait_for_step(output, 20)
    time.sleep(0.2)
    os.kill(job.ranks()[2], signal.SIGUSR2)
    done = job.end(STOP_SECONDS)
    assert done.returncode in (75, 0)  # 0: the few steps left were done while the save slept
    assert newest_step(output) == json.loads((output / "summary.json").read_text())["steps"]
    train(toml, output, 3, "--resume")
    assert newest_step(output) == STEPS


def test_signal_in_the_last_step_is_no_failure(tmp_path):
    nap = {**NAP, "rank": 1, "call": STEPS, "seconds": 1}
    job, _, output = start(tmp_path, 2, nap)
    wait_for_step(output, STEPS - 20)
    time.sleep(0.3)
    os.kill(job.ranks()[0], signal.SIGUSR1)
    done = job.end(STOP_SECONDS)
    assert done.returncode == 0  # there was nothing left to do
    assert newest_step(output) == STEPS


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_single_process_stops_with_a_checkpoint(tmp_path, number):
    job, _, output = start(tmp_path, 0, NAP)
    wait_for_step(output, 40)
    job.launcher.send_signal(number)
    done = job.end(STOP_SECONDS)
    assert done.returncode == 75, done.stderr
    assert newest_step(output) >= 40


EARLY = """
import os, sys
from distmlp import config
from distmlp.__main__ import main

if os.environ.get("TO_CHILD"):  # the signal goes to a child's process too, as launchers send it to a whole group
    spawn = os.posix_spawn

    def signalled_child(*arguments, **more):
        child = spawn(*arguments, **more)
        os.kill(child, int(os.environ["EARLY_SIGNAL"]))
        return child

    os.posix_spawn = signalled_child

load = config.RunConfig.load.__func__

def signalled(*arguments):
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "1")) == "1":
        os.kill(os.getpid(), int(os.environ["EARLY_SIGNAL"]))
    return load(*arguments)

config.RunConfig.load = classmethod(signalled)
main()
"""


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGUSR1, 2)])
def test_signal_before_the_first_step_is_kept_for_it(tmp_path, number, ranks):
    """A batch system may announce the end of a job that is still being opened: it must be requeued, not fail."""
    make_problem(tmp_path, steps=STEPS, log_every=20, checkpoint_every="80 steps")
    environment = {"EARLY_SIGNAL": str(int(number)), "TO_CHILD": "1"}
    done = run_python(ranks, EARLY, "train", "run.toml", cwd=tmp_path, env=environment)
    assert done.returncode == 75, done.stderr
    assert newest_step(tmp_path / "run") == 1
