"""Notices at once when the process of another rank of this host ends, for kernels that wait for its numbers.

A kernel cannot ask the watchdog; it looks at a word of host memory, which a thread of this module sets. Launchers
and the watchdog end the job as well, but not before a process whose GPU is still waiting has to be killed.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distmlp.comm.host_ranks import HostRanks
    from distmlp.comm.world import World

INTERVAL = 0.5  # seconds between two looks at whether to end


class PeerWatch:
    """A thread until `close`. `gone`: the ranks whose processes have ended, filled before `tell` is called."""

    def __init__(self, world: World | HostRanks, tell: Callable[[], None]) -> None:
        """Collective. `tell` is called on the thread, once for every rank that ends."""
        self.gone: list[int] = []
        self._tell, self._done = tell, threading.Event()
        places = world.all_gather((_namespace(), os.getpid()))
        self._handles: dict[int, int] = {}  # file descriptor of a process: its rank
        for rank, (namespace, pid) in enumerate(places):
            if rank != world.rank and namespace == places[world.rank][0]:
                with suppress(OSError, AttributeError):  # systems without pidfd_open: the watchdog remains
                    self._handles[os.pidfd_open(pid)] = rank
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        while not self._done.is_set() and len(self.gone) < len(self._handles):
            for handle, _ in poll.poll(INTERVAL * 1000):
                poll.unregister(handle)
                self.gone.append(self._handles[handle])
                self._tell()

    def close(self) -> None:
        self._done.set()
        self._thread.join(2 * INTERVAL)
        for handle in self._handles:
            os.close(handle)
        self._handles = {}


def _namespace() -> str:
    """What process numbers count in: the kernel's own word for it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"process {os.getpid()}"
