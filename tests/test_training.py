"""The main job through the command line: whole processes, real files, several ranks."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from distmlp import RunConfig, load, train
from distmlp.checkpoint import load as load_checkpoint
from distmlp.checkpoint.store import newest
from distmlp.errors import DataError
from tests.launching import run_distmlp

ROWS, FEATURES, CLASSES = 1003, 12, 5

CONFIG = """
[model]
hidden = [24, 17]
loss = "softmax_cross_entropy"
[data]
train = "train-*.h5"
validation = "validation.h5"
batch = 64
streams = 12
[optimizer]
learning_rate = 3e-3
[run]
steps = 200
output = "out"
checkpoint_every = "100 steps"
log_every = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three shards of a problem that can be learned, a validation shard and a configuration."""
    path = tmp_path_factory.mktemp("problem")
    generator = np.random.default_rng(5)
    rule = generator.normal(size=(FEATURES, CLASSES))
    inputs = generator.normal(3.0, 2.0, (ROWS + 200, FEATURES)).astype("f4")
    targets = ((inputs - 3.0) @ rule + 0.1 * generator.normal(size=(ROWS + 200, CLASSES))).argmax(1)
    for name, rows in {
        "train-0": slice(0, 400), "train-1": slice(400, 401), "train-2": slice(401, ROWS),
        "validation": slice(ROWS, None),
    }.items():  # fmt: skip
        with h5py.File(path / f"{name}.h5", "w") as file:
            file["inputs"], file["targets"] = inputs[rows], targets[rows]
    (path / "run.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def runs(folder) -> dict[int, Path]:
    """The same run at 1, 2, 3 and 4 ranks."""
    for ranks in (1, 2, 3, 4):
        result = run_distmlp(["train", "run.toml", "--output", f"ranks{ranks}"], ranks, cwd=folder)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    return {ranks: folder / f"ranks{ranks}" for ranks in (1, 2, 3, 4)}


def records(path: Path) -> list[dict]:
    def strict(literal: str) -> None:
        raise AssertionError(f"{literal} in metrics.jsonl")

    return [json.loads(line, parse_constant=strict) for line in (path / "metrics.jsonl").read_text().splitlines()]


def summary(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


def test_losses_agree_at_any_number_of_ranks(runs):
    losses = {ranks: np.array([record["loss"] for record in records(path)]) for ranks, path in runs.items()}
    assert losses[1].shape == (200,)
    for ranks in (2, 3, 4):
        np.testing.assert_allclose(losses[ranks], losses[1], rtol=1e-5, err_msg=f"{ranks} ranks")


def test_validation_is_the_same_at_any_number_of_ranks(runs):
    metrics = {ranks: summary(path)["validation"] for ranks, path in runs.items()}
    assert metrics[1]["accuracy"] > 0.8  # chance is 0.2
    for ranks in (2, 3, 4):
        assert metrics[ranks]["accuracy"] == metrics[1]["accuracy"]
        assert metrics[ranks]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-4)


def test_the_same_command_gives_the_same_bits(folder, runs):
    for ranks in (1, 3):
        again = folder / f"again{ranks}"
        assert run_distmlp(["train", "run.toml", "--output", again.name], ranks, cwd=folder).returncode == 0
        assert summary(again)["weights_sha256"] == summary(runs[ranks])["weights_sha256"]


def test_what_a_run_leaves_behind(folder, runs):
    path = runs[1]
    assert sorted(entry.name for entry in path.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "run.toml",
        "summary.json",
    ]
    resolved = RunConfig.load(path / "run.toml")
    assert resolved.model.layers == (FEATURES, 24, 17, CLASSES)
    report = summary(path)
    assert report["status"] == "finished"
    assert report["steps"] == 200
    assert report["samples"] == 12 * ROWS + 8 * 64
    assert report["ranks"] == 1
    last = load_checkpoint(path / "checkpoints" / "step-00000200.h5")
    assert last.network.sha256(last.state.parameters) == report["weights_sha256"]
    every = records(path)
    assert [record["step"] for record in every] == list(range(1, 201))
    assert all("validation_loss" in record for record in every if record["step"] % 16 == 0)
    # the loss of the summary is over the rows of the last epoch, here the 8 batches of the unfinished one
    assert report["loss"] == pytest.approx(np.mean([record["loss"] for record in every[192:]]), rel=1e-6)


def test_the_resolved_configuration_runs_again(folder, runs):
    again = folder / "resolved"
    result = run_distmlp(["train", str(runs[1] / "run.toml"), "--output", str(again)], cwd=folder)
    assert result.returncode == 0, result.stderr
    assert summary(again)["weights_sha256"] == summary(runs[1])["weights_sha256"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_and_resumed_is_as_never_stopped(folder, runs, ranks):
    part = folder / f"part{ranks}"
    stopped = ["train", "run.toml", "--output", part.name, "--set", "run.steps=100"]
    assert run_distmlp(stopped, ranks, cwd=folder).returncode == 0
    result = run_distmlp(["train", "run.toml", "--output", part.name, "--resume"], ranks, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert summary(part)["weights_sha256"] == summary(runs[ranks])["weights_sha256"]
    assert [record["step"] for record in records(part)] == list(range(1, 201))
    assert [r["loss"] for r in records(part)] == [r["loss"] for r in records(runs[ranks])]


def test_resumed_at_another_rank_count_sees_the_same_batches(folder, runs):
    part = folder / "moved"
    assert (
        run_distmlp(["train", "run.toml", "--output", part.name, "--set", "run.steps=100"], 3, cwd=folder).returncode
        == 0
    )
    assert run_distmlp(["train", "run.toml", "--output", part.name, "--resume"], 2, cwd=folder).returncode == 0
    np.testing.assert_allclose(
        [record["loss"] for record in records(part)], [record["loss"] for record in records(runs[1])], rtol=1e-5
    )


def test_resume_starts_anew_where_nothing_is(folder, runs):
    fresh = folder / "fresh"
    assert run_distmlp(["train", "run.toml", "--output", fresh.name, "--resume"], cwd=folder).returncode == 0
    assert summary(fresh)["weights_sha256"] == summary(runs[1])["weights_sha256"]
    for checkpoint in (fresh / "checkpoints").iterdir():
        checkpoint.unlink()
    again = run_distmlp(["train", "run.toml", "--output", fresh.name, "--resume"], cwd=folder)
    assert "warning: no checkpoint in" in again.stdout + again.stderr
    assert summary(fresh)["weights_sha256"] == summary(runs[1])["weights_sha256"]


def test_a_finished_run_resumed_says_the_same(folder, runs):
    before = summary(runs[2])
    result = run_distmlp(["train", "run.toml", "--output", "ranks2", "--resume"], 2, cwd=folder)
    assert result.returncode == 0, result.stderr
    after = summary(runs[2])
    for key in ("status", "steps", "samples", "loss", "validation", "weights_sha256"):
        assert after[key] == before[key], key


def test_evaluate_and_predict(folder, runs):
    printed = run_distmlp(["evaluate", "ranks1", "--data", "validation.h5"], 2, cwd=folder)
    assert printed.returncode == 0, printed.stderr
    figures = json.loads(printed.stdout)
    assert figures == {"samples": 200, **summary(runs[1])["validation"]}
    assert run_distmlp(["predict", "ranks1", "--data", "validation.h5", "--out", "p.h5"], 3, cwd=folder).returncode == 0
    with h5py.File(folder / "p.h5") as file, h5py.File(folder / "validation.h5") as data:
        predictions, inputs, targets = file["predictions"][:], data["inputs"][:], data["targets"][:]
    assert predictions.dtype == np.float32
    assert (predictions.argmax(1) == targets).mean() == pytest.approx(figures["accuracy"])
    np.testing.assert_allclose(predictions.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(load(runs[1]).predict(inputs), predictions, rtol=1e-5)


def test_what_a_loaded_network_takes(runs):
    model = load(runs[1])
    width, outputs = model.config.model.layers[0], model.config.model.layers[-1]
    assert model.predict(np.zeros((0, width))).shape == (0, outputs)
    assert model.predict(np.zeros(width)).shape == (1, outputs)
    for inputs in (np.zeros((2, width + 1)), np.zeros(width + 1), [["a"] * width], [[None] * width], [[1j] * width]):
        with pytest.raises(DataError, match=r"inputs of (shape|type)"):
            model.predict(inputs)


def test_train_as_a_library_call(tmp_path, folder, capsys):
    config = RunConfig(
        model={"hidden": (24, 17), "loss": "softmax_cross_entropy"},
        data={"train": str(folder / "train-*.h5"), "batch": 64, "streams": 12},
        run={"steps": 30, "output": str(tmp_path / "run"), "early_stopping": 0},
    )
    result = train(config)
    assert result.steps == 30
    assert result.validation is None
    assert capsys.readouterr().out == ""
    found = newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.checkpoint.step == 30


def test_early_stopping_ends_the_run_on_all_ranks(folder):
    settings = ["run.early_stopping=2", "optimizer.learning_rate=0", "run.validate_every=5 steps"]
    words = [word for setting in settings for word in ("--set", setting)]
    result = run_distmlp(["train", "run.toml", "--output", "tired", *words], 2, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert summary(folder / "tired")["status"] == "early_stopped"
    assert summary(folder / "tired")["steps"] == 15  # the first sets the mark, two do not better it


def test_timed_intervals_are_agreed_between_ranks(folder):
    result = run_distmlp(
        ["train", "run.toml", "--output", "timed", "--set", "run.checkpoint_every=0.001 seconds",
         "--set", "run.validate_every=0.001 seconds", "--set", "run.steps=20"], 3, cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert all("validation_loss" in record for record in records(folder / "timed"))
