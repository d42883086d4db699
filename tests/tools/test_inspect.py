"""What `distmlp inspect` says."""

from __future__ import annotations

import pytest

from distmlp.errors import CheckpointError
from distmlp.tools.inspect import run_inspect
from tests.checkpoint_samples import configuration, sample, write


def test_everything_inside_is_told(tmp_path, capsys):
    saved = sample(
        configuration((5, 7, 3), "adam", 0.9, precision="tf32"), best=0.25, validation=0.5, stale_validations=2,
        history=[{"step": 3, "changes": {"run.keep": [1, 2]}}],
    )  # fmt: skip
    path = write(tmp_path / "c.h5", saved)
    assert run_inspect(path) == 0
    said = capsys.readouterr().out
    for words in (
        str(path),
        "18 (epoch 1, batch 4 in it; 17 updates, 1 batches left out)",
        "tf32",
        "loss 0.5 here, best 0.25, 2 without improvement since",
        "adam: first_moment, second_moment, averaged weights",
        "scaled      inputs",
        saved.network.sha256(saved.state.parameters),
        "versions    distmlp 0",
        "    0         5         7            42  relu",
        "    1         7         3            24  identity",
        "total                                66",
        "resumed at step 3 with\n  run.keep: 1 -> 2",
        saved.config.to_toml(),
    ):
        assert words in said, words


def test_a_run_directory_stands_for_its_newest_checkpoint(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        write(tmp_path / "checkpoints" / f"step-{step:08d}.h5", sample(configuration(optimizer="sgd"), step=step))
    run_inspect(tmp_path)
    said = capsys.readouterr().out
    assert "step-00000002.h5" in said
    assert "sgd: no state" in said
    assert "none yet" in said


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "c.h5").write_text("hello" * 200)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        run_inspect(tmp_path / "c.h5")
