"""Windows and resident pieces on the way to the device, with host memory in place of the GPU's."""

from __future__ import annotations

import ctypes

import h5py
import numpy as np
import pytest
from data.samples import SOFTMAX, alone, at, open_shards, write_ids

from distmlp.data import streaming
from distmlp.data.feed import Feed
from distmlp.order import Order, owned_streams

cupy = pytest.importorskip("cupy")
from distmlp.engine import device_rows, device_windows  # noqa: E402
from distmlp.engine.affine import Affine  # noqa: E402


class Event:
    done = True

    def __init__(self, **options):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


class Stream:
    done = False

    def __init__(self, **options):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class Orders:
    """`order.cu` as a module: `fill_window` worked out by NumPy."""

    def __init__(self, code, ledger):
        pass

    def kernel(self, name, blocks, threads):
        return getattr(self, name, None)

    @staticmethod
    def fill_window(
        rows, seed, streams, shuffle, first_stream, own_streams, epoch, place, count, stride, base, out, again
    ):
        order = Order(int(rows), int(streams), 1, int(seed), bool(shuffle))
        position = np.arange(count)
        lane, within = position % own_streams, position // own_streams
        places = [order.window_places(int(epoch), int(first_stream + k), int(place)) for k in range(own_streams)]
        table = np.array([places[k][w] for k, w in zip(lane, within, strict=True)], np.int64)
        table = (base + lane * stride + table).astype(np.uint32)
        for address in (out, again):
            ctypes.memmove(int(address), table.ctypes.data, table.nbytes)


class Memory:
    """What `Arena` is to the engine."""

    def __init__(self, buffers, stream):
        self.pieces = {buffer.name: np.full(buffer.size_bytes, 0xFF, np.uint8) for buffer in buffers}

    def address(self, name):
        return self.pieces[name].ctypes.data if name in self.pieces else 0

    def view(self, name, dtype, *shape):
        piece = self.pieces[name].view(dtype)
        return piece.reshape(-1, *shape)


class Ledger:
    def __init__(self):
        self.stream, self.uploaded = Stream(), 0

    def upload(self, address, array, stream=None):
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        self.uploaded += array.nbytes


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(cupy.cuda, "Event", Event)
    monkeypatch.setattr(cupy.cuda, "Stream", Stream)
    for module in (device_rows, device_windows):
        monkeypatch.setattr(module, "Arena", Memory)
        monkeypatch.setattr(module, "Module", Orders)
        monkeypatch.setattr(module.compiler, "cubin", lambda *arguments: b"")
    monkeypatch.setattr(device_rows, "pinned", lambda size: np.empty(max(1, size), np.uint8))
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (1, 1))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_ids(folder, (9000, 1, 20_999))
    return open_shards(folder)


@pytest.mark.parametrize(
    ("batch", "ranks", "streams"), [(333, 1, 4), (1000, 3, 4), (13_000, 1, 4), (30_000, 2, 4), (4, 4, 4), (777, 1, 1)]
)
@pytest.mark.parametrize(
    ("residence", "shuffle", "room"),
    [("stream", True, 1), ("stream", True, 140_000), ("host", True, 1 << 30), ("stream", False, 600_000)],
)
def test_the_index_table_finds_the_rows_of_every_batch(
    on_host, shards, monkeypatch, batch, ranks, streams, residence, shuffle, room
):
    """Whether one window of the order is a window on the device, or two, or all."""
    monkeypatch.setattr(streaming, "ROOM_BYTES", room)
    order = Order(shards.rows, streams, batch, 11, shuffle)
    for rank in range(ranks):
        own = device_rows.OwnRows(order, owned_streams(streams, ranks, rank))
        feed = Feed(shards, order, at(rank, ranks), residence, 3)
        affine = Affine((np.array([7.0]), np.array([2.0])), np.float32)
        rows = device_windows.WindowRows(feed, affine, own, Ledger(), 90)
        for epoch, begin, end in ((0, 0, order.batches_per_epoch), (1, 0, 3), (4, order.batches_per_epoch // 2, 10**9)):
            first = begin
            while first < min(end, order.batches_per_epoch, begin + 200):
                count = rows.steps_at_once(epoch, first, min(50, order.batches_per_epoch - first))
                place, firsts = rows.prepare(epoch, range(first, first + count))
                sizes = np.diff(own.bounds(first, count))
                index = place.arena.view("index", "u4")
                for number, start, size in zip(range(first, first + count), firsts, sizes, strict=True):
                    wanted = order.batch_rows(epoch, number, own.streams)
                    found = index[start : start + size]
                    np.testing.assert_array_equal(place.arena.view("inputs", "f4", 3)[found, 0], wanted)
                    targets = place.arena.view("targets", "f4", 1)[found, 0]
                    np.testing.assert_array_equal(targets, (wanted.astype("f4") - 7) / 2)
                rows.launched()
                rows.meanwhile()
                first += count
        feed.close()


@pytest.mark.parametrize("piece", [1, 5000, 1 << 30])
def test_resident_rows_arrive_piece_by_piece(on_host, shards, monkeypatch, piece):
    monkeypatch.setattr(device_rows, "READ_BYTES", piece * 16)
    order = Order(shards.rows, 4, 100, 0, True)
    for rank in range(2):
        feed = Feed(shards, order, at(rank, 2), "auto", 2)
        own = device_rows.OwnRows(order, feed.streams)
        if piece == 1:
            own.count = 37
        rows = device_rows.ResidentRows(feed, Affine(None, np.float32), own, Ledger(), 90)
        wanted = np.arange(own.count) + order.owned_rows(feed.streams).start
        np.testing.assert_array_equal(rows.place.arena.view("inputs", "f4", 3)[:, 0], wanted)
        np.testing.assert_array_equal(rows.place.arena.view("targets", "f4", 1)[:, 0], wanted)
        feed.close()


@pytest.mark.parametrize("place", ["windows", "resident"])
@pytest.mark.parametrize(
    ("targets", "weights", "asis"),
    [
        ("f4", "f4", {"inputs", "targets", "weights"}),
        ("f8", "f8", {"inputs"}),
        ("i4", "f4", {"inputs", "labels", "weights"}),
    ],
)
def test_what_needs_no_conversion_is_read_where_it_is_sent_from(
    on_host, tmp_path, monkeypatch, place, targets, weights, asis
):
    monkeypatch.setattr(streaming, "ROOM_BYTES", 1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=np.arange(10_000, dtype="u2")[:, None], chunks=(300, 1))
        file["targets"] = np.arange(10_000).astype(targets)
        file["w"] = np.arange(10_000).astype(weights)
    shards = open_shards(tmp_path, SOFTMAX if targets == "i4" else "mse", sample_weights="w")
    order = Order(shards.rows, 2, 500, 3, True)
    feed, own = Feed(shards, order, alone(), "stream", 2), device_rows.OwnRows(order, range(2))
    assert device_rows.Staging(feed, 5, Affine(None, np.float32))._asis == asis
    kind = device_windows.WindowRows if place == "windows" else device_rows.ResidentRows
    rows = kind(feed, Affine(None, np.float32), own, Ledger(), 90)
    if place == "resident":
        arena = rows.place.arena
        found = np.arange(10_000)
    for number in range(order.batches_per_epoch) if place == "windows" else [0]:
        if place == "windows":
            placed, firsts = rows.prepare(1, range(number, number + 1))
            arena = placed.arena
            found = arena.view("index", "u4")[firsts[0] : firsts[0] + 500]
            rows.launched()
        wanted = order.batch_rows(1, number, range(2)) if place == "windows" else found
        np.testing.assert_array_equal(arena.view("inputs", "u2")[found], wanted)
        name, dtype = ("labels", "i4") if targets == "i4" else ("targets", "f4")
        np.testing.assert_array_equal(arena.view(name, dtype)[found], wanted)
        np.testing.assert_array_equal(arena.view("weights", "f4")[found], wanted)
    feed.close()
