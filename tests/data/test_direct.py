"""Stretches of rows found in many files at once are those that the files hold; the open files are bounded."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmlp.data.direct import DirectRows
from distmlp.data.layout import Layout
from distmlp.data.openfiles import OpenFiles

WIDTH = 3
F4 = np.dtype("<f4")


def table(sizes, offsets, dtype=F4, **facts):
    layouts = [
        Layout(f"{k}.h5", "inputs", (rows, WIDTH), dtype, "contiguous", 1 << 40, offset=offset, **facts)
        for k, (rows, offset) in enumerate(zip(sizes, offsets, strict=True))
    ]
    return DirectRows(layouts, np.cumsum([0, *sizes]), F4)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_every_row_is_found_in_its_file(sizes, data):
    rows = sum(sizes)
    offsets = data.draw(st.lists(st.integers(0, 10**6), min_size=len(sizes), max_size=len(sizes)))
    firsts = data.draw(st.lists(st.integers(0, max(0, rows - 1)), min_size=1, max_size=8)) if rows else []
    runs = np.array([(first, data.draw(st.integers(1, rows - first))) for first in firsts], np.int64).reshape(-1, 2)
    if not len(runs):
        return
    numbers, spans = table(sizes, offsets).spans(runs)
    where = [(k, offsets[k] + 4 * WIDTH * row) for k, size in enumerate(sizes) for row in range(size)]
    wanted = [where[row] for first, count in runs for row in range(first, first + count)]
    found = [
        (number, byte)
        for number, (offset, size) in zip(numbers, spans, strict=True)
        for byte in range(offset, offset + size, 4 * WIDTH)
    ]
    assert found == wanted


def test_neighbours_are_one_read():
    numbers, spans = table([100, 100], [0, 5000]).spans(np.array([(0, 10), (10, 20), (90, 20), (120, 5)]))
    assert numbers.tolist() == [0, 0, 1, 1]
    assert spans.tolist() == [[0, 360], [1080, 120], [5000, 120], [5000 + 12 * 20, 60]]


def test_rows_that_are_not_there_as_they_are_wanted():
    runs = np.array([(3, 4)])
    assert table([10], [0]).spans(runs) is not None
    assert table([10], [-1]).spans(runs) is None
    assert table([10], [0], np.dtype(">f4")).spans(runs) is None
    assert table([10], [0], checksums=np.zeros(1, "<u4"), checksum_rows=10).spans(runs) is None
    assert table([10, 10], [0, -1]).spans(runs) is not None
    assert table([10, 10], [0, -1]).spans(np.array([(3, 12)])) is None


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
