"""The file of predictions: complete or absent, and never in the place of what it is made from."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from distmlp.data.predictions import PredictionWriter
from distmlp.errors import DataError
from tests.launching import clean_environment


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


@pytest.mark.parametrize("path", ["", ".", "/", ".."])
def test_a_path_without_a_name(path):
    with pytest.raises(DataError, match="Is a directory"):
        PredictionWriter(Path(path), (3, 2))


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(
            errno.ENOSPC, "Unable to synchronously create file (file write failed: time = now\n, filename = x"
        )

    monkeypatch.setattr(h5py, "File", full)
    with pytest.raises(DataError) as caught:
        PredictionWriter(tmp_path / "out.h5", (3, 2))
    assert "No space left on device (ENOSPC): " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


LOCKLESS = """
#include <errno.h>
int flock(int fd, int operation) { (void)fd; (void)operation; errno = ENOLCK; return -1; }
"""


@pytest.mark.parametrize("setting", ["TRUE", "BEST_EFFORT"])
def test_files_are_written_where_there_are_no_locks_whatever_the_setting(tmp_path, setting):
    """HDF5_USE_FILE_LOCKING goes before what a program asks for, if HDF5 opens the file itself."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the shim")
    (tmp_path / "shim.c").write_text(LOCKLESS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c"], check=True)
    script = """
import sys, h5py, numpy as np
from pathlib import Path
from distmlp.data.predictions import PredictionWriter
from distmlp.data.writer import ShardWriter
folder, rows = Path(sys.argv[1]), np.ones((3, 2), np.float32)
try:
    h5py.File(folder / "a.h5", "w", locking=False)
    sys.exit("the shim is not in force")
except OSError:
    pass
writer = PredictionWriter(folder / "p.h5", (3, 2))
writer.write(0, rows)
writer.finish()
with ShardWriter(folder / "s.h5") as shard:
    shard.append(inputs=rows)
"""
    environment = clean_environment({"LD_PRELOAD": str(tmp_path / "shim.so"), "HDF5_USE_FILE_LOCKING": setting})
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name, dataset in (("p.h5", "predictions"), ("s.h5", "inputs")):
        with h5py.File(tmp_path / name) as file:
            assert file[dataset][:].tolist() == [[1, 1]] * 3
