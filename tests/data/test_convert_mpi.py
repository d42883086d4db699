"""Conversion shared by MPI ranks: the files of one rank, and one message where something is wrong."""

import gzip
import struct
import time

import numpy as np
import pytest
from data.samples import write_shard

from distmlp.comm.world import World, open_world
from distmlp.data import formats
from distmlp.data.convert import convert
from distmlp.data.tables import Selection
from distmlp.data.writer import ShardWriter
from distmlp.errors import AgreedError, ConfigError, DataError, DistmlpError

pytestmark = pytest.mark.mpi
ROWS = 20_000
DROP = Selection(missing="drop")
CASES = {
    "csv": ({}, ["a.csv"]),
    "csv, missing values left out": ({"selection": DROP}, ["holes.csv.gz", "a.csv"]),
    "split": ({"validation": 0.2, "seed": 3}, ["a.csv", "a.csv"]),
    "split, missing values left out": ({"validation": 0.2, "selection": DROP}, ["holes.csv.gz"]),
    "one file": ({"rows_per_shard": 0}, ["a.csv"]),
    "two files": ({"rows_per_shard": 0, "validation": 0.5}, ["a.csv"]),
    "shards of two rows": ({"rows_per_shard": 2}, ["small.csv"]),
    "npy": ({}, ["x.npy", "y.npy"]),
    "npz": ({"checksums": True}, ["a.npz"]),
    "idx": ({"rows_per_shard": 1000}, ["images.gz", "labels"]),
    "hdf5": ({"rows_per_shard": 5000}, ["a.h5"]),
}


@pytest.fixture
def world():
    return open_world()


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks, with sources."""
    folder = world.broadcast(tmp_path)
    if world.rank == 0:
        lines = [f"{k},{k * 0.5},{k % 7}" for k in range(ROWS)]
        (folder / "a.csv").write_text("\n".join(lines))
        (folder / "small.csv").write_text("\n".join(lines[:41]))
        lines[3::5] = [",1,2"] * len(lines[3::5])
        with gzip.open(folder / "holes.csv.gz", "wt") as file:
            file.write("\n".join(lines))
        x, y = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3), np.arange(ROWS, dtype="u1")
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        np.savez_compressed(folder / "a.npz", x=x, y=y)
        (folder / "labels").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, ROWS) + y.tobytes())
        with gzip.open(folder / "images.gz", "wb") as file:
            file.write(struct.pack(">4B3I", 0, 0, 13, 3, *x.shape) + x.astype(">f4").tobytes())
        write_shard(folder / "a.h5", x, y, chunks=(100, 2, 3), compression="gzip")
    world.barrier()
    return folder


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 20_000)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_one_rank(world, folder, case):
    options, names = CASES[case]
    options = {"rows_per_shard": 3000, **options}
    sources = [folder / name for name in names]
    alone = convert(sources, folder / "alone" / "o.h5", **options) if world.rank == 0 else None
    alone = world.broadcast(alone)
    done = convert(sources, folder / "shared" / "o.h5", **options, world=world)
    assert [path.name for path in done.paths] == [path.name for path in alone.paths]
    assert (done.rows, done.dropped) == (alone.rows, alone.dropped)
    assert files(folder / "shared") == files(folder / "alone")
    assert len(files(folder / "alone")) == len(alone.paths)


def test_what_is_there_is_kept_and_the_rest_made(world, folder):
    out = folder / "out" / "o.h5"
    done = convert([folder / "a.csv"], out, rows_per_shard=1500, world=world)
    whole, times = files(out.parent), [path.stat().st_mtime_ns for path in done.paths]
    world.barrier()
    if world.rank == 0:
        for path in done.paths[2::3]:
            path.unlink()
        out.with_name(f".o-00002.h5.{'0' * 24}.tmp").write_bytes(b"of a rank that was killed")
    with pytest.raises(AgreedError if world.size > 1 else Exception, match="exists already"):
        convert([folder / "a.csv"], out, rows_per_shard=1500, world=world)
    convert([folder / "a.csv"], out, rows_per_shard=1500, resume=True, world=world)
    assert files(out.parent) == whole
    again = [path.stat().st_mtime_ns for path in done.paths]
    assert [old == new for old, new in zip(times, again, strict=True)] == [k % 3 != 2 for k in range(len(times))]
    world.barrier()
    convert([folder / "small.csv"], out, rows_per_shard=20, overwrite=True, world=world)
    assert sorted(files(out.parent)) == ["o-00000.h5", "o-00001.h5", "o-00002.h5"]
    world.barrier()
    if world.rank == 0:
        out.with_name("o-00007.h5").write_bytes(out.with_name("o-00002.h5").read_bytes())
    with pytest.raises(Exception, match=r"o-00007\.h5: is none of the 3 shards"):
        convert([folder / "small.csv"], out, rows_per_shard=20, resume=True, world=world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n" * 15_000 + "1,x\n" + "1,2\n" * 5_000, r"line 15001, column `1`: 'x' is not a number"),
        ("1,2\n" * 15_000 + "1\n" + "1,2\n" * 5_000, r"line 15001: 1 cells"),
        ('"\n' + "1,2\n" * 5, "never closed"),
        ("a,b\n", "no row came out"),
    ],
)
def test_one_message_on_all_ranks_and_whole_files_alone(world, folder, text, message):
    if world.rank == 0:
        (folder / "bad.csv").write_text(text)
        (folder / "out").mkdir()
    world.barrier()
    with pytest.raises(Exception, match=message) as caught:
        convert([folder / "bad.csv"], folder / "out" / "o.h5", rows_per_shard=1000, world=world)
    assert caught.value.exit_code == 3
    told = world.all_gather(str(caught.value))
    assert len(set(told)) == 1
    assert len(told[0].splitlines()) == 1
    assert all(path.suffix == ".h5" and path.name[0] != "." for path in (folder / "out").iterdir())
    convert([folder / "small.csv"], folder / "out" / "next.h5", world=world)  # no message is left for it


def test_sources_are_not_overwritten_while_they_are_read(world, folder):
    convert([folder / "a.csv"], folder / "o.h5", rows_per_shard=9000, world=world)
    before = files(folder)
    world.barrier()
    with pytest.raises(Exception, match=r"o-00000\.h5: cannot be written: would replace .*o-00000\.h5"):
        convert(sorted(folder.glob("o-*")), folder / "o.h5", rows_per_shard=100, overwrite=True, world=world)
    assert files(folder) == before
    world.barrier()
    convert([folder / "a.h5"], folder / "a.h5", overwrite=True, world=world)  # repacked in its place
    with pytest.raises(ConfigError, match="begins anew"):
        convert([folder / "a.h5"], folder / "a.h5", overwrite=True, resume=True, world=world)


def test_a_rank_with_long_work_hears_of_a_fault(world, folder, monkeypatch):
    """The first shard's rank fails at once; the others have hours to go."""

    class Slow(ShardWriter):
        def append(self, **arrays):
            super().append(**arrays)
            if self.path.name == "o-00000.h5":
                raise DataError("no more")
            time.sleep(0.2)

    monkeypatch.setattr("distmlp.data.convert.ShardWriter", Slow)
    start = time.monotonic()
    with pytest.raises(DistmlpError, match="no more") as caught:
        convert([folder / "a.csv"] * 500, folder / "o.h5", rows_per_shard=100_000, world=world)
    assert caught.value.exit_code == 3
    assert time.monotonic() - start < 10
    assert not list(folder.glob("o*"))


def test_a_world_of_one_needs_no_mpi(folder, world):
    if world.rank == 0:
        assert convert([folder / "small.csv"], folder / "one.h5", world=World()).rows == {"": 41}
