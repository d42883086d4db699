"""Rows from files to the device: the same bits whether they are resident, streamed by windows or batch by batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from engine.fakes import FakeWorld, make_network

from distmlp.config import RunConfig
from distmlp.data.feed import Feed
from distmlp.data.shards import Shards
from distmlp.engine import Standardization, State
from distmlp.errors import DataError
from distmlp.order import Order

pytestmark = pytest.mark.gpu
ROWS = 40_000  # two to three windows of four streams


class World(FakeWorld):
    host, local_rank, local_size = "here", 0, 1

    def broadcast(self, value: Any) -> Any:
        return value

    def agree(self, function: Any, what: str = "") -> Any:
        return function()


def write(folder: Path, dtype: str, labels: bool, **options: Any) -> None:
    rng = np.random.default_rng(3)
    for number, rows in enumerate((ROWS - 9000, 9000)):
        with h5py.File(folder / f"part-{number}.h5", "w") as file:
            inputs = rng.normal(size=(rows, 12)) * 20 + 100
            file.create_dataset("inputs", data=inputs.astype(dtype), **options)
            targets = rng.integers(0, 5, rows) if labels else rng.normal(size=(rows, 5))
            file["targets"] = targets
            file["weights"] = rng.uniform(0.5, 2, rows)


def engine_over(folder: Path, labels: bool, batch: int, residence: str, shuffle: bool = True, readers: int = 3) -> Any:
    from distmlp.engine.fused import FusedEngine

    loss = "softmax_cross_entropy" if labels else "mse"
    data = {"train": "x", "batch": batch, "streams": 4, "residence": residence, "shuffle": shuffle}
    model = {"layers": [12, 32, 5], "loss": loss}
    config = RunConfig.model_validate({"model": model, "data": data, "run": {"precision": "fp32", "steps": 1}})
    names = SimpleNamespace(train=str(folder / "*.h5"), inputs="inputs", targets="targets", sample_weights="weights")
    shards = Shards.open(names, World(), loss=loss)
    feed = Feed(shards, Order(shards.rows, 4, batch, 7, shuffle), World(), residence, readers)
    moments = (np.full(12, 100.0), np.full(12, 20.0))
    targets = None if labels else (np.full(5, 0.1), np.full(5, 2.0))
    network = make_network(config)
    engine = FusedEngine(config, network, World(), feed, Standardization(moments, targets), poison=0xFF)
    engine.load(State(network.initial(0, "he_normal")))
    return engine


def trained(engine: Any, epochs: int = 2, steps: int = 10_000) -> bytes:
    order = engine._feed.order
    losses = []
    for epoch in range(epochs):
        count = min(steps, order.batches_per_epoch)
        losses.append(engine.train(epoch, 0, np.full(count, 1e-2)).losses)
    result = np.concatenate(losses).tobytes() + engine.state().parameters.tobytes()
    engine._feed.close()
    engine.close()
    return result


@pytest.mark.parametrize(("dtype", "labels"), [("f4", False), ("u1", True), ("f2", False), (">f8", True)])
@pytest.mark.parametrize("batch", [777, 1024, 17_000])
def test_the_same_bits_wherever_rows_are_kept(tmp_path, monkeypatch, dtype, labels, batch) -> None:
    from distmlp.engine import device_rows
    from distmlp.engine.device_windows import WindowRows

    write(tmp_path, dtype, labels)
    monkeypatch.setattr(device_rows, "READ_BYTES", 1 << 17)  # many pieces
    resident, streamed = (engine_over(tmp_path, labels, batch, place) for place in ("device", "stream"))
    assert isinstance(streamed._rows, WindowRows)
    host = engine_over(tmp_path, labels, batch, "host")
    monkeypatch.setattr(Feed, "fits_memory", lambda self, size: False)
    batches = engine_over(tmp_path, labels, batch, "stream")
    assert isinstance(batches._rows, device_rows.StreamedRows)
    wanted = trained(resident)
    assert [trained(engine) == wanted for engine in (streamed, host, batches)] == [True] * 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_after_a_jump(tmp_path, shuffle) -> None:
    """Resuming begins in the middle; epochs may be left early."""
    write(tmp_path, "f4", False, chunks=(256, 12), compression="gzip")
    results = []
    for place in ("device", "stream"):
        engine = engine_over(tmp_path, False, 500, place, shuffle)
        for epoch, first, count in ((3, 45, 20), (5, 0, 7), (5, 7, 73), (2, 79, 1)):
            results.append(engine.train(epoch, first, np.full(count, 1e-2)).losses.tobytes())
        engine._feed.close()
        engine.close()
    assert results[:4] == results[4:]


@pytest.mark.parametrize("place", ["device", "stream"])
def test_damage_names_file_and_rows(tmp_path, place) -> None:
    write(tmp_path, "f4", False, chunks=(500, 12), compression="gzip")
    with h5py.File(tmp_path / "part-1.h5") as file:
        chunk = file["inputs"].id.get_chunk_info(3)
    with open(tmp_path / "part-1.h5", "r+b") as raw:
        raw.seek(chunk.byte_offset + chunk.size // 2)
        raw.write(b"\xff" * 64)
    with pytest.raises(DataError, match=r"part-1\.h5, dataset `inputs`, rows 1500 to 1999: the chunk is damaged"):
        trained(engine_over(tmp_path, False, 500, place))
