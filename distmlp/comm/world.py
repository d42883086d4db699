"""The processes of a job: rank, size, hosts, and the few collectives that training needs.

A single process is a world of size 1: no MPI library is loaded and every collective is the identity.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from numpy.typing import NDArray

from distmlp.comm import hints, policy
from distmlp.comm.reduction import Reducer
from distmlp.comm.threads import limit_blas_threads
from distmlp.errors import AgreedError, DistmlpError, SystemUnfitError

T = TypeVar("T")

_GRAVEST_FIRST = (1, 4, 3, 2, 5, 75)


class World:
    """One per process. `communicator` is mpi4py's; None for a single process."""

    def __init__(self, communicator: Any = None, library: str = "") -> None:
        self._communicator = communicator
        self.library = library  # the MPI library's version string, "" without MPI
        self.rank: int = communicator.rank if communicator is not None else 0
        self.size: int = communicator.size if communicator is not None else 1
        self.host = socket.gethostname()
        # Container images and cloned nodes may share a host name; the boot id tells their kernels apart.
        self.place = (self.host, _boot_id())
        places = self.all_gather(self.place)
        mine = [rank for rank, place in enumerate(places) if place == self.place]
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
            self._reducer.sum(buffer)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's small picklable `value`, in the order of the ranks."""
        return self._communicator.allgather(value) if self.size > 1 else [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's picklable `value`."""
        return self._communicator.bcast(value) if self.size > 1 else value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self._communicator.barrier()

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

    def exchange_faults(self, fault: tuple[int, str], seconds: float) -> list[tuple[int, str] | None] | None:
        """All ranks' faults if every rank comes here within about `seconds`, else None.

        Point to point with a deadline, because the others may be in the middle of a collective.
        """
        return _exchange(self._communicator, fault, seconds) if self.size > 1 else [fault]

    def abort(self, code: int) -> NoReturn:
        """End every process of the job with exit code `code`."""
        if self.size > 1:
            from mpi4py import MPI

            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason is told; MPICH would add a line of its own
            MPI.COMM_WORLD.Abort(code)
        os._exit(code)


_world: World | None = None


def current() -> World | None:
    """The world if it is open; opens nothing."""
    return _world


def open_world() -> World:
    """The world of this process, opened at the first call.

    MPI is loaded if the environment shows a launcher of several processes, or if the caller has loaded it
    already. Raises SystemUnfitError when launcher and MPI library disagree about the number of processes,
    or when no MPI library can be loaded.
    """
    global _world
    if _world is None:
        launch = hints.read_launch()
        loaded = "mpi4py.MPI" in sys.modules
        alone = not loaded and (launch is None or launch.size == 1)
        _world = World() if alone else _open_mpi(launch)
    return _world


def close() -> None:
    """Finalize MPI if it was started here. Collective; nothing may be sent afterwards."""
    global _world
    world, _world = _world, None
    if world is None or world.communicator is None:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        with suppress(MPI.Exception):
            MPI.Finalize()


def _open_mpi(launch: hints.Launch | None) -> World:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mpi4py's own remark on foreign launchers; ours is an error
            import mpi4py

            if "mpi4py.MPI" not in sys.modules:
                mpi4py.rc.initialize = False  # the wiring is checked first
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        started = f"started by {launch.launcher} as rank {launch.rank} of {launch.size or 'several'}" if launch else ""
        raise SystemUnfitError(
            f"no MPI library can be loaded ({error}), but this process was {started} ({launch and launch.variable} is "
            "set); load the cluster's MPI module or `pip install distmlp[mpich]`, or start it without a launcher"
        ) from None
    library = " ".join(MPI.Get_library_version().split())[:120]
    make = library_make(library)
    if not MPI.Is_initialized():
        if launch is not None and (reason := _unwired(launch, make)):
            raise _mismatch(launch, reason, library, make)
        MPI.Init_thread()
    world = MPI.COMM_WORLD
    if launch is not None and launch.size not in (None, world.size):
        raise _mismatch(launch, f"the MPI library says rank {world.rank} of {world.size}", library, make, world.size)
    if launch is not None and launch.size is None and world.size == 1 and launch.rank > 0:
        raise _mismatch(launch, "the MPI library says rank 0 of 1", library, make)
    if world.size == 1:
        return World(None, library)
    policy.release_output()
    # Our own communicator: a user's script may have messages of its own under way.
    opened = World(world.Dup(), library)
    limit_blas_threads(opened)
    return opened


def library_make(library: str) -> str:
    """The make of an MPI library from its version string."""
    for make, mark in (
        ("Open MPI", "open mpi"),
        ("Intel MPI", "intel"),
        ("MVAPICH", "mvapich"),
        ("Cray MPICH", "cray"),
    ):
        if mark in library.lower():
            return make
    return "MPICH"


def _unwired(launch: hints.Launch, make: str) -> str:
    """Why MPI_Init cannot join the other processes, where that shows before it is tried; "" if it may.

    Open MPI dies in MPI_Init where PMIX_RANK is set and no PMIx server is named; the others would start alone.
    """
    if launch.live:
        return ""
    if make == "Open MPI" and launch.variable == "PMIX_RANK":
        return "no PMIx server of that job is named in the environment"
    return ""


def _mismatch(launch: hints.Launch, reason: str, library: str, make: str, mpi_size: int = 1) -> SystemUnfitError:
    hinted = f"{launch.size} processes" if launch.size is not None else f"rank {launch.rank} of several processes"
    return SystemUnfitError(
        f"launcher and MPI library do not fit: {launch.variable} says {hinted} were started by {launch.launcher}, "
        f"but {reason} (MPI size {mpi_size}). Each process would train a copy by itself. "
        f"MPI library: {library}. Remedy: {hints.how_to_launch(launch, make)}"
    )


def merge_faults(faults: list[tuple[int, str] | None], hosts: tuple[str, ...], what: str = "") -> AgreedError:
    """One error out of the (exit code, message) of the ranks that failed; None for those that did not."""
    ranks: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault is not None:
            ranks.setdefault(fault[1], []).append(rank)
    codes = {fault[0] for fault in faults if fault is not None}
    code = min(codes, key=lambda c: _GRAVEST_FIRST.index(c) if c in _GRAVEST_FIRST else -1)
    lines = [
        text if len(where) == len(faults) else f"{text} [{_name_ranks(where, hosts)}]" for text, where in ranks.items()
    ]
    if len(lines) == 1:
        return AgreedError(lines[0], code)
    return AgreedError("\n".join([f"{what or 'several ranks failed'}:", *(f"  {line}" for line in lines)]), code)


def _name_ranks(ranks: list[int], hosts: tuple[str, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} on host {hosts[ranks[0]]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks[:8]))}"


def _exchange(
    communicator: Any, fault: tuple[int, str], seconds: float, tag: int = 4096
) -> list[tuple[int, str] | None] | None:
    import time

    from mpi4py import MPI

    size, rank = communicator.size, communicator.rank
    # rank 0 decides; the others give it the time to do so
    deadline = time.monotonic() + (seconds if rank == 0 else 2.5 * seconds)
    if rank > 0:
        communicator.isend(fault, 0, tag)
        while time.monotonic() < deadline:
            if communicator.iprobe(0, tag + 1):
                return communicator.recv(source=0, tag=tag + 1)
            time.sleep(0.01)
        return None
    faults: list[tuple[int, str] | None] = [fault] + [None] * (size - 1)
    while None in faults and time.monotonic() < deadline:
        status = MPI.Status()
        if communicator.iprobe(MPI.ANY_SOURCE, tag, status):
            faults[status.Get_source()] = communicator.recv(source=status.Get_source(), tag=tag)
        else:
            time.sleep(0.01)
    if None in faults:
        return None
    for request in [communicator.isend(faults, other, tag + 1) for other in range(1, size)]:
        request.wait()
    return faults


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
