"""The output directory: who may write there, what is kept, what is removed."""

from __future__ import annotations

import json
import os
import sys
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


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "summary.json"])
def test_what_is_no_file_where_one_should_be_is_named(tmp_path, name, make):
    finished(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    output = claim(tmp_path, resume=True)
    if (name, make) == ("summary.json", os.mkfifo):  # can be removed, like any summary of an earlier end
        output.begin(configuration(output=str(tmp_path)), 5)
    else:
        with pytest.raises(CheckpointError, match=name):
            output.begin(configuration(output=str(tmp_path)), 5)
    output.close()


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
    ("name", "words"),
    [
        ("file", "file is there and no directory; see"),
        ("file/run/x", "/file is there and no directory; see"),
        ("x" * 300, "File name too long"),
    ],
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


def test_a_run_that_failed_at_its_first_file_leaves_nothing(tmp_path):
    """As when the disk is full at the first file: the next try must not find the directory in use."""
    output = claim(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    output.close()
    assert not (tmp_path / "run").exists()
