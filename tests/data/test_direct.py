"""Stretches of rows found in many files at once are those that the files hold; the open files are bounded."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmlp.data.direct import DirectRows
from distmlp.data.layout import CHUNK_ENTRY, Layout
from distmlp.data.openfiles import OpenFiles

WIDTH = 3
F4 = np.dtype("<f4")


def table(sizes, offsets, dtype=F4, **facts):
    layouts = [
        Layout(f"{k}.h5", "inputs", (rows, WIDTH), dtype, "contiguous", 1 << 40, offset=offset, **facts)
        for k, (rows, offset) in enumerate(zip(sizes, offsets, strict=True))
    ]
    return DirectRows(layouts, np.cumsum([0, *sizes]), F4)


def found(reads, path_step=12):
    """(file, byte) of every row that a window's reads give."""
    return [
        (int(reads.paths[place].removesuffix(".h5")), byte)
        for place, (offset, size) in zip(reads.place, reads.spans, strict=True)
        for byte in range(offset, offset + size, path_step)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_every_row_is_found_in_its_file(sizes, data):
    rows = sum(sizes)
    offsets = data.draw(st.lists(st.integers(0, 10**6), min_size=len(sizes), max_size=len(sizes)))
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    if not rows:
        return
    firsts = np.array([[data.draw(st.integers(0, rows - 1)) for _ in range(shape[1])] for _ in range(shape[0])])
    counts = np.array([[data.draw(st.integers(1, rows - first)) for first in window] for window in firsts.tolist()])
    where = [(k, offsets[k] + 4 * WIDTH * row) for k, size in enumerate(sizes) for row in range(size)]
    windows = table(sizes, offsets).find(np.stack((firsts, counts), axis=2))
    for reads, window in zip(windows, np.stack((firsts, counts), axis=2), strict=True):
        assert found(reads) == [where[row] for first, count in window for row in range(first, first + count)]


def test_chunks_of_whole_rows_are_direct():
    chunks = np.array([(1000, 48, 0), (1048, 48, 0), (5000, 48, 0)], CHUNK_ENTRY)
    facts = {"chunk": (4, WIDTH), "chunks": chunks}
    both = [
        Layout("0.h5", "inputs", (10, WIDTH), F4, "chunked", 1 << 40, **facts),
        Layout("1.h5", "inputs", (5, WIDTH), F4, "contiguous", 1 << 40, offset=70),
    ]
    rows = DirectRows(both, np.array([0, 10, 15]), F4)
    (reads,) = rows.find(np.array([[(1, 11), (6, 1)]]))
    assert (reads.paths, reads.place.tolist()) == (["0.h5", "1.h5"], [0, 0, 1, 0])
    assert reads.spans.tolist() == [[1012, 84], [5000, 24], [70, 24], [1072, 12]]
    chunks["offset"][1] = -1  # never written
    assert DirectRows(both, np.array([0, 10, 15]), F4).find(np.array([[(1, 2)]])) == [None]


def test_the_first_file_may_be_of_another_type():
    """Its rows are not direct, and those of the others have their own size."""
    layouts = [
        Layout(f"{k}.h5", "inputs", (5, WIDTH), np.dtype(dtype), "contiguous", 1 << 40, offset=100)
        for k, dtype in enumerate(("<f4", "<f8"))
    ]
    rows = DirectRows(layouts, np.array([0, 5, 10]), np.dtype("<f8"))
    assert rows.find(np.array([[(1, 2)]])) == [None]
    assert rows.find(np.array([[(6, 2)]]))[0].spans.tolist() == [[100 + 8 * WIDTH, 16 * WIDTH]]


def test_neighbours_in_a_window_are_one_read():
    rows = table([100, 100], [0, 5000])
    reads, following = rows.find(np.array([[(0, 10), (10, 20), (90, 20)], [(110, 5), (120, 5), (125, 5)]]))
    assert (reads.paths, reads.place.tolist()) == (["0.h5", "1.h5"], [0, 0, 1])
    assert reads.spans.tolist() == [[0, 360], [1080, 120], [5000, 120]]
    assert following.spans.tolist() == [[5120, 60], [5240, 120]]


def test_rows_that_are_not_there_as_they_are_wanted():
    runs = np.array([[(3, 4)]])
    assert table([10], [0]).find(runs) != [None]
    assert table([10], [-1]).find(runs) == [None]
    assert table([10], [0], np.dtype(">f4")).find(runs) == [None]
    assert table([10], [0], checksums=np.zeros(1, "<u4"), checksum_rows=10).find(runs) == [None]
    assert table([10, 10], [0, -1]).find(runs) != [None]
    assert table([10, 10], [0, -1]).find(np.array([[(3, 12)]])) == [None]


def test_files_stay_open_while_they_are_held(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    files = OpenFiles(2)
    first = files.get(str(tmp_path / "a"))
    assert files.get(str(tmp_path / "a")) is first
    for name in "bc":
        files.get(str(tmp_path / name))
    assert os.pread(first.handle, 1, 0) == b"a"  # no longer in the list, but still held here
    assert files.get(str(tmp_path / "a")) is not first
    handle = first.handle
    del first
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    with pytest.raises(FileNotFoundError):
        files.get(str(tmp_path / "d"))
