"""Rows read without the HDF5 library are those that the library gives, for every number type and layout."""

import errno
import importlib.util
import os
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
from data.samples import layout_of, open_shards, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from distmlp.data.decode import DamagedChunk, decode
from distmlp.data.reader import RowReader
from distmlp.errors import DataError

TYPES = [f"{order}{kind}" for order in "<>" for kind in ("i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]
TYPES += ["i1", "u1", "?"]
FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip+shuffle": {"compression": "gzip", "shuffle": True},
    "shuffle": {"shuffle": True},
    "lzf": {"compression": "lzf", "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "gzip+fletcher32": {"compression": "gzip", "fletcher32": True},
}


def test_a_thread_makes_do_with_the_files_that_it_may_open(tmp_path, monkeypatch):
    rows = np.arange(6, dtype="f4").reshape(3, 2)
    layouts = [layout_of(write_shard(tmp_path / f"{number}.h5", rows + number, rows), "inputs") for number in range(9)]
    opened, real = set(), os.open

    def open_(path, *arguments):
        opened.difference_update([number for number in opened if not os.path.exists(f"/proc/self/fd/{number}")])
        if len(opened) == 3:
            raise OSError(errno.EMFILE, "Too many open files", path)
        opened.add(handle := real(path, *arguments))
        return handle

    monkeypatch.setattr(os, "open", open_)
    reader, out = RowReader(), np.empty((3, 2), "f4")
    for number in (*range(9), *range(9)):
        reader.read(layouts[number], 0, 3, out)
        np.testing.assert_array_equal(out, rows + number)


def read(path, start, stop, out_dtype=None, name="inputs"):
    layout = layout_of(path, name)
    out = np.empty((stop - start, layout.width), out_dtype or layout.native)
    RowReader().read(layout, start, stop, out)
    return out


@st.composite
def datasets(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
    rows = draw(st.integers(1, 40))
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    raw = draw(st.binary(min_size=16, max_size=64))
    values = np.resize(np.frombuffer(raw, np.uint8), rows * int(np.prod(shape, dtype=int)) * dtype.itemsize)
    array = (values % 2 if dtype.kind == "b" else values).view(dtype).reshape(rows, *shape)
    options = {}
    if draw(st.booleans()):
        chunk = tuple(draw(st.integers(1, size)) for size in array.shape)
        options = {"chunks": chunk, **FILTERS[draw(st.sampled_from(sorted(FILTERS)))]}
    start = draw(st.integers(0, rows - 1))
    return array, options, start, draw(st.integers(start + 1, rows)), draw(st.sampled_from(["earliest", "latest"]))


@given(datasets())
@settings(max_examples=120)
def test_every_number_type_byte_order_and_layout(tmp_path_factory, case):
    array, options, start, stop, version = case
    path = tmp_path_factory.mktemp("reader") / "a.h5"
    with h5py.File(path, "w", libver=version) as file:
        file.create_dataset("inputs", data=array, **options)
    ours = read(path, start, stop)
    theirs = array[start:stop].reshape(stop - start, -1)
    assert ours.dtype.isnative
    expected = theirs.astype(np.uint8 if array.dtype == bool else array.dtype.newbyteorder("="))
    assert ours.tobytes() == expected.tobytes()


def test_compact_unwritten_and_partly_written_datasets(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space, kind = h5py.h5s.create_simple((4, 2)), h5py.h5t.py_create(np.dtype(">i2"))
        compact = h5py.Dataset(h5py.h5d.create(file.id, b"compact", kind, space, plist))
        compact[...] = np.arange(8).reshape(4, 2)
        file.create_dataset("never", (5, 3), ">f4", fillvalue=2.5)
        file.create_dataset("partly", (10, 3), "f4", chunks=(2, 3), fillvalue=-1)[4:6] = 7
        file["after"] = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(read(path, 1, 4, name="compact"), [[2, 3], [4, 5], [6, 7]])
    assert (read(path, 0, 5, name="never") == 2.5).all()
    assert read(path, 3, 7, name="partly")[:, 0].tolist() == [-1, 7, 7, -1]
    np.testing.assert_array_equal(read(path, 1, 3, name="after"), [[2, 3], [4, 5]])


@pytest.mark.parametrize("options", [{"scaleoffset": 0}, {"compression": "szip"}, {"compression": "lzf"}])
def test_filters_that_only_hdf5_knows(tmp_path, options):
    array = np.arange(300, dtype="i4").reshape(50, 6)
    try:
        write_shard(tmp_path / "a.h5", array, array, chunks=(16, 4), **options)
    except ValueError as error:
        pytest.skip(str(error))
    np.testing.assert_array_equal(read(tmp_path / "a.h5", 3, 50), array[3:])


@pytest.mark.parametrize("name", ["scaleoffset", "nbit"])
def test_hdf5_must_not_read_beyond_a_chunk_that_lost_its_end(tmp_path, name):
    """These two filters trust the chunk: HDF5 gives what lies behind it in memory, or dies."""
    values = np.arange(600).reshape(100, 6) * 3
    with h5py.File(tmp_path / "a.h5", "w") as file:
        kind, plist = h5py.h5t.STD_I32LE, h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((50, 6))
        if name == "nbit":
            plist.set_filter(h5py.h5z.FILTER_NBIT, 0, ())
        else:
            plist.set_scaleoffset(h5py.h5z.SO_INT, 0)
        space = h5py.h5s.create_simple(values.shape)
        h5py.Dataset(h5py.h5d.create(file.id, b"inputs", kind, space, plist))[...] = values
        file["targets"] = values
    assert (read(tmp_path / "a.h5", 0, 100) == values).all()
    layout = layout_of(tmp_path / "a.h5")
    whole = (tmp_path / "a.h5").read_bytes()
    offset, size, _ = layout.chunks[1].tolist()
    for cut in (2, size // 2, size - 5):
        with pytest.raises(DamagedChunk, match=f"{size - cut} bytes, expected \\d+ at least"):
            decode(layout, whole[offset : offset + size - cut], 0)


def test_incompressible_chunks_that_skipped_their_filter(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 8)).astype("u1")
    write_shard(tmp_path / "a.h5", noise, noise, chunks=(64, 8), compression="lzf", fletcher32=True)
    assert layout_of(tmp_path / "a.h5").chunks["mask"][0] == 1
    np.testing.assert_array_equal(read(tmp_path / "a.h5", 0, 64), noise)


def damage_chunk(path, row, name="inputs"):
    """Flip a byte in the middle of the stored chunk that holds `row`."""
    layout = layout_of(path, name)
    entry = layout.chunks.reshape(layout.grid)[row // layout.chunk[0], 0]
    data = bytearray(path.read_bytes())
    data[int(entry["offset"]) + int(entry["size"]) // 2] ^= 0x55
    path.write_bytes(data)


@pytest.mark.parametrize("filters", ["gzip", "gzip+shuffle", "fletcher32", "gzip+fletcher32"])
def test_a_damaged_chunk_is_named_with_its_rows(tmp_path, filters):
    path = tmp_path / "a.h5"
    array = np.random.default_rng(0).normal(size=(100, 4)).astype("f4")
    write_shard(path, array, array, chunks=(20, 4), **FILTERS[filters])
    damage_chunk(path, 50)
    shards = open_shards(tmp_path)
    np.testing.assert_array_equal(shards.read(0, 40).inputs, array[:40])
    with pytest.raises(DataError) as caught:
        shards.read(30, 50)
    assert f"{path}, dataset `inputs`, rows 40 to 59: the chunk is damaged" in str(caught.value)


def test_a_file_cut_off_after_it_was_checked(tmp_path):
    array = np.ones((100, 4), "f4")
    path = write_shard(tmp_path / "a.h5", array, array)
    shards = open_shards(tmp_path)
    with open(path, "r+b") as file:
        file.truncate(shards.files[0]["inputs"].offset + 10 * 16)
    assert len(shards.read(0, 0)) == 0
    with pytest.raises(DataError, match=r"a\.h5, dataset `inputs`, rows 8 to 19: the file ends before them"):
        shards.read(8, 20)
    write_shard(path, array, array)
    open_shards_again = open_shards(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="rows 8 to 19: cannot be read: no such file"):
        open_shards_again.read(8, 20)


def test_a_file_that_grows_keeps_its_row_count(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name in ("inputs", "targets"):
            file.create_dataset(name, data=np.ones((10, 2)), maxshape=(None, 2), chunks=(4, 2))
    shards = open_shards(tmp_path)
    with h5py.File(path, "a") as file:
        for name in ("inputs", "targets"):
            file[name].resize((50, 2))
            file[name][10:] = 5
    assert shards.rows == 10
    assert (shards.read(0, 10).inputs[:8] == 1).all()


def test_memory_for_a_chunk_is_bounded_by_its_size(tmp_path):
    """A chunk that inflates to more than it should is refused without inflating it."""
    zeros = np.zeros((1000, 10), "f4")
    write_shard(tmp_path / "a.h5", zeros, zeros, chunks=(1000, 10), compression="gzip")
    layout = layout_of(tmp_path / "a.h5")
    bomb = zlib.compress(bytes(1 << 25))
    with pytest.raises(DamagedChunk, match="expected 40000"):
        decode(layout, bomb, 0)
    with pytest.raises(DamagedChunk, match="ends early"):
        decode(layout, zlib.compress(bytes(40000))[:-8], 0)
    with pytest.raises(DamagedChunk, match="gzip data is damaged"):
        decode(layout, b"nonsense", 0)


def test_compressors_of_hdf5plugin_are_loaded_when_a_file_needs_them(tmp_path):
    """Not imported here, as in a user's training: the reader and the checking child have to see to it."""
    if importlib.util.find_spec("hdf5plugin") is None:
        pytest.skip("hdf5plugin is not installed")
    script = (
        "import sys, h5py, hdf5plugin, numpy as np\n"
        "x = np.arange(4000, dtype='f4').reshape(500, 8)\n"
        "for name in ('Blosc', 'Blosc2', 'Zstd', 'LZ4', 'Bitshuffle'):\n"
        "    with h5py.File(f'{sys.argv[1]}/{name}.h5', 'w') as file:\n"
        "        file.create_dataset('inputs', data=x, chunks=(99, 8), **getattr(hdf5plugin, name)())\n"
        "        file['targets'] = x\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    rows = open_shards(tmp_path).read(0, 2500)
    np.testing.assert_array_equal(rows.inputs, rows.targets)
    assert rows.inputs[499, 7] == 3999
