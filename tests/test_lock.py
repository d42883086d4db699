"""One job at a time in an output directory: living and dead owners, here and elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from distmlp import lock
from distmlp.errors import CheckpointError, ConfigError
from distmlp.output import RunOutput
from tests.checkpoint_samples import configuration
from tests.worlds import LoneWorld


def claim(path: Path) -> RunOutput:
    return RunOutput(configuration(output=str(path)), LoneWorld(), resume=True)  # type: ignore[arg-type]


def hold_elsewhere(path: Path) -> subprocess.Popen[str]:
    """Another job that holds the directory until its input ends."""
    script = (
        "import sys; from pathlib import Path; from distmlp.lock import OutputLock\n"
        "OutputLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SLURM_JOB_ID": "4711"},
    )  # fmt: skip
    assert job.stdout
    assert job.stdout.readline() == "held\n"
    return job


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path):
    job = hold_elsewhere(tmp_path)
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path)
    for words in (str(tmp_path), f"pid {job.pid}", "Slurm job 4711", os.uname().nodename):
        assert words in str(caught.value)
    job.kill()
    while Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    claim(tmp_path).close()  # dead, though its parent has not asked after it yet
    job.communicate()


def owner_elsewhere(path: Path, age_seconds: float, **fields: object) -> None:
    """A lock of a job on another host that last showed a sign of life `age_seconds` ago."""
    entry = {"host": "far", "pid": 1, "job": "", "restart": "0", "machine": "other", "token": "t", "since": "today"}
    (path / lock.NAME).write_text(json.dumps(entry | fields))
    then = time.time() - age_seconds
    os.utime(path / lock.NAME, (then, then))


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """A living owner's touch, now and then."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(path / lock.NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    done.set()
    thread.join()


REQUEUED = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("age_seconds", "alive", "environment", "free"),
    [
        (1, True, {}, False),
        (1, False, {}, True),  # in another container, or on a host that died
        (lock.DEAD_SECONDS + 5, False, {}, True),
        (1, True, REQUEUED, True),  # this very job, started again: its old ranks may still be ending
        (1, True, {"SLURM_JOB_ID": "7"}, False),  # a second step of the same job
        (1, True, REQUEUED | {"SLURM_JOB_ID": "8"}, False),
    ],
)
def test_owners_on_other_hosts(tmp_path, monkeypatch, age_seconds, alive, environment, free):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 1.0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    owner_elsewhere(tmp_path, age_seconds, job="Slurm job 7")
    with nullcontext() if not alive or free else beating(tmp_path):
        if free:
            claim(tmp_path).close()
        else:
            with pytest.raises(ConfigError, match="host far, pid 1, Slurm job 7"):
                claim(tmp_path)


def test_an_owner_long_dead_is_not_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WATCH_SECONDS", 1e9)
    owner_elsewhere(tmp_path, lock.DEAD_SECONDS + 5)
    claim(tmp_path).close()


@pytest.mark.parametrize("content", ["", "[]", "{", "\0\0", '{"pid": "x", "machine": 3}'])
def test_a_damaged_lock_is_judged_by_its_age(tmp_path, content):
    owner_elsewhere(tmp_path, 1)
    (tmp_path / lock.NAME).write_text(content)
    with beating(tmp_path), pytest.raises(ConfigError, match="in use"):
        claim(tmp_path)
    os.utime(tmp_path / lock.NAME, (0, 0))
    claim(tmp_path).close()


def test_a_living_owner_keeps_its_lock_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    held = lock.OutputLock(tmp_path)
    os.utime(held.path, (0, 0))
    deadline = time.monotonic() + 10
    while held.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.release()


def test_losing_the_lock_is_noticed(tmp_path):
    output = claim(tmp_path)
    output.check()
    owner_elsewhere(tmp_path, 0)
    with pytest.raises(CheckpointError, match="taken over"):
        output.check()
    output.close()
    assert (tmp_path / lock.NAME).exists()  # the other's


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    output = claim(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        claim(tmp_path)
    output.close()
    assert not (tmp_path / lock.NAME).exists()


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_jobs_that_start_at_once_one_gets_the_directory(tmp_path, stale):
    rounds, jobs = 30, 4
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        if stale:
            owner_elsewhere(tmp_path / str(number), 1e6)
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from distmlp.errors import ConfigError; from distmlp.lock import OutputLock\n"
        "print('ready', flush=True); start = float(sys.stdin.readline())\n"
        "for number in range(int(sys.argv[2])):\n"
        "    while time.time() < start + 0.02 * number: pass\n"
        "    try: OutputLock(Path(sys.argv[1]) / str(number)); print(number)\n"
        "    except ConfigError: pass\n"
        "print('done', flush=True); sys.stdin.read()\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(rounds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(jobs)
    ]  # fmt: skip
    for job in started:
        assert job.stdout.readline() == "ready\n"
    for job in started:
        job.stdin.write(f"{time.time() + 0.1}\n")
        job.stdin.flush()
    winners = [line for job in started for line in iter(job.stdout.readline, "done\n")]
    for job in started:
        job.communicate()
    assert sorted(map(int, winners)) == list(range(rounds))
