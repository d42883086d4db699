"""Which checkpoints are kept, which one is found, and what a failed write does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from distmlp.checkpoint import Checkpoint, load, network_of
from distmlp.checkpoint import store as stores
from distmlp.checkpoint.store import Store, newest, resolve_checkpoint
from distmlp.engine import Standardization, State
from distmlp.engine.reference import ReferenceEngine
from distmlp.errors import CheckpointError
from tests.checkpoint_samples import assert_equal, configuration, sample, write
from tests.worlds import LoneWorld

NETWORK = sample().network


def fill(directory: Path, steps: list[int], keep: int = 99, validations: list[float | None] | None = None) -> None:
    with Store(directory, NETWORK, keep) as store:
        for step, validation in zip(steps, validations or [None] * len(steps), strict=True):
            store.save(sample(step=step, validation=validation))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def numbers(directory: Path) -> list[int]:
    return [int(name[5:13]) for name in names(directory)]


@pytest.mark.parametrize(
    ("keep", "validations", "left"),
    [
        (1, [None] * 5, [5]),
        (3, [None] * 5, [3, 4, 5]),
        (2, [0.5, 0.1, 0.4, 0.3, 0.2], [2, 4, 5]),
        (2, [0.5, 0.4, 0.3, 0.2, 0.1], [4, 5]),
        (1, [0.5, 0.1, None, 0.1, None], [2, 5]),  # the earlier of two equals
        (1, [float("nan"), 0.1, float("nan"), None, None], [2, 5]),
        (9, [0.5] * 5, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep, validations, left):
    fill(tmp_path, [1, 2, 3, 4, 5], keep, validations)
    assert numbers(tmp_path) == left


def test_the_best_is_remembered_across_runs(tmp_path):
    fill(tmp_path, [1, 2], 1, [0.1, 0.2])
    fill(tmp_path, [3, 4], 1, [0.3, 0.4])
    assert numbers(tmp_path) == [1, 4]


def test_nothing_there(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_newest_is_found_by_content_not_by_name(tmp_path):
    fill(tmp_path, [10, 20])
    (tmp_path / "step-00000020.h5").rename(tmp_path / "step-00000001.h5")
    found = newest(tmp_path)
    assert found
    assert (found.path.name, found.checkpoint.step, found.rejected) == ("step-00000001.h5", 20, [])


def test_names_of_others_are_no_checkpoints(tmp_path):
    fill(tmp_path, [1])
    (tmp_path / "step-2.h5").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / "step-00000009.h5").mkdir()
    found = newest(tmp_path)
    assert found
    assert found.checkpoint.step == 1
    fill(tmp_path, [2, 3], keep=1)
    assert names(tmp_path) == ["notes.txt", "step-00000003.h5", "step-00000009.h5", "step-2.h5"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": (lambda path: os.truncate(path, 1000), "cut short"),
    "empty": (lambda path: os.truncate(path, 0), "empty"),
    "byte flipped in the weights": (_flip, "SHA-256"),
    "unreadable link": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_is_named_and_the_one_before_taken(tmp_path, kind):
    fill(tmp_path, [1, 2, 3])
    damage, words = DAMAGE[kind]
    damage(tmp_path / "step-00000003.h5")
    found = newest(tmp_path)
    assert found
    assert found.checkpoint.step == 2
    assert len(found.rejected) == 1
    assert words in found.rejected[0]
    assert "step-00000003.h5" in found.rejected[0]
    fill(tmp_path, [2], keep=2)  # once a good one is written, the damaged one is gone
    assert numbers(tmp_path) == [1, 2]


def test_none_good_is_an_error(tmp_path):
    fill(tmp_path, [1, 2])
    for path in tmp_path.iterdir():
        _flip(path)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is good") as caught:
        newest(tmp_path)
    assert str(caught.value).count("SHA-256") == 2


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    ours = tmp_path / ".step-00000003.h5.0123456789abcdef01234567.tmp"
    others = [tmp_path / ".step-00000003.h5.tmp", tmp_path / ".notes.0123456789abcdef01234567.tmp"]
    for path in (ours, *others):
        path.write_bytes(b"half")
    Store(tmp_path, NETWORK, 1)
    assert not ours.exists()
    assert all(path.exists() for path in others)


def test_temporary_names_cannot_be_guessed(tmp_path, monkeypatch):
    seen = set()
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.add(Path(a).name), rename(a, b)))
    for _ in range(3):
        write(tmp_path / "step-00000001.h5")
    assert len(seen) == 3
    assert all(len(name.split(".")[-2]) == 24 for name in seen)


def test_save_returns_before_the_write_and_wait_after_it(tmp_path, monkeypatch):
    gate = threading.Event()
    real = stores.save
    monkeypatch.setattr(stores, "save", lambda *args: (gate.wait(30), real(*args)))
    store = Store(tmp_path, NETWORK, 1)
    path = store.save(sample(step=1))
    assert not path.exists()
    store.check()  # nothing wrong so far
    gate.set()
    store.wait()
    assert_equal(load(path), sample(step=1))


def test_a_failed_write_is_raised_at_the_next_boundary(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    store = Store(directory, NETWORK, 1)
    directory.rmdir()
    store.save(sample())
    while "checkpoint" in (thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"step-00000018\.h5: could not be written: No such file or directory"):
        store.check()
    store.check()  # told once
    store.wait()


def test_the_last_write_is_waited_for_even_when_the_run_fails(tmp_path):
    class Fault(Exception):
        pass

    def fail() -> None:
        with Store(tmp_path, NETWORK, 1) as store:
            store.save(sample(step=5))
            raise Fault

    with pytest.raises(Fault):
        fail()
    assert numbers(tmp_path) == [5]


def test_resolve_checkpoint(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resolve_checkpoint(tmp_path)
    fill(directory, [1, 2])
    newest_path = directory / "step-00000002.h5"
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(directory) == newest_path
    assert resolve_checkpoint(directory / "step-00000001.h5").name == "step-00000001.h5"
    _flip(newest_path)
    with pytest.warns(UserWarning, match=r"passed over: .*step-00000002\.h5"):
        assert resolve_checkpoint(tmp_path).name == "step-00000001.h5"
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_checkpoint(tmp_path / "absent.h5")


@pytest.mark.full
def test_saving_100_million_parameters_stalls_training_little(tmp_path):
    """1.2 GB with Adam: what the training thread waits for is at most 15 % of the write."""
    config = configuration((4096, 8192, 6144, 2048), "adam")
    network = network_of(config)
    engine = ReferenceEngine(config, network, LoneWorld(), None, Standardization())  # type: ignore[arg-type]
    engine.load(State(np.ones(network.size, np.float32)))
    state, shares = engine.state(), []  # a run takes the memory before its first step
    with Store(tmp_path, network, 1) as store:
        for step in (1, 2, 3):
            began = time.perf_counter()
            state = engine.state(state)
            network.fingerprint(state.parameters)
            store.save(Checkpoint(config, state, step=step))
            stalled = time.perf_counter() - began
            store.wait()
            shares.append(stalled / (time.perf_counter() - began - stalled))
    print("stall as a share of the write:", *(f"{share:.3f}" for share in shares))
    assert min(shares) <= 0.15
    assert load(store.path(3), explain=False).state.parameters.all()
