"""The output directory: who may write there, what is kept, what is removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distmlp import lock
from distmlp.config import RunConfig
from distmlp.errors import CheckpointError, ConfigError, SystemUnfitError
from distmlp.output import RunOutput, Summary, remove_results, strict_json, versions
from tests.checkpoint_samples import configuration
from tests.worlds import LoneWorld

SUMMARY_KEYS = [
    "status", "steps", "epochs", "samples", "ranks", "hosts", "engine", "transport", "precision", "loss", "validation",
    "seconds", "samples_per_second", "weights_sha256", "transfers", "versions",
]  # fmt: skip


def claim(path: Path, world: LoneWorld | None = None, **how: bool) -> RunOutput:
    return RunOutput(configuration(output=str(path)), world or LoneWorld(), **how)  # type: ignore[arg-type]


def finished(path: Path) -> None:
    """Leave behind what a run leaves."""
    output = claim(path)
    output.begin(configuration(output=str(path)), 0)
    for step in (5, 10, 15):
        output.record({"step": step, "loss": 1.0 / step})
    (path / "checkpoints" / "step-00000015.h5").write_bytes(b"x")
    output.finish(summary())
    output.close()


def summary(**fields: object) -> Summary:
    values = dict.fromkeys(SUMMARY_KEYS, 1) | {"hosts": ["a"], "loss": float("nan")} | fields
    return Summary(**values)  # type: ignore[arg-type]


def test_what_a_run_leaves_behind(tmp_path):
    finished(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints", "metrics.jsonl", "run.toml", "summary.json",
    ]  # fmt: skip
    written_config = RunConfig.from_toml((tmp_path / "run" / "run.toml").read_text(), "run.toml")
    assert written_config == configuration(output=str(tmp_path / "run"))
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written.keys() >= set(SUMMARY_KEYS)
    assert written["loss"] is None


def test_a_directory_in_use_by_a_finished_run_is_refused(tmp_path):
    finished(tmp_path)
    with pytest.raises(ConfigError, match=r"not empty .*--resume.*--overwrite"):
        claim(tmp_path)
    assert not (tmp_path / lock.NAME).exists()


def test_foreign_files_alone_are_a_reason_to_refuse(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        claim(tmp_path)


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="exclude"):
        claim(tmp_path, resume=True, overwrite=True)


def test_resume_starts_anew_where_nothing_is_there(tmp_path):
    claim(tmp_path / "a" / "b", resume=True).close()


def test_overwrite_removes_only_what_a_run_leaves_behind(tmp_path):
    finished(tmp_path)
    foreign = [tmp_path / "thesis.tex", tmp_path / "checkpoints" / "best.h5", tmp_path / "checkpoints" / "notes"]
    for path in foreign:
        path.touch()
    output = claim(tmp_path, overwrite=True)
    left = {path for path in tmp_path.rglob("*") if path.is_file() and path.name != lock.NAME}
    output.close()
    assert left == set(foreign)


def test_overwrite_follows_no_link_out_of_the_directory(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.toml").symlink_to(outside)
    (run / "checkpoints" / "step-00000001.h5").symlink_to(outside)
    remove_results(run)
    assert outside.read_text() == "mine"
    assert not (run / "run.toml").is_symlink()


@pytest.mark.parametrize(("step", "kept"), [(0, []), (5, [5]), (12, [5, 10]), (99, [5, 10, 15])])
def test_no_step_appears_twice_after_a_resume(tmp_path, step, kept):
    finished(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 16, "lo')  # killed while writing
    output = claim(tmp_path, resume=True)
    output.begin(configuration(output=str(tmp_path)), step)
    output.record({"step": 20})
    output.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*kept, 20]
    assert not (tmp_path / "summary.json").exists()  # the run is not at its end any more


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    claim(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_other_ranks_touch_nothing(tmp_path):
    output = claim(tmp_path / "run", LoneWorld(rank=1, size=2))
    output.begin(configuration(), 0)
    output.record({"step": 1})
    output.finish(summary())
    output.check()
    output.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"), [("file", "File exists"), ("file/run", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_a_directory_that_cannot_be_made(tmp_path, name, words):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ConfigError, match=words):
        claim(tmp_path / name)


def test_strict_json():
    import numpy as np

    value = {"a": float("nan"), "b": [float("inf"), np.float32(2.5), np.int64(3)], "c": (None, True)}
    assert strict_json(value) == '{"a": null, "b": [null, 2.5, 3], "c": [null, true]}'


def test_versions_name_what_computes():
    found = versions(mpi="", driver="1.2")
    assert {"distmlp", "python", "numpy", "h5py", "driver"} <= found.keys()
    assert "mpi" not in found


def test_tensorboard_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    for name in ("tensorboard", "tensorboard.summary.writer.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    config = configuration(output=str(tmp_path / "run"), tensorboard=True)
    with pytest.raises(SystemUnfitError, match=r"distmlp\[tensorboard\]"):
        RunOutput(config, LoneWorld())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


# The lock


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
        claim(tmp_path, resume=True)
    for words in (str(tmp_path), f"pid {job.pid}", "Slurm job 4711", os.uname().nodename):
        assert words in str(caught.value)
    job.kill()
    while Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    claim(tmp_path, resume=True).close()  # dead, though its parent has not asked after it yet
    job.communicate()


def owner_elsewhere(path: Path, age_seconds: float, **fields: object) -> None:
    """A lock of a job on another host that last showed a sign of life `age_seconds` ago."""
    entry = {"host": "far", "pid": 1, "job": "", "restart": "0", "machine": "other", "token": "t", "since": "today"}
    (path / lock.NAME).write_text(json.dumps(entry | fields))
    then = time.time() - age_seconds
    os.utime(path / lock.NAME, (then, then))


@pytest.mark.parametrize(
    ("age_seconds", "fields", "environment", "free"),
    [
        (1, {}, {}, False),
        (lock.DEAD_SECONDS + 5, {}, {}, True),
        (1, {"job": "Slurm job 7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),  # requeued
        (1, {"job": "Slurm job 7"}, {"SLURM_JOB_ID": "7"}, False),  # a second step of the same job
        (1, {"job": "Slurm job 7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_owners_on_other_hosts(tmp_path, monkeypatch, age_seconds, fields, environment, free):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    owner_elsewhere(tmp_path, age_seconds, **fields)
    if free:
        claim(tmp_path, resume=True).close()
    else:
        with pytest.raises(ConfigError, match="host far, pid 1"):
            claim(tmp_path, resume=True)


@pytest.mark.parametrize("content", ["", "[]", "{", "\0\0", '{"pid": "x", "machine": 3}'])
def test_a_damaged_lock_is_judged_by_its_age(tmp_path, content):
    owner_elsewhere(tmp_path, 1)
    (tmp_path / lock.NAME).write_text(content)
    with pytest.raises(ConfigError, match="in use"):
        claim(tmp_path, resume=True)
    os.utime(tmp_path / lock.NAME, (0, 0))
    claim(tmp_path, resume=True).close()


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
        claim(tmp_path, resume=True)
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
