"""Standard streams that are closed, full, or that nobody reads any more: whole processes, as a shell starts them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from distmlp import RunConfig, train
from tests.launching import clean_environment, mpirun_path

DISTMLP = f"{shlex.quote(sys.executable)} -m distmlp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration, a shard and a finished run."""
    folder = tmp_path_factory.mktemp("streams")
    with h5py.File(folder / "a.h5", "w") as file:
        file["inputs"], file["targets"] = np.ones((20, 3), "f4"), np.ones(20, "f4")
    text = (
        "[model]\nhidden = [4]\n[data]\ntrain = 'a.h5'\nbatch = 5\n[run]\nepochs = 3\nlog_every = 1\noutput = 'run'\n"
    )
    (folder / "run.toml").write_text(text)
    train(RunConfig.load(folder / "run.toml"))
    return folder


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    line = f"set -o pipefail; {line}".replace("distmlp ", f"{DISTMLP} ", 1)
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "command", ["--help", "data convert --help", "inspect run", "evaluate run --data a.h5", "data check a.h5"]
)
def test_output_that_cannot_be_stored_is_told(folder, command):
    done = shell(folder, f"distmlp {command} >/dev/full")
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("distmlp: error: standard output cannot be written: No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_low_limit_on_open_files_is_raised_to_what_the_system_allows(folder):
    many = folder / "many"
    many.mkdir()
    for number in range(150):
        with h5py.File(many / f"{number:03}.h5", "w") as file:
            file["inputs"], file["targets"] = np.ones((2, 3), "f4"), np.ones(2, "f4")
    words = "--set data.train='many/*.h5' --set data.residence=stream --set data.readers=16 --output many/run"
    done = shell(folder, f"ulimit -S -n 48; distmlp train run.toml {words}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["data check a.h5", "bench --preset 3-2@5", "data convert a.h5 $'b\\xff.h5'"])
def test_a_terminal_that_cannot_show_all_letters(folder, command):
    done = shell(folder, f"PYTHONIOENCODING=ascii distmlp {command}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\x" in done.stdout or "\\udcff" in done.stdout


@pytest.mark.parametrize("command", ["--help", "inspect run", "evaluate run --data a.h5"])
def test_a_reader_that_has_gone_is_no_fault(folder, command):
    done = shell(folder, f"(sleep 0.2; distmlp {command}) | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "| head -1"])
def test_training_goes_on_and_its_files_are_its_own(folder, closed, tmp_path):
    """Files must not take the number of a closed stream: others' words would land in them."""
    done = shell(folder, f"distmlp train run.toml --output {tmp_path}/run {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 12
    assert all(line.startswith('{"step"') for line in lines)


@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun on PATH")
def test_ranks_without_standard_error(folder, tmp_path):
    ranks = f"mpirun -n 2 sh -c '{DISTMLP} train run.toml --output {tmp_path}/run 2>&-'"
    done = subprocess.run(
        ["bash", "-c", ranks], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
