"""Who is to blame when ranks stand still; the connections it is told over; real processes that stop."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from launching import run_python

from distmlp.comm.channel import Hub, connect, own_addresses
from distmlp.comm.progress import Heard, Progress, Pulse
from distmlp.comm.watchdog import LAUNCHER_SECONDS, verdict
from distmlp.comm.world import World

HOSTS = ("a", "a", "b")
BUSY, BLOCKED = Pulse(idle=0.1), Pulse(idle=100, where="data/feed.py line 12 (batch)")
WAITS = Pulse(idle=100, waiting="all_reduce", waited=100, where="engine/reference.py line 5 (train)")


def heard(pulse: Pulse = BUSY, age: float = 0, lost: float | None = None) -> Heard:
    return Heard(pulse, 1000 - age, None if lost is None else 1000 - lost)


@pytest.mark.parametrize(
    ("ranks", "timeout", "message", "blamed"),
    [
        pytest.param({0: heard(), 1: heard(), 2: heard()}, 60, None, [], id="all is well"),
        pytest.param({0: heard(BLOCKED), 1: heard()}, 200, None, [], id="not yet"),
        pytest.param(
            {0: heard(WAITS), 1: heard(WAITS), 2: heard(BLOCKED)},
            60,
            "rank 2 on host b: has not moved for 100 s, in data/feed.py line 12 (batch)",
            [2],
            id="one blocked, the others wait for it",
        ),
        pytest.param(
            {0: heard(WAITS), 1: heard(age=70), 2: heard(BLOCKED)},
            60,
            "rank 1 on host a: silent for 70 s: stopped, or its host is gone",
            [1],
            id="silence tells more than standing still",
        ),
        pytest.param({0: heard(Pulse(idle=40), age=30)}, 60, "rank 0 on host a: has not moved", [0], id="ages add up"),
        pytest.param({0: heard(WAITS), 1: heard(WAITS)}, 60, None, [], id="all wait: twice the time"),
        pytest.param(
            {0: heard(WAITS), 1: heard(WAITS)},
            40,
            "all 2 ranks have waited for each other for 100 s (all_reduce from engine/reference.py",
            [],
            id="a deadlock",
        ),
        pytest.param({0: heard(WAITS), 1: heard(lost=1)}, 60, None, [], id="died: the launcher's turn"),
        pytest.param(
            {0: heard(WAITS), 1: heard(lost=LAUNCHER_SECONDS + 1)},
            600,
            "rank 1 on host a: ended without a word",
            [1],
            id="died, and no launcher cares",
        ),
        pytest.param(
            {0: heard(WAITS), 1: heard(Pulse(idle=6, interrupted=True))},
            600,
            "rank 1 on host a: has not moved for 6 s",
            [1],
            id="after Ctrl-C nobody is waited for long",
        ),
        pytest.param({0: heard(Pulse(idle=2, interrupted=True))}, 600, None, [], id="after Ctrl-C, still moving"),
        pytest.param({}, 60, None, [], id="all have taken leave"),
    ],
)
def test_verdict(ranks, timeout, message, blamed):
    found = verdict(ranks, 1000, timeout, HOSTS)
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert found[0].startswith(message)
        assert found[1] == blamed


def test_progress_tells_blocked_from_busy_and_from_waiting():
    world = World()
    pulses: list[Pulse] = []

    def watch(progress: Progress, act: threading.Event) -> None:
        for _ in range(2):
            progress.sample()
            act.wait(0.3)
        pulses.append(progress.sample())

    def phase(action: object) -> None:
        watcher = threading.Thread(target=watch, args=(Progress(world), threading.Event()))
        watcher.start()
        action()  # type: ignore[operator]
        watcher.join()

    def spin() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

    def wait_for_others() -> None:
        with world.inside("barrier"):
            time.sleep(1)

    for action in (lambda: time.sleep(1), spin, wait_for_others):
        phase(action)
    blocked, busy, waiting = pulses
    assert blocked.idle > 0.25
    assert busy.idle < 0.25
    assert (waiting.waiting, waiting.waited > 0.25) == ("barrier", True)
    assert blocked.waiting == ""


def test_hub_hears_ranks_and_turns_strangers_away():
    hub = Hub(one_host=True)
    link = connect(hub.offer, 3)
    assert link is not None
    stranger = socket.create_connection(("127.0.0.1", hub.offer.port))
    stranger.sendall(b'{"token": "guess", "rank": 1}\n{"idle": 1}\nnot json\n[1]\n')
    link.send({"idle": 2.5})
    got: list[tuple[int, dict[str, object]]] = []
    for _ in range(100):
        got += hub.receive()
        if got:
            break
        time.sleep(0.02)
    assert got == [(3, {"idle": 2.5})]
    assert stranger.recv(10) == b""  # turned away
    hub.broadcast({"alive": 1})
    time.sleep(0.1)
    assert link.receive() == [{"alive": 1}]
    assert hub.lost() == []
    link.close()
    time.sleep(0.1)
    list(hub.receive())
    assert hub.lost() == [3]
    hub.close()


def test_unreachable_hub_is_reported_soon(monkeypatch):
    monkeypatch.setattr("distmlp.comm.channel.CONNECT_SECONDS", 0.2)
    hub = Hub(one_host=True)
    hub.close()
    assert connect(hub.offer, 1) is None


def test_own_addresses_leave_out_loopback():
    assert not any(address.startswith("127.") for address in own_addresses())


STUCK = """
import os, signal, sys, time
import numpy as np
from distmlp.comm.policy import guarded
def main():
    from distmlp.comm.watchdog import Watchdog
    from distmlp.comm.world import open_world
    world, how, who = open_world(), sys.argv[1], int(sys.argv[2])
    with Watchdog(world, 2.0):
        for i in range(3000):
            if i == 20 and world.rank == who:
                if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
                if how == "block": time.sleep(1000)
            world.all_reduce(np.ones(10))
            time.sleep(0.01)
guarded(main)
"""


@pytest.mark.parametrize(
    ("how", "who", "words"),
    [
        ("stop", "1", "rank 1 on host"),
        pytest.param("stop", "0", "rank 0 on host", marks=pytest.mark.full),
        ("block", "0", "has not moved"),
        pytest.param("block", "2", "rank 2 on host", marks=pytest.mark.full),
    ],
)
def test_stuck_rank_is_named_once_and_the_job_ends(how, who, words):
    done = run_python(3, STUCK, how, who, timeout=30)
    assert done.returncode == 4
    assert done.stderr.count(words) == 1
    assert done.stderr.count("distmlp: error:") == 1
