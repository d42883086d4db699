"""Notices a rank that is stuck or dead and ends the job, naming it, instead of letting the others wait for ever.

Every rank has a thread that reports to rank 0 over TCP how the working thread gets on, and hears from rank 0 that it
lives. MPI is not used for it: the working threads may all be inside MPI, and not every library allows a second
thread there. A rank that is stopped, swapped out or holds Python's lock in a read falls silent as a whole; one that
waits in a read or for a lock says so itself. Launchers see dead processes too, and are given a moment to act first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING

from distmlp.comm import policy
from distmlp.comm.channel import Connection, Hub, connect
from distmlp.comm.faults import name_ranks
from distmlp.comm.progress import Heard, Progress, Pulse
from distmlp.errors import SystemUnfitError

if TYPE_CHECKING:
    from distmlp.comm.signals import StopRequest
    from distmlp.comm.world import World

LAUNCHER_SECONDS = 5.0  # for the launcher to end a job in which a process died
INTERRUPT_SECONDS = 5.0  # after Ctrl-C, a rank that stands still for so long is not waited for
EXIT_CODE = SystemUnfitError.exit_code


def verdict(
    ranks: Mapping[int, Heard], now: float, timeout: float, hosts: Sequence[str]
) -> tuple[str, list[int]] | None:
    """The message that ends the job and the ranks to blame, or None while all is well. Pure.

    Ranks that wait in a collective are victims, unless all of them do.
    """
    if any(heard.pulse.interrupted for heard in ranks.values()):
        timeout = min(timeout, INTERRUPT_SECONDS)
    died = [rank for rank, heard in ranks.items() if heard.lost is not None and now - heard.lost > LAUNCHER_SECONDS]
    silent = [rank for rank, heard in ranks.items() if heard.lost is None and now - heard.at > timeout]
    stuck = [
        rank
        for rank, heard in ranks.items()
        if heard.lost is None and not heard.pulse.waiting and heard.pulse.idle + now - heard.at > timeout
    ]
    if died:
        return _blame(died, hosts, "ended without a word"), died
    if silent:
        longest = max(now - ranks[rank].at for rank in silent)
        return _blame(silent, hosts, f"silent for {longest:.0f} s: stopped, or its host is gone"), silent
    if stuck:
        pulse = ranks[stuck[0]].pulse
        place = f", in {pulse.where}" if pulse.where else ""
        return _blame(stuck, hosts, f"has not moved for {pulse.idle:.0f} s{place}"), stuck
    waits = [heard.pulse for heard in ranks.values() if heard.pulse.waiting]
    if waits and len(waits) == len(ranks) and all(pulse.waited > 2 * timeout for pulse in waits):
        places = "; ".join(sorted({f"{pulse.waiting} from {pulse.where}" for pulse in waits}))
        return f"all {len(ranks)} ranks have waited for each other for {waits[0].waited:.0f} s ({places})", []
    return None


def _blame(ranks: Sequence[int], hosts: Sequence[str], what: str) -> str:
    return f"{name_ranks(ranks, hosts)}: {what}"


class Watchdog:
    """Runs while it is entered (a context manager; collective to enter). `timeout` in seconds: run.stall_timeout.

    Watches the thread that enters it. After Ctrl-C (`stop.name`) it waits less long for ranks that stand still.
    """

    def __init__(self, world: World, timeout: float, stop: StopRequest | None = None) -> None:
        self._world, self._timeout, self._stop = world, timeout, stop
        self._interval = min(1.0, timeout / 8)
        self._done = threading.Event()
        self._link: Connection | None = None
        self._hub: Hub | None = None
        self._ranks: dict[int, Heard] = {}  # those judged here
        self.unreachable: list[int] = []  # ranks that cannot report to rank 0

    def __enter__(self) -> Watchdog:
        world = self._world
        self._progress = Progress(world)
        self._processes = world.all_gather((world.place, os.getpid()))
        reached = [True]
        if world.size > 1:
            if world.rank == 0:
                self._hub = Hub(one_host=len({place for place, _ in self._processes}) == 1)
            offer = world.broadcast(self._hub.offer if self._hub else None)
            if offer is not None and world.rank > 0:
                self._link = connect(offer, world.rank)
            reached = world.all_gather(world.rank == 0 or self._link is not None)
        self.unreachable = [rank for rank, reaches in enumerate(reached) if not reaches]
        if self.unreachable and world.rank == 0:
            warnings.warn(
                f"{name_ranks(self.unreachable, world.rank_hosts)} cannot reach rank 0 over TCP: if stuck, they will "
                "not be noticed",
                stacklevel=2,
            )
        judged = [rank for rank in range(world.size) if reached[rank]] if world.rank == 0 else [0] if self._link else []
        now = time.monotonic()
        self._ranks = {rank: Heard(Pulse(), now) for rank in judged}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(self._interval + 1)
        if self._link is not None:
            self._link.send({"bye": 1})
            self._link.close()
        if self._hub is not None:
            self._hub.broadcast({"bye": 1})
            self._hub.close()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            pulse = self._progress.sample(self._interrupted())
            now = time.monotonic()
            if self._hub is not None:
                self._listen_to_all(self._hub, now)
            if self._link is not None:
                self._link.send(asdict(pulse))
                self._listen_to_first(self._link, now)
            if self._world.rank == 0:
                self._ranks[0] = Heard(pulse, now)
            found = verdict(self._ranks, now, self._timeout, self._world.rank_hosts)
            if found is not None and not self._done.is_set():
                self._end(*found)

    def _listen_to_all(self, hub: Hub, now: float) -> None:
        hub.broadcast({"alive": 1})
        for rank, message in hub.receive():
            if "bye" in message:
                self._ranks.pop(rank, None)
            elif rank in self._ranks:
                self._ranks[rank] = Heard(Pulse(**message), now)
        for rank in hub.lost():
            if rank in self._ranks and self._ranks[rank].lost is None:
                self._ranks[rank].lost = now

    def _listen_to_first(self, link: Connection, now: float) -> None:
        for message in link.receive():
            if "code" in message:  # rank 0 has ended the job; if its MPI_Abort does not reach here, go without it
                time.sleep(2)
                os._exit(int(message["code"]))
            if "bye" in message:
                self._ranks.clear()
            elif 0 in self._ranks:
                self._ranks[0] = Heard(Pulse(), now)
        if link.closed and 0 in self._ranks and self._ranks[0].lost is None:
            self._ranks[0].lost = now

    def _interrupted(self) -> bool:
        return self._stop is not None and self._stop.name == "SIGINT"

    def _end(self, message: str, blamed: Sequence[int]) -> None:
        """Tell why and end every process of the job."""
        if self._world.rank > 0:  # all judge rank 0 at the same time: the first of them speaks and ends the others
            time.sleep(min(self._world.rank - 1, 10) * self._interval)
        interrupted = self._interrupted() or any(heard.pulse.interrupted for heard in self._ranks.values())
        code, word = (130, "interrupted") if interrupted else (EXIT_CODE, "error")
        policy.tell(f"distmlp: {word}: {message}. The job ends; checkpoints are intact.")
        if self._hub is not None:
            self._hub.broadcast({"code": code})
        # MPI_Abort gives the launcher our exit code, but may have to wait for the working thread to leave MPI.
        threading.Timer(1, self._force, (blamed, code)).start()
        if self._world.thread_multiple:
            self._world.abort(code)

    def _force(self, blamed: Sequence[int], code: int) -> None:
        """Without MPI: kill what stands still on this host, and go; the launcher sees that."""
        for rank in blamed:
            place, pid = self._processes[rank]
            if place == self._world.place and rank != self._world.rank:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(code)
