"""The flag that signals set: first, echo, second; handlers given back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from distmlp.comm import policy
from distmlp.comm.signals import ECHO_SECONDS, SIGNALS, StopRequest


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)  # for the thread that takes it


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_sets_the_flag_and_its_name(number):
    with StopRequest() as stop:
        assert not stop.requested
        send(number)
        assert (stop.requested, stop.name) == (True, signal.Signals(number).name)


def test_echo_is_ignored_and_a_later_signal_ends_the_job(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(policy, "abandon", ended.append)
    with StopRequest() as stop:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert ended == []
        stop._first -= ECHO_SECONDS
        send(signal.SIGTERM)
        assert ended == [128 + signal.SIGTERM]


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_are_left_alone():
    seen: list[int] = []
    previous = signal.signal(signal.SIGHUP, lambda number, _: seen.append(number))
    try:
        with StopRequest() as stop:
            send(signal.SIGHUP)
            assert (stop.requested, seen) == (False, [signal.SIGHUP])
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_another_thread_gets_a_request_that_nothing_sets():
    results: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            results.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False]


def test_a_signal_that_is_read_late_reaches_the_request_installed_meanwhile():
    with StopRequest(announced=True) as early, StopRequest() as stop:
        early._take(signal.SIGUSR1)  # it came before `stop` was there, but its thread had no turn yet
        assert (stop.requested, stop.name) == (True, "SIGUSR1")
