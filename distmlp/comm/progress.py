"""Whether the thread that does the work is getting on, seen from beside it."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distmlp.comm.world import World

_OWN = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Pulse:
    """What a rank says of itself."""

    idle: float = 0.0  # seconds since its working thread last did anything
    waiting: str = ""  # the collective it waits in, "" outside
    waited: float = 0.0  # seconds in that one collective
    where: str = ""  # the line of this package it stands in
    interrupted: bool = False  # it was asked to stop by SIGINT and has not yet


@dataclass
class Heard:
    """The last pulse of a rank, when it came, and when its connection broke without a farewell."""

    pulse: Pulse
    at: float
    lost: float | None = None


class Progress:
    """Watches the thread that creates it.

    It moves if it uses the CPU, stands in another line than before, or if the process writes to storage (the
    thread may be waiting for a checkpoint to be written). Blocked in a read, a lock or a sleep it does none of these.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if hasattr(time, "pthread_getcpuclockid") else None
        self._seen: tuple[object, ...] = ()
        self._moved_at = self._entered_at = time.monotonic()
        self._collectives = -1

    def sample(self, interrupted: bool = False) -> Pulse:
        """The state now. Call it from another thread, at least a few times per timeout."""
        now = time.monotonic()
        frame = sys._current_frames().get(self._thread)
        place = (frame.f_code, frame.f_lasti) if frame is not None else ()
        # 10 ms: the bookkeeping of a blocked thread that wakes up now and then stays below
        cpu = int(time.clock_gettime(self._clock) * 100) if self._clock is not None else 0
        seen = (*place, cpu, _written_bytes())
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        waiting, collectives = self._world.waiting, self._world.collectives
        if not waiting or collectives != self._collectives:
            self._collectives, self._entered_at = collectives, now
        where = ""
        while frame is not None and not where:
            file = frame.f_code.co_filename
            if file.startswith(_OWN) and "/comm/" not in file:
                where = f"{file[len(_OWN) + 1 :]} line {frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return Pulse(now - self._moved_at, waiting, now - self._entered_at, where, interrupted)


def _written_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0
