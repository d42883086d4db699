"""No space, no right to write, another job: one message, older checkpoints intact, nobody hangs (E02, E08, E09)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.problem import make_problem, newest_step, train
from tests.launching import finish, kill_group, start_mpi

WIDTHS = (8, 1000, 2)  # 135 KB a checkpoint with Adam


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_full_disk(tmp_path, small_disk, ranks):
    toml = make_problem(tmp_path, WIDTHS, steps=12, checkpoint_every="4 steps")
    started = time.monotonic()
    said = train(toml, small_disk / "run", ranks, code=3)
    assert time.monotonic() - started < 15
    assert said.count("distmlp: error:") == 1
    for words in (str(small_disk / "run"), "No space left on device (ENOSPC)", "bytes needed", "free"):
        assert words in said
    assert newest_step(small_disk / "run") == 4  # the old one still loads
    assert [path.name for path in (small_disk / "run").rglob(".*")] == []  # neither half a file nor a lock
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert "resumed from" in train(toml, small_disk / "run", ranks, "--resume")
    assert newest_step(small_disk / "run") == 12


def test_a_full_disk_from_the_start(tmp_path, small_disk):
    (small_disk / "others").write_bytes(bytes(250 * 1024))
    toml = make_problem(tmp_path, WIDTHS)
    said = train(toml, small_disk / "run", 0, code=3)
    assert "ENOSPC" in said


def test_a_read_only_file_system(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    said = train(make_problem(tmp_path), small_disk / "run", 0, code=2)
    assert "Read-only file system (EROFS)" in said
    assert "run.output" in said


def test_a_directory_that_vanishes_under_the_run(tmp_path):
    toml = make_problem(tmp_path, steps=100_000, checkpoint_every="20 steps", log_every=20)
    output = tmp_path / "run"
    job = start_mpi(2, [sys.executable, "-m", "distmlp", "train", str(toml), "--output", str(output)])
    wait_for(lambda: newest_step(output) > 0)
    (output / "checkpoints").rename(tmp_path / "gone")
    done = finish(job, 15)
    assert done.returncode == 3
    assert "could not be written: No such file or directory" in done.stderr


def test_a_second_job_is_refused_and_the_first_goes_on(tmp_path):
    toml = make_problem(tmp_path, steps=1_000_000, checkpoint_every="1000 steps", log_every=1000)
    output = tmp_path / "run"
    first = start_mpi(2, [sys.executable, "-m", "distmlp", "train", str(toml), "--output", str(output)])
    try:
        wait_for(lambda: (output / "metrics.jsonl").exists())
        for way in ("--resume", "--overwrite"):
            said = train(toml, output, 2, way, code=2)
            assert said.count("in use by another job") == 1
            for words in (str(output), os.uname().nodename, "pid "):
                assert words in said
        assert first.poll() is None
    finally:
        kill_group(first)
        first.communicate()
    train(
        toml, output, 0, "--resume", "--set", f"run.steps={newest_step(output) or 1}"
    )  # the dead one's lock is no lock


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path):
    toml = make_problem(tmp_path, steps=9, checkpoint_every="3 steps")
    output = tmp_path / "run"
    train(toml, output, 0)
    os.truncate(output / "checkpoints" / "step-00000009.h5", 3000)
    said = train(toml, output, 2, "--resume")
    assert "step-00000009.h5: cut short: 3,000 bytes" in said
    assert "step-00000006.h5 after step 6" in said
    assert newest_step(output) == 9


def test_no_good_checkpoint_is_an_error_and_no_new_start(tmp_path):
    toml = make_problem(tmp_path, steps=2)
    output = tmp_path / "run"
    train(toml, output, 0)
    for path in (output / "checkpoints").iterdir():
        path.write_bytes(b"")
    said = train(toml, output, 2, "--resume", code=3)
    assert said.count("none of the 2 checkpoints is good") == 1
    assert all(path.stat().st_size == 0 for path in (output / "checkpoints").iterdir())


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
