"""Resumed is the same as never stopped: losses, weights, optimizer, average, and the rows of every batch (E05, E06)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from distmlp.checkpoint import load
from tests.checkpoint_samples import assert_equal
from tests.faults.problem import losses, make_problem, newest_step, sha256, train

# 500 rows in batches of 64: 8 batches an epoch, the last of them short. 11 is in the middle of the second epoch.
MIDDLE, END = 11, 20


def last_checkpoint(output):
    return load(output / "checkpoints" / f"step-{END:08d}.h5")


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, ranks, optimizer):
    toml = make_problem(tmp_path, checkpoint_every="1 hour", ema_decay=0.95)
    rule = ("--set", f"optimizer.name={optimizer}", "--set", "optimizer.clip_norm=1.0")
    train(toml, tmp_path / "whole", ranks, "--set", f"run.steps={END}", *rule)
    train(toml, tmp_path / "parts", ranks, "--set", f"run.steps={MIDDLE}", *rule)
    assert newest_step(tmp_path / "parts") == MIDDLE
    said = train(toml, tmp_path / "parts", ranks, "--set", f"run.steps={END}", "--resume", *rule)
    assert f"run.steps changed on resume: {MIDDLE}" in said
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert sha256(tmp_path / "parts") == sha256(tmp_path / "whole")
    whole, parts = last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "parts")
    assert parts.history[0]["step"] == MIDDLE
    parts.history, parts.config = whole.history, whole.config
    assert_equal(parts, whole)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for key in ("steps", "epochs", "samples", "loss"):
        assert summaries[0][key] == summaries[1][key], key


def test_other_rank_counts_files_and_engines_continue_with_the_same_batches(tmp_path):
    toml = make_problem(tmp_path / "one", checkpoint_every="1 hour")
    # With a rate of 0 the weights stay, and the loss of a batch tells its rows apart from any others.
    still = ("--set", "optimizer.learning_rate=0")
    train(toml, tmp_path / "whole", 0, "--set", f"run.steps={END}", *still)
    train(toml, tmp_path / "parts", 2, "--set", f"run.steps={MIDDLE}", *still)
    other = make_problem(tmp_path / "two", splits=(7, 8, 123), checkpoint_every="1 hour")  # the same rows in four files
    train(other, tmp_path / "parts", 3, "--set", f"run.steps={END}", "--resume", *still)
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, END + 1))
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in expected], rtol=1e-6)
    batches = {round(loss, 5) for _, loss in expected}
    assert len(batches) == END  # the losses do tell batches apart


def test_early_stopping_goes_on_counting(tmp_path):
    toml = make_problem(tmp_path, checkpoint_every="1 hour", validate_every="2 steps", early_stopping=4)
    keys = ("--set", f"data.validation={tmp_path}/train-1.h5", "--set", "optimizer.learning_rate=0")
    train(toml, tmp_path / "whole", 0, *keys)
    train(toml, tmp_path / "parts", 0, "--set", "run.steps=6", *keys)
    train(toml, tmp_path / "parts", 0, "--resume", *keys)
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert [(s["status"], s["steps"]) for s in found] == [("early_stopped", 10)] * 2


def test_another_network_other_rows_and_a_new_seed_are_refused_by_name(tmp_path):
    toml = make_problem(tmp_path, steps=3, checkpoint_every="1 hour")
    train(toml, tmp_path / "run")
    changed = ("--set", "model.layers=[8, 25, 2]", "--set", "run.seed=1")
    said = train(toml, tmp_path / "run", 2, "--resume", *changed, code=2)
    assert said.count("model.layers: [8, 24, 2] in the checkpoint, [8, 25, 2] now") == 1
    assert said.count("run.seed: 0 in the checkpoint, 1 now") == 1
    said = train(toml, tmp_path / "run", 0, "--resume", "--set", f"data.train={tmp_path}/train-0.h5", code=3)
    assert "300 rows, 500 when the checkpoint" in said
    assert newest_step(tmp_path / "run") == 3
