"""The end of another rank's process is noticed at once, and nothing else is taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest

from distmlp.comm import peer_watch
from distmlp.comm.peer_watch import PeerWatch

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")


@dataclass
class World:
    """Rank 0 of several, the others of which are children of this process."""

    others: list[subprocess.Popen] = field(default_factory=list)
    rank: int = 0
    place: str = ""

    def all_gather(self, value: tuple[str, int]) -> list[Any]:
        return [value, *((self.place or value[0], other.pid) for other in self.others)]


@pytest.fixture
def world():
    world = World([subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)])
    yield world
    for other in world.others:
        other.kill()
        other.communicate()


def test_death_is_noticed(world):
    told = Event()
    watch = PeerWatch(world, told.set)
    assert not told.wait(0.2)
    world.others[1].kill()
    assert told.wait(5)
    assert watch.gone == [2]
    watch.close()
    world.others[0].kill()
    time.sleep(0.1)
    assert watch.gone == [2]


def test_other_process_numbers_are_left_alone(world):
    """In a container of its own a rank's number names some other process here."""
    world.place = "pid:[1]"
    watch = PeerWatch(world, lambda: None)
    for other in world.others:
        other.kill()
    time.sleep(0.2)
    assert watch.gone == []
    watch.close()
    assert not watch._thread.is_alive()


def test_thread_ends_with_the_watch(world, monkeypatch):
    monkeypatch.setattr(peer_watch, "INTERVAL", 0.05)
    watch = PeerWatch(world, lambda: None)
    watch.close()
    assert not watch._thread.is_alive()
