"""Values that are not finite, through the command line: where they come from is named, good weights are kept."""

from __future__ import annotations

import json
import re

import h5py
import numpy as np
import pytest

from distmlp.checkpoint import load as load_checkpoint
from distmlp.checkpoint.store import newest
from distmlp.order import Order
from tests.launching import run_distmlp, run_python

ROWS, BATCH, STREAMS, BAD_ROW = 300, 32, 12, 237
STEPS = -(-ROWS // BATCH)

CONFIG = f"""
[model]
layers = [6, 16, 2]
[data]
train = "shard-*.h5"
batch = {BATCH}
streams = {STREAMS}
standardize = "none"
[run]
epochs = 1
output = "out"
checkpoint_every = "1 steps"
log_every = 3
"""


def problem(folder, bad=None):
    """Three shards; `bad` is the value of one input in row `BAD_ROW`, row 37 of the last shard."""
    rng = np.random.default_rng(3)
    inputs, targets = rng.normal(size=(ROWS, 6)).astype("f4"), rng.normal(size=(ROWS, 2)).astype("f4")
    if bad is not None:
        inputs[BAD_ROW, 4] = bad
    for number in range(3):
        rows = slice(100 * number, 100 * (number + 1))
        with h5py.File(folder / f"shard-{number}.h5", "w") as file:
            file["inputs"], file["targets"] = inputs[rows], targets[rows]
    (folder / "run.toml").write_text(CONFIG)


def bad_batch():
    """The batch of epoch 0 that holds the bad row, and the rank of three that reads it."""
    order = Order(ROWS, STREAMS, BATCH, 0, True)
    return next(number for number in range(STEPS) if BAD_ROW in order.batch_rows(0, number, range(STREAMS)))


@pytest.mark.parametrize(("value", "ranks"), [(np.nan, 1), (np.nan, 3), (-np.inf, 3), (1e38, 3)])
def test_stop_names_step_and_row_and_keeps_the_weights(tmp_path, value, ranks):
    problem(tmp_path, value)
    result = run_distmlp(["train", "run.toml"], ranks, cwd=tmp_path)
    assert result.returncode == 5, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("not finite: ") == 1
    assert f"step {bad_batch()} " in result.stderr
    assert re.search(r"shard-2\.h5,? rows? 37\b", result.stderr), result.stderr
    last = newest(tmp_path / "out" / "checkpoints").checkpoint
    assert last.step == bad_batch()
    assert np.isfinite(last.state.parameters).all()


def test_skip_leaves_out_the_batch_on_all_ranks(tmp_path):
    problem(tmp_path, np.nan)
    hashes = set()
    for ranks in (1, 3):
        output = f"out{ranks}"
        arguments = ["train", "run.toml", "--set", "run.on_nonfinite=skip", "--output", output]
        result = run_distmlp(arguments, ranks, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        last = newest(tmp_path / output / "checkpoints").checkpoint
        assert (last.step, last.state.step, last.skipped) == (STEPS, STEPS - 1, 1)
        assert np.isfinite(last.state.parameters).all()
        summary = json.loads((tmp_path / output / "summary.json").read_text())
        assert np.isfinite(summary["loss"])
        assert summary["skipped"] == 1
        told = [line for line in result.stdout.splitlines() if "left out" in line]
        assert len(told) == 2, result.stdout  # the batch, and at the end how many there were
        assert re.search(rf"step {bad_batch()} .* left out: .*rank \d: .*shard-2\.h5,? rows? 37\b", told[0])
        hashes.add(round(summary["loss"], 5))
    assert len(hashes) == 1


def test_a_learning_rate_far_too_high_is_called_divergence(tmp_path):
    problem(tmp_path)
    arguments = ["--set", "optimizer.learning_rate=1e18", "--set", "run.epochs=9"]
    result = run_distmlp(["train", "run.toml", *arguments], 2, cwd=tmp_path)
    assert result.returncode == 5, result.stderr
    assert "the data of that batch is finite, so the training diverged" in result.stderr
    assert "optimizer.learning_rate (1e+18)" in result.stderr
    path = newest(tmp_path / "out" / "checkpoints").path
    assert np.isfinite(load_checkpoint(path).state.parameters).all()


PERTURBED = """
import sys
from distmlp import RunConfig, train
from distmlp.comm.policy import guarded
from distmlp.comm.world import open_world
from distmlp.engine.reference import ReferenceEngine

update = ReferenceEngine._update

def perturbed(self, rate):
    update(self, rate)
    if open_world().rank == 1 and self._step == 4:
        self._parameters[7] += 1e-6

ReferenceEngine._update = perturbed
guarded(lambda: train(RunConfig.load("run.toml")) and 0)
"""


def test_replicas_that_differ_are_noticed(tmp_path):
    """No user can cause it: a fault of the machine or ours, told with the step and the rank, before it is saved."""
    problem(tmp_path)
    result = run_python(3, PERTURBED, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("after 4 updates the weights of ranks [1] differ") == 1, result.stderr
    assert newest(tmp_path / "out" / "checkpoints").checkpoint.step == 3


def test_a_diverged_run_that_skips_everything_does_not_fill_the_log(tmp_path):
    problem(tmp_path)
    arguments = ["optimizer.learning_rate=1e18", "run.epochs=5", "run.on_nonfinite=skip"]
    result = run_distmlp(["train", "run.toml", *(f"--set={argument}" for argument in arguments)], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("so the training diverged") == 10
    assert re.search(r"warning: \d\d of 50 batches left out", result.stdout)


def validation_set(folder, rows, value, role="inputs"):
    """Two files of 300 rows; `value` in these rows of the second."""
    rng = np.random.default_rng(4)
    for number in range(2):
        arrays = {"inputs": rng.normal(size=(300, 6)).astype("f4"), "targets": rng.normal(size=(300, 2)).astype("f4")}
        if number:
            arrays[role][rows, 1] = value
        with h5py.File(folder / f"held-{number}.h5", "w") as file:
            for name, array in arrays.items():
                file[name] = array


HELD = ["--set", "data.validation=held-*.h5", "--set", "run.epochs=2", "--set", "run.checkpoint_every=100 epochs"]


@pytest.mark.parametrize(("value", "role", "ranks"), [(np.nan, "inputs", 1), (np.inf, "targets", 3)])
def test_validation_rows_that_are_no_numbers_end_a_run_that_goes_on_when_mended(tmp_path, value, role, ranks):
    problem(tmp_path)
    validation_set(tmp_path, [41, 42, 250], value, role)
    result = run_distmlp(["train", "run.toml", *HELD], ranks, cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count(f"validation after step {STEPS}: ") == 1, result.stderr
    assert re.search(rf"held-1\.h5 rows 41, 42, 250: {role} hold NaN or infinite values", result.stderr), result.stderr
    last = newest(tmp_path / "out" / "checkpoints").checkpoint
    assert (last.step, last.validation, last.best) == (STEPS, None, None)
    validation_set(tmp_path, [], value, role)
    resumed = run_distmlp(["train", "run.toml", *HELD, "--resume"], ranks, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    whole = run_distmlp(["train", "run.toml", *HELD, "--output", "whole"], ranks, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    found = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("out", "whole")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["validation"] == found[1]["validation"]


def test_skip_leaves_out_validation_rows_and_says_so_once(tmp_path):
    problem(tmp_path)
    losses = set()
    for ranks, rows in ((1, [41, 42, 250]), (3, [41, 42, 250])):
        validation_set(tmp_path, rows, np.nan)
        arguments = [*HELD, "--set", "run.on_nonfinite=skip", "--output", f"out{ranks}"]
        result = run_distmlp(["train", "run.toml", *arguments], ranks, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("held-1.h5 rows 41, 42, 250: inputs hold NaN or infinite values; such rows are") == 1
        summary = json.loads((tmp_path / f"out{ranks}" / "summary.json").read_text())
        assert np.isfinite(summary["validation"]["loss"])
        assert newest(tmp_path / f"out{ranks}" / "checkpoints").checkpoint.best > 0
        losses.add(round(summary["validation"]["loss"], 5))
    assert len(losses) == 1


def test_a_validation_loss_beyond_all_numbers_is_no_best(tmp_path):
    problem(tmp_path)
    validation_set(tmp_path, [5], 3e17)  # not suspicious by itself, but its squared error overflows
    result = run_distmlp(["train", "run.toml", *HELD, "--set", "model.init=glorot_normal"], cwd=tmp_path)
    assert result.returncode in (0, 5), result.stderr
    skip = [*HELD, "--set", "run.on_nonfinite=skip", "--overwrite"]
    result = run_distmlp(["train", "run.toml", *skip], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "NaN" not in (tmp_path / "out" / "metrics.jsonl").read_text()
