"""Requests to stop. The first signal only sets a flag; ranks agree on it at the next step boundary.

SIGTERM and SIGINT come from people and launchers, SIGUSR1 and SIGUSR2 from batch systems that announce the
time limit (`sbatch --signal=USR1@60`). Nothing is saved by a handler: it may run in the middle of a save.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from distmlp.comm import policy

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

# Ctrl-C in a terminal reaches every rank from the terminal and again from the launcher that forwards it,
# so one press may arrive twice (or three times with a shell wrapper between). Copies come within milliseconds.
ECHO_SECONDS = 0.5


class StopRequest:
    """Turns signals into a flag while it is installed (use as a context manager, in the main thread).

    The first signal sets `requested`; a further one that is not an echo of the first ends the whole job at
    once with 128 + its number, as the shell reports a process that a signal killed.

    Python runs handlers between instructions of the main thread, which may be inside MPI, waiting for a rank
    that never comes. So the signals' numbers go down a pipe, written by the C part of Python's handling, and a
    thread acts on them.

    `announced` alone: only signals that batch systems send, for the time before training; a Ctrl-C ends that at once.
    What was requested of one is taken over by one that is installed inside it.
    """

    _outer: StopRequest | None = None  # the one installed last, if any

    def __init__(self, announced: bool = False) -> None:
        self._signals = tuple(number for number in SIGNALS if not (announced and number == signal.SIGINT))
        self.requested = False
        self.name = ""  # of the first signal, such as "SIGTERM"
        self._first = 0.0
        self._previous: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():  # elsewhere Python refuses handlers
            return self
        self._before, StopRequest._outer = StopRequest._outer, self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        if self._before is not None and self._before.requested:
            self._take_over(self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        StopRequest._outer = self._before
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._previous_wakeup)
        with suppress(OSError):
            os.write(self._write, b"\0")
        self._thread.join(1)
        os.close(self._write)
        os.close(self._read)

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number == 0:
                    return
                if number in self._signals:  # others belong to somebody else
                    self._take(number)

    def _take_over(self, other: StopRequest) -> None:
        self.name, self._first, self.requested = other.name, other._first, True

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if not self.requested:
            self.name, self._first = signal.Signals(number).name, now
            self.requested = True
            inner = StopRequest._outer
            if inner is not None and inner is not self and not inner.requested:  # installed before this was read
                inner._take_over(self)
        elif now - self._first > ECHO_SECONDS:
            policy.abandon(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for the number to be written; the thread does the rest."""
