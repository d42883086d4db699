"""`run.log_ranks`: a log of every rank, beside the one copy of everything that is printed."""

from __future__ import annotations

import os

import numpy as np
import pytest

from distmlp.errors import CheckpointError
from distmlp.rank_log import RankLog
from tests.launching import run_distmlp
from tests.worlds import LoneWorld

h5py = pytest.importorskip("h5py")


def test_every_rank_keeps_its_own(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["inputs"], file["targets"] = np.ones((64, 3), "f4"), np.ones((64, 1), "f4")
    (tmp_path / "run.toml").write_text(
        '[model]\nhidden = [4]\n[data]\ntrain = "rows.h5"\nbatch = 16\n'
        '[run]\nsteps = 8\nlog_every = 4\noutput = "out"\n'
    )
    plain = run_distmlp(["train", "run.toml"], 2, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert not (tmp_path / "out" / "ranks").exists()
    again = run_distmlp(["train", "run.toml", "--overwrite", "--set", "run.log_ranks=true"], 2, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("step 4/8") == plain.stdout.count("step 4/8") == 1
    for rank in range(2):
        text = (tmp_path / "out" / "ranks" / f"rank-0000{rank}.log").read_text()
        assert f"rank {rank} of 2 on host" in text
        assert text.count(" step 4 ") == text.count(" step 8 ") == 1
        assert "s waiting for data" in text
        assert "s communication" in text
    last = run_distmlp(["train", "run.toml", "--overwrite"], 1, cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert not (tmp_path / "out" / "ranks").exists()


def test_a_log_that_cannot_be_kept_is_refused_or_ends_alone(tmp_path):
    (tmp_path / "ranks").write_text("")
    with pytest.raises(CheckpointError, match=r"run\.log_ranks"):
        RankLog(tmp_path, LoneWorld())
    log = RankLog(_folder(tmp_path / "other"), LoneWorld())
    os.close(log._file)
    log._file = os.open("/dev/full", os.O_WRONLY)
    log.write("a line")
    assert "log ends here" in log.broken
    log.write("another")
    log.close()


def _folder(path):
    path.mkdir()
    return path
