"""The feed: exactly the rows of the sample order on every rank, from memory and from the files, whatever happens."""

import hashlib
import os
import threading
from collections import Counter

import h5py
import numpy as np
import pytest
from data.samples import SOFTMAX, alone, at, open_shards, write_ids, write_shard
from data.test_reader import damage_chunk
from hypothesis import given, settings
from hypothesis import strategies as st

from distmlp import order as order_module
from distmlp.data import feed as feed_module
from distmlp.data import reader, streaming
from distmlp.data.batches import Singles, WindowBatches, runs
from distmlp.data.feed import Feed
from distmlp.data.lanes import Lanes
from distmlp.errors import ConfigError, DataError, SystemUnfitError
from distmlp.order import BLOCK_ROWS, WINDOW_ROWS, Order, owned_streams

ROWS = (700, 1, 1299, 61)


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Shards whose inputs tell the row, in several files; their inputs."""
    folder = tmp_path_factory.mktemp("ids")
    return open_shards_of(folder), folder


def open_shards_of(folder):
    write_ids(folder, ROWS)
    return open_shards(folder)


def shorten_windows(monkeypatch):
    for module in (order_module, streaming):
        monkeypatch.setattr(module, "BLOCK_ROWS", 16)
        monkeypatch.setattr(module, "WINDOW_ROWS", 64)


def feeds(shards, order, ranks, how):
    """The feeds of all ranks, made to hold rows in memory, to stream windows, or to stream single batches."""
    made = [Feed(shards, order, at(rank, ranks), "host" if how == "host" else "stream", 2) for rank in range(ranks)]
    if how == "single":
        for feed in made:
            feed.free_bytes = 1
    return made


@pytest.mark.parametrize("how", ["host", "window", "single"])
@pytest.mark.parametrize(("streams", "batch", "shuffle", "ranks"), [
    (16, 256, True, 1), (16, 256, True, 3), (7, 100, False, 7), (5, 1999, True, 4), (6, 3, True, 2),
    (9, 99999, True, 2),
])  # fmt: skip
def test_every_rank_gets_its_rows_of_every_batch_in_order(ids, how, streams, batch, shuffle, ranks):
    order = Order(ids[0].rows, streams, batch, 3, shuffle)
    made = feeds(ids[0], order, ranks, how)
    numbers = range(order.batches_per_epoch) if batch > 50 else [0, 1, 2, 3, 400, 401, order.batches_per_epoch - 1]
    for epoch in (0, 1):
        for number in numbers:
            for feed in made:
                rows = feed.batch(epoch, number)
                expected = order.batch_rows(epoch, number, feed.streams)
                assert rows.inputs[:, 0].tolist() == expected.tolist()
                assert rows.targets[:, 0].tolist() == expected.tolist()
    for feed in made:
        feed.close()


@pytest.mark.parametrize("how", ["host", "window", "single"])
def test_windows_longer_than_one(ids, how, monkeypatch):
    """Short windows, so that an epoch has several and a batch lies over two."""
    shorten_windows(monkeypatch)
    order = Order(ids[0].rows, 4, 150, 9, True)
    for feed in feeds(ids[0], order, 3, how):
        for epoch, number in [(e, n) for e in (4, 5) for n in range(order.batches_per_epoch)] + [
            (0, 3),
            (0, 2),
            (9, 0),
        ]:
            got = feed.batch(epoch, number).inputs[:, 0]
            assert got.tolist() == order.batch_rows(epoch, number, feed.streams).tolist()
        feed.close()


@pytest.mark.parametrize("how", ["host", "window", "single"])
def test_resuming_in_the_middle_of_an_epoch(ids, how):
    """Step 7 of epoch 2 comes next after a restart at another rank count: no row twice, none left out."""
    order = Order(ids[0].rows, 8, 256, 5, True)
    seen: list[float] = []
    for ranks, numbers in ((2, range(7)), (3, range(7, order.batches_per_epoch))):
        made = feeds(ids[0], order, ranks, how)
        for number in numbers:
            rows = [row for feed in made for row in feed.batch(2, number).inputs[:, 0].tolist()]
            assert sorted(rows) == sorted(order.batch_rows(2, number, range(8)).tolist())
            seen += rows
        for feed in made:
            feed.close()
    assert sorted(seen) == list(range(ids[0].rows))


@pytest.mark.parametrize(("rows", "batch", "ranks"), [((145,), 16, 3), ((100, 1), 16, 2), ((20, 30, 1, 40, 9), 16, 3)])
def test_unequal_data_gives_every_rank_the_same_number_of_batches(tmp_path, rows, batch, ranks):
    write_ids(tmp_path, rows)
    shards = open_shards(tmp_path)
    order = Order(shards.rows, max(4, ranks), batch, 1, True)
    for epoch in range(3):
        seen = []
        for number in range(order.batches_per_epoch):
            sizes = []
            for feed in feeds(shards, order, ranks, "host"):
                got = feed.batch(epoch, number).inputs[:, 0].tolist()
                sizes.append(len(got))
                seen += got
            assert sum(sizes) == order.batch_size(number)
        assert sorted(seen) == list(range(shards.rows))


def test_more_ranks_than_rows_in_a_batch(ids):
    order = Order(ids[0].rows, 8, 2, 0, True)
    sizes = [len(feed.batch(0, 1)) for feed in feeds(ids[0], order, 8, "host")]
    assert sizes == [0, 0, 1, 1, 0, 0, 0, 0]
    assert feeds(ids[0], order, 8, "window")[0].blame(0, 1) is None


def hash_of_epochs(feed, order, epochs):
    digest = hashlib.sha256()
    for epoch in range(epochs):
        for number in range(order.batches_per_epoch):
            for part in feed.batch(epoch, number).parts:
                digest.update(np.ascontiguousarray(part))
    feed.close()
    return digest.hexdigest()


def test_any_number_of_readers_while_hdf5_is_written(tmp_path):
    """20 epochs with 1, 2 and 8 reader threads, chunked and contiguous files, checkpoints saved all the while."""
    write_ids(tmp_path, (500, 300), chunks=(64, 2), compression="lzf", shuffle=True)
    write_shard(tmp_path / "part-02.h5", np.ones((77, 3), "f4"), np.ones((77, 1), "f4"))
    shards, stop, saved = open_shards(tmp_path), threading.Event(), []

    def save():
        while not stop.is_set():
            with h5py.File(tmp_path / "checkpoint.h5.tmp", "w") as file:
                file.create_dataset("weights", data=np.ones((50, 50)), chunks=(10, 10), compression="gzip")
            saved.append(1)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        order = Order(shards.rows, 4, 100, 1, True)
        made = [Feed(shards, order, alone(), "stream", readers) for readers in (1, 2, 8)]
        hashes = {hash_of_epochs(feed, order, 20) for feed in made}
        hashes.add(hash_of_epochs(Feed(shards, order, alone(), "host"), order, 20))
    finally:
        stop.set()
        writer.join()
    assert len(hashes) == 1
    assert len(saved) > 3


@pytest.mark.parametrize("how", ["host", "window", "single"])
def test_damage_in_mid_training_names_file_and_rows(tmp_path, how):
    write_ids(tmp_path, (300, 300), chunks=(50, 3), compression="gzip")
    shards = open_shards(tmp_path)
    damage_chunk(tmp_path / "part-01.h5", 120)
    order = Order(600, 2, 60, 0, True)
    feed = feeds(shards, order, 1, how)[0]
    with pytest.raises(DataError, match=r"part-01\.h5, dataset `inputs`, rows 100 to 149: the chunk is damaged"):
        [feed.batch(0, number) for number in range(order.batches_per_epoch)]
    feed.close()
    healthy = feeds(shards, order, 2, how)[0]  # the other rank's rows
    assert sum(len(healthy.batch(0, number)) for number in range(order.batches_per_epoch)) == 300


@pytest.mark.parametrize(("value", "text"), [
    (np.nan, "NaN or infinite"), (-np.inf, "NaN or infinite"), (1e300, "NaN or infinite"),
    (1e38, "values beyond 1e+18"),
])  # fmt: skip
@pytest.mark.parametrize("role", ["inputs", "targets", "sample weights"])
def test_a_row_that_is_not_a_number_is_blamed(tmp_path, value, text, role):
    rows = {"inputs": np.ones((200, 2)), "targets": np.ones((200, 1)), "sample weights": np.ones(200)}
    shards = open_with(tmp_path, rows)
    order = Order(200, 4, 50, 0, True)
    assert Feed(shards, order, alone()).blame(0, 0) is None
    rows[role][137] = value
    if role == "sample weights" and value < 0:
        value = rows[role][137] = np.inf
    shards = open_with(tmp_path, rows)
    number = next(n for n in range(4) if 137 in order.batch_rows(0, n, range(4)))
    told = Feed(shards, order, alone(), "stream").blame(0, number)
    assert told is not None
    assert told.startswith(f"{tmp_path}/a.h5 row 137: {role} hold ")
    assert text in told
    assert Feed(shards, order, alone()).blame(0, (number + 1) % 4) is None


def open_with(folder, rows):
    with h5py.File(folder / "a.h5", "w") as file:
        for name, values in rows.items():
            file[name] = values
    return open_shards(folder, sample_weights="sample weights")


def test_resident_rows_are_in_storage_order(ids):
    order = Order(ids[0].rows, 5, 10, 0, True)
    parts = [feed.resident() for feed in feeds(ids[0], order, 3, "window")]
    assert np.concatenate([part.inputs[:, 0] for part in parts]).tolist() == list(range(ids[0].rows))
    for rank, feed in enumerate(feeds(ids[0], order, 3, "host")):
        assert feed.resident_bytes() == sum(part.nbytes for part in feed.resident().parts)
        feed.batch(0, 0)
        assert feed.resident().inputs[0, 0] == order.stream_start(owned_streams(5, 3, rank).start)


def test_streaming_holds_two_windows_and_no_more(ids, monkeypatch):
    shorten_windows(monkeypatch)
    order = Order(ids[0].rows, 4, 50, 0, True)
    made = []
    real = ids[0].empty
    monkeypatch.setattr(ids[0], "empty", lambda count: made.append(count) or real(count))
    feed = Feed(ids[0], order, alone(), "stream")
    for number in range(order.batches_per_epoch):
        feed.batch(0, number)
    assert [count for count in made if count > 1] == [4 * 64] * 2  # one row to count its bytes
    feed.close()


def test_where_rows_are_kept(ids, monkeypatch):
    order = Order(ids[0].rows, 4, 50, 0, True)
    needed = Feed(ids[0], order, alone()).resident_bytes()

    def free(count):
        monkeypatch.setattr(feed_module, "available_bytes", lambda: count)

    free(4 * needed)
    assert Feed(ids[0], order, alone()).residence == "host"
    assert Feed(ids[0], order, alone(), "stream").residence == "stream"
    free(needed)
    assert Feed(ids[0], order, alone()).residence == "stream"
    assert Feed(ids[0], order, alone(), "host").residence == "host"
    free(needed // 4)
    with pytest.raises(SystemUnfitError, match=f"needs {needed:,} bytes, but {needed // 4:,} are free"):
        Feed(ids[0], order, alone(), "host")
    for count, kind in ((16 * needed, WindowBatches), (8, Singles)):
        free(count)
        feed = Feed(ids[0], order, alone(), "stream")
        feed.batch(0, 0)
        assert isinstance(feed._source, kind)


def test_layouts_that_do_not_suit_streaming_are_told(tmp_path):
    rows = np.ones((2000, 2), "f4")
    for name in "ab":
        write_shard(tmp_path / f"{name}.h5", rows, rows, chunks=(1, 2))
    write_shard(tmp_path / "c.h5", rows, rows, chunks=(2000, 2), compression="gzip")
    shards = open_shards(tmp_path)
    order = Order(shards.rows, 4, 50, 0, True)
    told = Feed(shards, order, alone(), "stream").advice()
    assert len(told) == 2
    assert told[0].startswith("data: chunks of 1 row are slow to read; repack it: distmlp data convert")
    assert told[1].startswith("data: chunks of 2000 rows")
    assert Feed(shards, order, alone(), "host").advice() == []


@pytest.mark.parametrize(
    ("first", "told"), [(0, []), (1, ["data: the lowest class label is 1, so that no row is of class 0"])]
)
def test_labels_that_do_not_count_from_0_are_told(tmp_path, first, told):
    write_shard(tmp_path / "a.h5", np.ones((9, 2), "f4"), np.arange(9) % 3 + first)
    shards = open_shards(tmp_path, SOFTMAX)
    assert shards.outputs == 3 + first
    assert Feed(shards, Order(9, 1, 3, 0, True), alone(), "host").advice() == told


@pytest.mark.parametrize("ranks", [1, 3])
def test_compressed_rows_are_decoded_once_where_there_is_scratch(tmp_path, monkeypatch, ranks):
    """More than chunks that are no whole rows, little memory for decoded ones, an epoch and a bit."""
    (tmp_path / "scratch").mkdir()
    rows = np.arange(9000 * 3, dtype="f4").reshape(9000, 3)
    for number, part in enumerate((rows[:5000], rows[5000:])):
        write_shard(tmp_path / f"{number}.h5", part, part[:, :1] * 2, chunks=(1500, 2), compression="gzip")
    decoded = []
    original = reader.decode
    monkeypatch.setattr(reader, "decode", lambda layout, *rest: decoded.append(layout.path) or original(layout, *rest))
    monkeypatch.setattr(feed_module, "CHUNK_SHARE", 0)
    shards = open_shards(tmp_path)
    order = Order(shards.rows, 4, 500, 3, True)
    made = [Feed(shards, order, at(rank, ranks), "stream", 2, str(tmp_path / "scratch")) for rank in range(ranks)]
    for epoch, number in [(0, n) for n in range(18)] + [(1, 4), (3, 17)]:
        for feed in made:
            batch = feed.batch(epoch, number)
            wanted = order.batch_rows(epoch, number, feed.streams)
            np.testing.assert_array_equal(batch.inputs, rows[wanted])
            np.testing.assert_array_equal(batch.targets[:, 0], rows[wanted, 0] * 2)
    assert len(decoded) <= 2 * 7 + 4 * (ranks - 1)  # those at the ends of a rank's rows by both
    assert not list((tmp_path / "scratch").iterdir()), "the file has no name"
    assert not made[0].advice()
    for feed in made:
        feed.close()


@pytest.mark.parametrize("memory", ["a file", "no file", "a file that cannot be read"])
@pytest.mark.parametrize(("features", "held"), [(3, False), (40, True)])
def test_narrow_columns_are_read_once(tmp_path, monkeypatch, features, held, memory):
    """And then lie in memory, where they are narrow beside the whole row."""
    write_ids(tmp_path, ROWS, features)
    shards = open_shards(tmp_path)
    order = Order(shards.rows, 4, 500, 3, True)
    feed = Feed(shards, order, at(1, 2), "stream", 2)
    read = Counter()  # rows that come from the shards, by columns
    original, open_memory = reader.RowReader.read_direct, os.memfd_create

    def counted(self, reads):
        for part, out in reads:
            if part.handle < 0:
                read[out.size // len(out)] += len(out)
            elif memory == "a file that cannot be read":
                return False
        return original(self, reads)

    def refused(*name):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(reader.RowReader, "read_direct", counted)
    monkeypatch.setattr(os, "memfd_create", refused if memory == "no file" else open_memory)
    for epoch in range(3):
        for number in range(order.batches_per_epoch):
            batch = feed.batch(epoch, number)
            wanted = order.batch_rows(epoch, number, feed.streams)
            np.testing.assert_array_equal(batch.inputs[:, 0], wanted)
            np.testing.assert_array_equal(batch.targets[:, 0], wanted)
    assert (read[1] == len(order.owned_rows(feed.streams))) is held
    assert read[features] >= 3 * len(order.owned_rows(feed.streams)), "inputs are streamed"
    feed.close()


@pytest.mark.parametrize("targets", ["f4", "f8", "i1"])
def test_narrow_columns_of_several_kinds(tmp_path, targets):
    """Where they lie one after the other, of whatever size."""
    rows = np.arange(2 * 4096 + 777)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["inputs"] = np.repeat(rows.astype("f4")[:, None], 70, axis=1)
        file["targets"] = (rows % 100).astype(targets)
        file["w"] = (rows / 7).astype("f4")
    shards = open_shards(tmp_path, SOFTMAX if targets == "i1" else "mse", sample_weights="w")
    order = Order(shards.rows, 2, 500, 3, True)
    feed = Feed(shards, order, alone(), "stream", 3)
    for epoch in range(2):
        for number in range(order.batches_per_epoch):
            batch, wanted = feed.batch(epoch, number), order.batch_rows(epoch, number, range(2))
            np.testing.assert_array_equal(batch.inputs[:, 69], wanted)
            np.testing.assert_array_equal(batch.targets.reshape(-1), wanted % 100)
            np.testing.assert_array_equal(batch.weights, (wanted / 7).astype("f4"))
    feed.close()


@pytest.mark.parametrize(("options", "pieces"), [
    ({}, 1), ({"chunks": (64, 5)}, 5), ({"chunks": (8192, 5)}, 2), ({"chunks": (8192, 5), "compression": "gzip"}, 0),
])  # fmt: skip
def test_shuffled_reading_stays_contiguous(tmp_path, monkeypatch, options, pieces):
    """Whole blocks of the order in as few reads as their chunks allow, none of it twice; packed chunks decoded once."""
    count, reads, decoded = 80_000, [], []
    rows = np.arange(5 * count, dtype="f4").reshape(count, 5)
    write_shard(tmp_path / "a.h5", rows, rows[:, :1], **options)
    shards = open_shards(tmp_path)
    read_all, decode = reader.aio.read_all, reader.decode
    monkeypatch.setattr(reader.aio, "read_all", lambda wanted: reads.extend(wanted) or read_all(wanted))
    monkeypatch.setattr(reader, "decode", lambda layout, *rest: decoded.append(1) or decode(layout, *rest))
    order = Order(count, 4, 1000, 0, True)
    feed = Feed(shards, order, alone(), "stream", 2)
    seen = np.zeros(count, int)
    for number in range(order.batches_per_epoch):
        seen[(feed.batch(0, number).inputs[:, 0] / 5).astype(int)] += 1
    feed.close()
    assert (seen == 1).all()
    blocks, ahead = -(-count // BLOCK_ROWS) + 4, 2 * WINDOW_ROWS * 4  # rows of the next epoch that may be read by then
    inputs = [spans for _, spans, out in reads if out.shape[-1] == 5]
    assert sum(map(len, inputs)) <= pieces * (blocks + ahead // BLOCK_ROWS)
    assert sum(spans[:, 1].sum() for spans in inputs) <= bool(pieces) * 20 * (count + ahead)
    assert len(decoded) <= (2 * -(-count // 8192) if not pieces else 0)  # two threads may want one at the same time


def test_scratch_without_room(tmp_path):
    rows = np.zeros((600, 3), "f4")
    write_shard(tmp_path / "a.h5", rows, rows[:, :1], chunks=(300, 3), compression="gzip")
    shards = open_shards(tmp_path)
    order = Order(shards.rows, 4, 500, 3, True)
    with pytest.raises(SystemUnfitError, match=r"data\.scratch = .*nowhere: 9,600 bytes .* no such file or directory"):
        Feed(shards, order, alone(), "stream", 2, str(tmp_path / "nowhere")).batch(0, 0)


def test_fewer_streams_than_ranks_are_refused(ids):
    with pytest.raises(ConfigError, match=r"data\.streams = 2: fewer than the 3 ranks"):
        Feed(ids[0], Order(ids[0].rows, 2, 5, 0, True), at(0, 3))


def test_waiting_is_counted(ids):
    order = Order(ids[0].rows, 4, 500, 0, True)
    feed = Feed(ids[0], order, alone(), "stream")
    assert feed.wait_seconds == 0.0
    feed.batch(0, 0)
    assert 0.0 < feed.wait_seconds < 10.0
    feed.close()


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 5), st.integers(1, 90))
@settings(max_examples=80)
def test_own_indices_count_own_positions(rows, streams, ranks, batch):
    order = Order(rows, streams, batch, 0, True)
    if streams < ranks:
        return
    for rank in range(ranks):
        lanes = Lanes(order, owned_streams(streams, ranks, rank))
        own = [p for p in range(rows) if p % streams in lanes.streams]
        assert lanes.count == len(own)
        assert lanes.positions(np.arange(lanes.count)).tolist() == own
        for number in range(order.batches_per_epoch):
            part = lanes.of_batch(number)
            assert own[part.start : part.stop] == order.batch_positions(number, lanes.streams).tolist()


def test_runs_of_neighbours():
    assert list(runs(np.array([3, 4, 5, 9, 11, 12]))) == [(0, 3), (3, 4), (4, 6)]
    assert list(runs(np.array([7]))) == [(0, 1)]
