"""The file of predictions: complete or absent, and never in the place of what it is made from."""

from __future__ import annotations

import errno

import h5py
import numpy as np
import pytest

from distmlp.data.predictions import PredictionWriter
from distmlp.errors import DataError


def test_complete_or_absent(tmp_path):
    path = tmp_path / "new" / "out.h5"
    writer = PredictionWriter(path, (3, 2))
    writer.write(1, np.ones((2, 2), np.float32))
    assert not path.exists()
    writer.finish()
    writer.close()
    with h5py.File(path) as file:
        assert file["predictions"][:].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert [other.name for other in path.parent.iterdir()] == ["out.h5"]


def test_shard_and_checkpoint_are_not_replaced(tmp_path):
    source = tmp_path / "shard.h5"
    source.write_bytes(b"rows")
    with pytest.raises(DataError, match=r"would replace .*shard\.h5, which it is made from .*give another place"):
        PredictionWriter(source, (3, 2), [tmp_path / "checkpoint.h5", source])
    assert source.read_bytes() == b"rows"


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, *_, **__):
        path.write_bytes(b"")
        raise OSError(
            errno.ENOSPC, "Unable to synchronously create file (file write failed: time = now\n, filename = x"
        )

    monkeypatch.setattr(h5py, "File", full)
    with pytest.raises(DataError) as caught:
        PredictionWriter(tmp_path / "out.h5", (3, 2))
    assert "No space left on device (ENOSPC): " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
