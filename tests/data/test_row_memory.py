"""Rows in memory are found as a file's are, or nothing is found; files go with the memory."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from distmlp.data import row_memory
from distmlp.data.row_memory import RowMemory, read_open
from distmlp.data.rows import Rows

RUNS = np.array([[(105, 3), (100, 2)], [(119, 1), (110, 4)]])


def one(targets="f8", weights=True):
    return Rows(np.empty((1, 3), "f4"), np.empty(1, targets), np.empty(1, "f4") if weights else None)


def fill(memory):
    memory.rows.inputs[:] = np.arange(60).reshape(20, 3)
    memory.rows.targets[:] = np.arange(20) % 100
    if memory.rows.weights is not None:
        memory.rows.weights[:] = np.arange(20) / 2


@pytest.mark.parametrize("targets", ["f8", "i1"])  # with i1, what follows is not aligned
@pytest.mark.parametrize("weights", [True, False])
def test_stretches_are_read_at_once(targets, weights):
    memory = RowMemory(range(100, 120), one(targets, weights))
    fill(memory)
    for runs, found in zip(RUNS, memory.find(RUNS), strict=True):
        wanted = np.concatenate([np.arange(first, first + count) for first, count in runs]) - 100
        out = memory.rows.map(lambda array, like=wanted: np.zeros_like(array[: len(like)]))
        assert read_open(found, out)
        for part, kept in zip(out.parts, memory.rows.parts, strict=True):
            np.testing.assert_array_equal(part, kept[wanted])


def test_parts_that_are_not_kept_take_no_room():
    kept = Rows(np.empty((0, 1000), "f4"), np.empty((1, 2), "f4"))
    memory = RowMemory(range(100, 120), kept)
    assert (memory.rows.inputs.shape, memory.rows.targets.shape) == ((0, 1000), (20, 2))
    assert [found.keys() for found in memory.find(RUNS, ("targets",))] == [{"targets"}, {"targets"}]


@pytest.mark.parametrize("why", ["no such call", "no memory to spare", "not allowed", "no rows"])
def test_ordinary_memory_where_there_is_no_such_file(monkeypatch, tmp_path, why):
    def refused(*arguments):
        raise OSError(28, "No space left on device")

    if why == "no such call":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif why == "no memory to spare":  # pages are promised only where they are there
        (tmp_path / "overcommit").write_text("2\n")
        monkeypatch.setattr(row_memory, "OVERCOMMIT", tmp_path / "overcommit")
    elif why == "not allowed":
        monkeypatch.setattr(os, "ftruncate", refused)
    memory = RowMemory(range(100, 100 if why == "no rows" else 120), one())
    assert memory.find(RUNS) == [{}, {}]
    if why != "no rows":
        fill(memory)
        assert memory.rows.targets[19] == 19


def test_the_file_goes_with_the_memory():
    before = set(os.listdir("/proc/self/fd"))
    memory = RowMemory(range(100, 120), one())
    assert len(set(os.listdir("/proc/self/fd")) - before) >= 1
    del memory
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before
