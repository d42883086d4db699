"""Runs of the fused engine that are stopped or killed and go on: the same bits as if left alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.faults.killing import kill_again_and_again
from tests.faults.problem import ROWS, losses, make_problem, record, sha256, train

FUSED = ("--set", "run.engine=fused")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, precision):
    toml = make_problem(tmp_path, checkpoint_every="1 hour", ema_decay=0.95, precision=precision)
    train(toml, tmp_path / "whole", 0, "--set", "run.steps=20", *FUSED)
    train(toml, tmp_path / "parts", 0, "--set", "run.steps=11", *FUSED)  # in the middle of an epoch
    train(toml, tmp_path / "parts", 0, "--set", "run.steps=20", "--resume", *FUSED)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert sha256(tmp_path / "parts") == sha256(tmp_path / "whole")


@pytest.mark.parametrize("engines", [("fused", "reference"), ("reference", "fused")], ids=" to ".join)
def test_goes_on_with_the_other_engine(tmp_path, engines):
    toml = make_problem(tmp_path, checkpoint_every="1 hour", ema_decay=0.95)
    train(toml, tmp_path / "whole", 0, "--set", "run.steps=20", *FUSED)
    for engine, steps, *resume in ((engines[0], 11), (engines[1], 20, "--resume")):
        train(toml, tmp_path / "parts", 0, "--set", f"run.steps={steps}", "--set", f"run.engine={engine}", *resume)
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-4)


def test_a_run_moves_its_rows_once_and_little_else(tmp_path):
    """400 steps of 266 parameters: sending those once a step would be four times the bytes that are allowed here."""
    toml = make_problem(tmp_path, checkpoint_every="1 hour", log_every=1000, steps=400)
    train(toml, tmp_path / "run", 0, *FUSED)
    transfers = json.loads((tmp_path / "run" / "summary.json").read_text())["transfers"]
    assert transfers["steps"] == 400
    assert transfers["kernel_launches"] < 400
    assert 4 * ROWS * (8 + 2) <= transfers["host_to_device_bytes"] < 100_000
    assert 0 < transfers["device_to_host_bytes"] < 100_000


def test_twenty_kills(tmp_path):
    steps = kill_again_and_again(tmp_path, 0, 20, *FUSED)
    record("kills-fused", kills=20, resumes=20, steps=steps, same_weights=True)
