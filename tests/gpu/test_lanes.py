"""`reproducible = "ranks"`: the reference's training, and the same bits at any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from engine.fakes import run_ranks
from gpu.cases import LIMITS, Case, error
from gpu.checks import check, check_bits_repeat, epochs
from launching import mpirun_path, run_distmlp

RANKS = {"reproducible": "ranks"}
SOFTMAX = Case(widths=(20, 40, 10), loss="softmax_cross_entropy", labels=True, run=RANKS)
CASES = [
    *(Case(batch=200, batches=3, precision=p, activation="gelu", run=RANKS) for p in ("fp32", "tf32", "bf16")),
    Case(batch=3, batches=3, run=RANKS),  # streams that have no row of a batch
    Case(batch=50, extra=13, weights=True, standardize=True, run=RANKS),
    Case(batch=64, batches=3, options={"clip_norm": 0.05}, run={**RANKS, "ema_decay": 0.9}, optimizer="adam"),
    Case(batch=64, batches=3, optimizer="lamb", run=RANKS),
    Case(widths=(20, 60, 50, 4), batch=68, optimizer="adam", run=RANKS),  # compiled as RUN is
    SOFTMAX,
    SOFTMAX.but(widths=(20, 40, 1000), batch=33, weights=True, extra=1, precision="bf16"),
    Case(batch=50, extra=13, residence="stream", run=RANKS),
]
SETTINGS = {key: value for key, value in os.environ.items() if key.startswith("I_MPI_")}
RUN = """
[model]
layers = [20, 60, 50, 4]
loss = "mse"
activation = "tanh"
[data]
train = "part-*.h5"
batch = 100
streams = 6
[run]
epochs = 3
engine = "fused"
share_gpu = true
reproducible = "ranks"
output = "out"
"""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_reference_training(case):
    check(case)


def test_runs_repeat_to_the_bit():
    check_bits_repeat(CASES[4], 3)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], SOFTMAX], ids=str)
def test_evaluates_and_predicts_like_the_reference(case):
    """All rows in their order, though training leaves out those of other streams."""
    rows, reference, engine = case.data(), case.reference(), case.fused()
    for each in (reference, engine):
        epochs(each, case, 4)
    limit = 20 * LIMITS[case.precision]
    assert error(engine.predict(rows.inputs), reference.predict(rows.inputs)) < limit
    mine, theirs = (each.evaluate(rows.inputs, rows.targets, None) for each in (engine, reference))
    assert error(mine.as_array(), theirs.as_array()) < limit


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[4], CASES[9]], ids=str)
def test_same_bits_at_any_number_of_ranks(case):
    """Threads as ranks on one GPU, through the staged reduction."""

    def body(world) -> bytes:
        engine = case.fused(world=world)
        losses = [engine.train(epoch, 0, np.full(case.order.batches_per_epoch, 1e-2)).losses for epoch in range(3)]
        state = engine.state()
        engine.close()
        return np.concatenate([*losses, state.parameters]).tobytes()

    assert len({bits for ranks in (1, 2, 3, 4) for bits in run_ranks(ranks, body)}) == 1


@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun on PATH")
def test_commands_leave_the_same_weights(tmp_path: Path):
    random = np.random.default_rng(0)
    inputs = random.standard_normal((1003, 20)).astype("f4")
    for number, part in enumerate(np.array_split(inputs, 3)):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            file["inputs"], file["targets"] = part, np.sin(part[:, :4])
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    found = {}
    for ranks, transport in ((1, "auto"), (2, "auto"), (4, "staged")):
        name = f"{transport}{ranks}"
        words = ["--set", f"run.transport={transport}"]
        env = SETTINGS if transport == "auto" else SETTINGS | {"I_MPI_OFFLOAD": "0"}
        done = run_distmlp(["train", str(path), "--output", str(tmp_path / name), *words], ranks, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["engine"] == "fused"
        assert summary["transport"] != "peer"
        found[name] = summary["weights_sha256"], summary["loss"]
    assert len({weights for weights, _ in found.values()}) == 1, found
    assert len({loss for _, loss in found.values()}) == 1, found
