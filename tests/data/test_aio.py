"""Many reads in one call give what as many calls give, and say where they do not."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np
import pytest

from distmlp.data import aio


@pytest.fixture
def content(tmp_path):
    """A file's bytes and a handle to it."""
    path = tmp_path / "bytes"
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    path.write_bytes(values.tobytes())
    handle = os.open(path, os.O_RDONLY)
    yield values, handle
    os.close(handle)


@pytest.fixture(params=["kernel", "library", "one by one"])
def way(request, monkeypatch):
    """All ways; not every system has them all."""
    if request.param != "kernel":
        monkeypatch.setattr(aio, "_syscall", None)
        if request.param == "one by one":
            monkeypatch.setattr(aio, "_lio_listio", None)
        elif aio._lio_listio is None:
            pytest.skip("no glibc")
    elif aio._syscall is None or not aio._Context().number:
        pytest.skip("no Linux, or it gives no context")


@pytest.mark.parametrize("count", [1, 4, 300])
def test_what_is_read_is_what_is_there(way, content, count):
    values, handle = content
    rng = np.random.default_rng(count)
    spans = np.stack((rng.integers(0, 1 << 19, count), rng.integers(1, 3000, count)), axis=1)
    out = np.zeros(int(spans[:, 1].sum()), np.uint8)
    assert aio.read_spans(handle, spans, out)
    np.testing.assert_array_equal(out, np.concatenate([values[at : at + size] for at, size in spans]))


def test_a_file_that_ends_before_is_told(way, content):
    spans = np.array([(0, 10), (100, 10), (200, 10), (300, 10), ((1 << 20) - 5, 10)])
    assert not aio.read_spans(content[1], spans, np.zeros(50, np.uint8))


def test_a_handle_that_cannot_be_read(way, tmp_path):
    with open(tmp_path / "new", "wb") as file, suppress(OSError):
        assert not aio.read_spans(file.fileno(), np.array([(0, 4)] * 5), np.zeros(20, np.uint8))
