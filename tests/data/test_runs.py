"""Bad and awkward data through the command line, on several ranks: one message, one exit code, in time."""

import json
import shutil
import time

import h5py
import numpy as np
import pytest
from data.samples import write_shard
from data.test_reader import damage_chunk
from launching import run_distmlp

SECONDS = 15.0
CONFIG = """
[model]
layers = [6, 8, 4]
loss = "softmax_cross_entropy"
[data]
train = "shard-*.h5"
batch = 16
streams = 12
standardize = "none"
residence = "stream"
[run]
epochs = 3
output = "out"
checkpoint_every = "2 steps"
"""


@pytest.fixture
def folder(tmp_path):
    """Four gzip shards of 50 rows."""
    rng = np.random.default_rng(0)
    for number in range(4):
        inputs = rng.normal(size=(50, 6)).astype("f4")
        write_shard(tmp_path / f"shard-{number}.h5", inputs, rng.integers(0, 4, 50), chunks=(10, 6), compression="gzip")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def fail(folder, *options, ranks=3):
    start = time.monotonic()
    done = run_distmlp(["train", "run.toml", *options], ranks, cwd=folder)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - start < SECONDS + 10  # interpreters start slowly on a busy machine
    assert "Traceback" not in done.stderr
    assert done.stderr.count("distmlp: error: ") == 1
    return done.stderr


def test_bad_shards_are_all_named_before_the_first_step(folder):
    whole = (folder / "shard-3.h5").read_bytes()
    (folder / "shard-3.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "shard-1.h5").write_bytes(b"")
    with h5py.File(folder / "shard-2.h5", "a") as file:
        file["targets"][7] = 4
    told = fail(folder)
    for text in (
        "3 of 4 files cannot be used", "shard-1.h5: is empty", "shard-3.h5: is truncated",
        "shard-2.h5: dataset `targets`: class labels from 0 to 4; expected 0 to 3",
    ):  # fmt: skip
        assert told.count(text) == 1
    assert "shard-0" not in told
    assert not (folder / "out" / "checkpoints").exists() or not list((folder / "out" / "checkpoints").iterdir())


def test_a_damaged_chunk_stops_all_ranks_and_saved_work_is_kept(folder):
    damage_chunk(folder / "shard-3.h5", 25)
    told = fail(folder)
    assert "shard-3.h5, dataset `inputs`, rows 20 to 29: the chunk is damaged" in told
    assert fail(folder, "--overwrite", "--set", "data.residence=host", ranks=1).count("rows 20 to 29") == 1
    assert "rows 20 to 29" in fail(folder, "--overwrite", "--set", "data.standardize=inputs")


def test_a_bad_layout_is_told_once_and_trains(folder):
    rng = np.random.default_rng(0)
    write_shard(folder / "shard-4.h5", rng.normal(size=(64, 6)), rng.integers(0, 4, 64), chunks=(1, 6))
    done = run_distmlp(["train", "run.toml", "--set", "run.epochs=1"], 2, cwd=folder)
    assert done.returncode == 0, done.stderr
    text = f"chunks of 1 row are slow to read; repack it: distmlp data convert {folder}/shard-4.h5 OUT.h5"
    assert (done.stdout + done.stderr).count(text) == 1


@pytest.mark.parametrize(("sizes", "ranks"), [((145,), 3), ((100, 1), 2), ((9, 30, 1, 40, 65), 3)])
def test_unequal_data_ends_after_the_same_steps_on_every_rank(folder, sizes, ranks):
    for path in folder.glob("shard-*.h5"):
        path.unlink()
    rng = np.random.default_rng(1)
    for number, size in enumerate(sizes):
        write_shard(folder / f"shard-{number}.h5", rng.normal(size=(size, 6)), rng.integers(0, 4, size))
    done = run_distmlp(["train", "run.toml"], ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["steps"] == 3 * -(-sum(sizes) // 16)
    assert summary["samples"] == 3 * sum(sizes)


def test_read_only_shards_and_folder(folder):
    (folder / "ro").mkdir()
    for path in folder.glob("shard-*.h5"):
        shutil.move(path, folder / "ro")
    for path in (*(folder / "ro").iterdir(), folder / "ro"):
        path.chmod(path.stat().st_mode & ~0o222)
    done = run_distmlp(["train", "run.toml", "--set", "data.train=ro/*.h5"], 2, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (folder / "ro").iterdir()) == [f"shard-{n}.h5" for n in range(4)]
    (folder / "ro").chmod(0o755)


def test_data_commands_and_their_exit_codes(folder):
    assert run_distmlp(["data", "check", "shard-*.h5"], cwd=folder).returncode == 0
    (folder / "shard-2.h5").write_bytes(b"?")
    done = run_distmlp(["data", "check", "shard-*.h5"], 2, cwd=folder)
    assert done.returncode == 3
    assert done.stdout.count("3 of 4 files good") == 1
    done = run_distmlp(["data", "check", "none-*.h5"], cwd=folder)
    assert (done.returncode, done.stdout) == (3, "")
    (folder / "t.csv").write_text("a,b\n1,0\n2,1\n")
    done = run_distmlp(["data", "convert", "t.csv", "t.h5", "--labels"], 2, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "t.h5\n2 rows in 1 file\n")
    done = run_distmlp(["data", "convert", "t.csv", "t.h5"], cwd=folder)
    assert done.returncode == 3
    assert done.stderr.count("t.h5: exists already") == 1
