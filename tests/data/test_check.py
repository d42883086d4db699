"""`data check`: what it tells of good, odd and bad shards."""

import h5py
import numpy as np
import pytest
from data.samples import write_shard
from data.test_reader import damage_chunk

from distmlp.data.check import check
from distmlp.data.commands import check_command
from distmlp.errors import ConfigError, DataError


def test_a_summary_of_good_shards(tmp_path, capsys):
    inputs = np.linspace(-1, 3, 40, dtype="f4").reshape(10, 4)
    inputs[2, 1], inputs[7, 0] = np.nan, np.inf
    write_shard(tmp_path / "a.h5", inputs, np.arange(10) % 3)
    zeros = np.zeros((2000, 4), ">f8")
    write_shard(tmp_path / "b.h5", zeros, zeros[:, 0].astype("u1"), chunks=(500, 4), compression="gzip")
    assert check_command([str(tmp_path / "*.h5")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:6] == [
        f"{tmp_path}/a.h5: 10 rows",
        "  inputs: 10×4 float32, contiguous, -1 to 3, 2 NaN or infinite",
        "  targets: 10 int64, contiguous, 0 to 2",
        f"{tmp_path}/b.h5: 2,000 rows",
        "  inputs: 2000×4 float64, chunks 500×4, deflate, 0 to 0",
        "  targets: 2000 uint8, contiguous, 0 to 0",
    ]
    assert told[6].startswith("2 of 2 files good, 2,010 rows; read through by one thread at ")


def test_bad_layouts_are_named_with_the_command_that_repacks(tmp_path, capsys):
    rows = np.ones((5000, 2), "f4")
    write_shard(tmp_path / "rows.h5", rows, rows, chunks=(1, 2))
    write_shard(tmp_path / "whole.h5", rows, rows, chunks=(5000, 2), compression="gzip")
    write_shard(tmp_path / "sane.h5", rows, rows, chunks=(256, 2), compression="gzip")
    advice = {file.path.split("/")[-1]: file.datasets[0].advice for file in check(str(tmp_path / "*.h5")).files}
    repack = f"repack it: distmlp data convert {tmp_path}/rows.h5 OUT.h5"
    assert advice["rows.h5"] == f"chunks of 1 row are slow to read; {repack}"
    assert "chunks of 5000 rows: shuffled reading decodes each about 19 times" in advice["whole.h5"]
    assert advice["sane.h5"] == ""
    check_command([str(tmp_path / "rows.h5")])
    assert "    slow: chunks of 1 row" in capsys.readouterr().out


def test_bad_files_among_good_ones(tmp_path, capsys):
    rows = np.random.default_rng(0).normal(size=(100, 2))
    write_shard(tmp_path / "a.h5", rows, rows)
    write_shard(tmp_path / "b.h5", rows, rows, chunks=(20, 2), compression="gzip")
    damage_chunk(tmp_path / "b.h5", 50)
    (tmp_path / "c.h5").write_bytes(b"rubbish")
    write_shard(tmp_path / "d.h5", rows, rows[:99])
    summary = check(str(tmp_path / "*.h5"))
    assert [bool(file.problem) for file in summary.files] == [False, True, True, True]
    assert summary.rows == 100
    assert check_command([str(tmp_path / "*.h5")]) == 3
    told = capsys.readouterr().out
    for text in (
        "b.h5: BAD: dataset `inputs`, rows 40 to 59: the chunk is damaged", "c.h5: BAD: is not an HDF5 file",
        "d.h5: BAD: `inputs` has 100 rows, but `targets` has 99", "1 of 4 files good",
    ):  # fmt: skip
        assert text in told


def test_other_names_and_none(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(6.0)
    (file,) = check(str(tmp_path / "a.h5"), inputs="x", targets="").files
    assert (file.problem, file.rows) == ("", 6)
    assert "`x` (6,) float64" in check(str(tmp_path / "a.h5")).problems[0]
    with pytest.raises(DataError, match="matches no file"):
        check(str(tmp_path / "none*.h5"))


def test_unwritten_and_checksummed_datasets_are_told(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", (10, 2), "f4")
        file.create_dataset("targets", (10, 0), "f4")
    file = check(str(tmp_path / "a.h5"), targets="").files[0]
    assert file.datasets[0].layout == "never written, reads as 0"
    assert check(str(tmp_path / "a.h5")).problems


def test_inputs_without_a_name(tmp_path):
    write_shard(tmp_path / "a.h5", np.ones((3, 2)), np.ones((3, 1)))
    with pytest.raises(ConfigError, match="the dataset of the inputs has no name"):
        check([str(tmp_path / "a.h5")], inputs="")
