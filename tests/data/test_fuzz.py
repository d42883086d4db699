"""Damaged HDF5 files: the right rows or a message, never a crash, a hang, or memory beyond the file's measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from data.mutations import originals

SLACK_BYTES = 32 << 20  # buffers and allocator; files have 30 KB
SECONDS = 10.0


def run(folder: Path, count: int, timeout: float) -> None:
    originals(folder)
    project = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("fuzz_child.py"), folder, "0", str(count)],
        capture_output=True, text=True, cwd=project, timeout=timeout,
        env={"PATH": "", "PYTHONPATH": f"{project}:{project / 'tests'}", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == count, f"died after file {len(lines)} with {done.returncode}: {done.stderr[-2000:]}"
    wrong = [line for line in lines if line["outcome"] == "wrong"]
    assert not wrong
    assert all(line["message"] for line in lines if line["outcome"] == "refused")
    greedy = [line for line in lines if line["grown"] > 2 * line["file"] + SLACK_BYTES]
    assert not greedy
    assert max(line["child"] for line in lines) < (150 << 20)  # an interpreter with h5py takes 50 MB
    assert max(line["seconds"] for line in lines) < SECONDS
    outcomes = {line["outcome"] for line in lines}
    assert outcomes == {"right", "refused"}  # a fuzz that never or always hits would prove nothing


def test_damaged_files(tmp_path):
    run(tmp_path, 168, 120)


@pytest.mark.full
def test_two_thousand_damaged_files(tmp_path):
    run(tmp_path, 2016, 900)
