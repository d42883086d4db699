"""Requests to stop. A handler only sets a flag; ranks agree on it at the next step boundary.

SIGTERM and SIGINT come from people and launchers, SIGUSR1 and SIGUSR2 from batch systems that announce the
time limit (`sbatch --signal=USR1@60`). Nothing is written inside a handler: it may run in the middle of a save.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from distmlp.comm import policy

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

# Ctrl-C in a terminal reaches every rank from the terminal and again from the launcher that forwards it,
# so one press may arrive twice (or three times with a shell wrapper between). Copies come within milliseconds.
ECHO_SECONDS = 0.5


class StopRequest:
    """Turns signals into a flag while it is installed (use as a context manager).

    The first signal sets `requested`; a further one that is not an echo of the first ends the whole job at
    once with 128 + its number, as the shell reports a process that a signal killed.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""  # of the first signal, such as "SIGTERM"
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses handlers
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self.name, self._first = True, signal.Signals(number).name, now
        elif now - self._first > ECHO_SECONDS:
            policy.abandon(128 + number)
