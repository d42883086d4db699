"""The processes of a job: rank, size, hosts, and the few collectives that training needs.

A single process is a world of size 1: no MPI library is loaded and every collective is the identity.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from numpy.typing import NDArray

from distmlp.comm import device_probe, hints, opening
from distmlp.comm.device_probe import DeviceProbe
from distmlp.comm.faults import Fault, exchange_faults, merge_faults
from distmlp.comm.reduction import Reducer
from distmlp.comm.startup import start_mpi, started_here
from distmlp.comm.threads import allowed_cores, limit_blas_threads
from distmlp.errors import DistmlpError

T = TypeVar("T")


class World:
    """One per process. `communicator` is mpi4py's; None for a single process."""

    device_probe: DeviceProbe | None = None  # on one rank a host: the trial of device memory, see `open_world`

    def __init__(self, communicator: Any = None, library: str = "") -> None:
        self._communicator = communicator
        self.waiting = ""  # the collective this rank is inside of, and how many it has left: the watchdog looks here
        self.collectives = 0
        self.mpi_version = library  # the MPI library's version string, "" without MPI
        self.rank: int = communicator.rank if communicator is not None else 0
        self.size: int = communicator.size if communicator is not None else 1
        self.host = socket.gethostname()
        # Container images and cloned nodes may share a host name; the boot id tells their kernels apart.
        self.place = (self.host, _boot_id())
        places = self.all_gather(self.place)
        mine = [rank for rank, place in enumerate(places) if place == self.place]
        self.neighbours = tuple(mine)  # the ranks of this host, this one among them
        self.local_rank = mine.index(self.rank)
        self.local_size = len(mine)
        self.hosts: tuple[str, ...] = tuple(host for host, _ in dict.fromkeys(places))
        self.rank_hosts: tuple[str, ...] = tuple(host for host, _ in places)
        self._reducer = Reducer(communicator) if self.size > 1 else None

    @property
    def communicator(self) -> Any:
        """mpi4py's communicator, for the device transports; None for a single process."""
        return self._communicator

    def all_reduce(self, buffer: NDArray) -> None:
        """Sum the contiguous `buffer` over all ranks, in place: the same bits on every rank and in every run."""
        if self._reducer is not None:
            self.waiting = "all_reduce"  # not `inside`, which costs a microsecond: this is called every step
            try:
                self._reducer.sum(buffer)
            finally:
                self.waiting, self.collectives = "", self.collectives + 1

    def all_gather(self, value: T) -> list[T]:
        """Every rank's small picklable `value`, in the order of the ranks."""
        if self.size == 1:
            return [value]
        with self.inside("all_gather"):
            return self._communicator.allgather(value)

    def broadcast(self, value: T) -> T:
        """Rank 0's picklable `value`."""
        if self.size == 1:
            return value
        with self.inside("broadcast"):
            return self._communicator.bcast(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self.inside("barrier"):
                self._communicator.barrier()

    @contextmanager
    def inside(self, collective: str) -> Iterator[None]:
        """Mark what is done in this block as waiting for other ranks: the watchdog blames those who do not wait.

        For collectives that do not go through this class, such as those between GPUs.
        """
        self.waiting = collective
        try:
            yield
        finally:
            self.waiting, self.collectives = "", self.collectives + 1

    def agree(self, function: Callable[[], T], what: str = "") -> T:
        """Run `function` on this rank and return its value if no rank failed.

        If it raised a DistmlpError anywhere, every rank raises AgreedError with all the messages, identical
        ones merged, and the gravest exit code. A single process lets its own error through. `what` heads
        the message of several failures.
        """
        if self.size == 1:
            return function()
        fault, value = None, None
        try:
            value = function()
        except DistmlpError as error:
            fault = (error.exit_code, str(error))
        faults = self.all_gather(fault)
        if any(faults):
            raise merge_faults(faults, self.rank_hosts, what)
        return value  # type: ignore[return-value]

    def exchange_faults(self, fault: Fault, seconds: float) -> list[Fault | None] | None:
        """All ranks' faults if every rank comes here within about `seconds`, else None."""
        return exchange_faults(self._communicator, fault, seconds) if self.size > 1 else [fault]

    @property
    def thread_multiple(self) -> bool:
        """Whether threads beside the main one may call MPI; without MPI there is nothing to forbid it."""
        if self._communicator is None:
            return True
        from mpi4py import MPI

        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def abort(self, code: int) -> NoReturn:
        """End every process of the job with exit code `code`; from the main thread, or if `thread_multiple`."""
        if self.size > 1:
            from mpi4py import MPI

            time.sleep(0.3)  # launchers drop what they have not yet passed on, and with it the reason
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason is told; MPICH would add a line of its own
            MPI.COMM_WORLD.Abort(code)
        os._exit(code)


_world: World | None = None


def current() -> World | None:
    """The world if it is open; opens nothing."""
    return _world


def open_world(try_devices: bool = False) -> World:
    """The world of this process, opened at the first call.

    `try_devices`: GPUs may train, so begin to try in a child process whether MPI moves their memory; that is not
    safe any more once MPI runs.

    MPI is loaded if the environment shows a launcher of several processes, or if the caller has loaded it
    already. Raises SystemUnfitError when launcher and MPI library disagree about the number of processes,
    or when no MPI library can be loaded.
    """
    global _world
    if _world is None:
        launch = hints.read_launch()
        loaded = "mpi4py.MPI" in sys.modules
        alone = not loaded and (launch is None or launch.size == 1 or opening.first_rank_alone)
        probe = device_probe.begin(launch) if try_devices and not alone and not loaded else None
        _world = World() if alone else _open_mpi(launch)
        _world.device_probe = probe
    return _world


def close() -> None:
    """Finalize MPI. Collective; nothing may be sent afterwards."""
    global _world
    world, _world = _world, None
    if world is None or world.communicator is None:
        return
    if world.device_probe is not None:
        world.device_probe.cancel()
    from mpi4py import MPI

    if not MPI.Is_finalized():
        with suppress(MPI.Exception):
            MPI.Finalize()


def _open_mpi(launch: hints.Launch | None) -> World:
    mpi, library = start_mpi(launch)
    if mpi.COMM_WORLD.size == 1:
        return World(None, library)
    for prepare in opening.when_started:
        prepare()
    if started_here():
        atexit.register(close)
    # Our own communicator: a user's script may have messages of its own under way.
    world = World(mpi.COMM_WORLD.Dup(), library)
    for tell in opening.when_met:
        tell(world)
    cores = world.all_gather((world.place, allowed_cores()))
    limit_blas_threads([theirs for place, theirs in cores if place == world.place])
    return world


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
