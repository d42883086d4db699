"""Loading and starting the MPI library, and refusing one that does not fit the launcher.

Three things can happen when the makes differ: N processes that each think they are rank 0 of 1, an abort
inside MPI_Init that ends the process with a code of its own, or an error that Python sees.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from distmlp.comm.hints import Launch, how_to_launch, rank_hint, read_launch
from distmlp.comm.threads import host_cores
from distmlp.errors import SystemUnfitError


def start_mpi(launch: Launch | None) -> tuple[Any, str]:
    """mpi4py's `MPI` module, initialized, and the library's version string.

    Raises SystemUnfitError where the library cannot be loaded, or does not join the job that `launch` describes.
    """
    mpi = _load(launch)
    library = " ".join(mpi.Get_library_version().rstrip("\0").split())[:120]
    make = library_make(library)
    if not mpi.Is_initialized():
        if launch is not None and (reason := unwired(launch, make)):
            raise mismatch(launch, reason, library, make)
        if crowded(os.environ, host_cores()):
            # MPICH spins while it waits, which keeps the core from the rank it waits for. Open MPI sees by itself.
            os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
        with _aborts_explained(launch, library, make), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mpi4py's own remark on foreign launchers; ours is an error
            mpi.Init_thread()
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    if launch is not None and size != launch.size and (launch.size is not None or (size == 1 and launch.rank > 0)):
        raise mismatch(launch, f"the MPI library says rank {rank} of {size}", library, make, size)
    return mpi, library


def crowded(environ: Mapping[str, str], cores: float) -> bool:
    """Whether hydra has started more ranks on this host than there are cores for them."""
    ranks = environ.get("MPI_LOCALNRANKS", "")
    return ranks.isdecimal() and int(ranks) > cores


def library_make(library: str) -> str:
    """The make of an MPI library from its version string."""
    marks = {"Open MPI": "open mpi", "Intel MPI": "intel", "MVAPICH": "mvapich", "Cray MPICH": "cray"}
    return next((make for make, mark in marks.items() if mark in library.lower()), "MPICH")


def started_here() -> bool:
    """Whether MPI was started by us, and not by a script's own import of mpi4py, which also ends it."""
    import mpi4py

    return not mpi4py.rc.initialize


def start_in_background() -> None:
    """MPI_Init by ctypes, which lets other threads run meanwhile; mpi4py holds Python's lock and may never return.

    Only for a process that is about to end the job.
    """
    mpi = _load(read_launch())
    if not mpi.Is_initialized():
        ctypes.CDLL(library_file()).MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)


def library_file() -> str | None:
    """The file of the MPI library that this process has loaded, None where that cannot be told."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[-1]
            if re.match(r"libmpi(_\w+)?\.so", os.path.basename(path)):
                return path
    return None


def unwired(launch: Launch, make: str) -> str:
    """Why MPI_Init cannot join the other processes where that shows before it is tried, "" if it may.

    PMIX_RANK without the address of a PMIx server makes Open MPI and MPICH end the process in MPI_Init.
    """
    if launch.variable == "PMIX_RANK" and not launch.live:
        return f"no PMIx server of that job is named in the environment, without which {make} cannot join it"
    return ""


def mismatch(launch: Launch, reason: str, library: str, make: str, mpi_size: int = 1) -> SystemUnfitError:
    """The refusal: what the launcher says, what MPI says, and how to launch instead."""
    hinted = f"{launch.size} processes" if launch.size is not None else f"rank {launch.rank} of several processes"
    return SystemUnfitError(
        f"launcher and MPI library do not fit: {launch.variable} says {hinted} started by {launch.launcher}, "
        f"but {reason} (MPI size {mpi_size}).\n"
        f"  MPI library: {library}\n"
        f"  Each process would train a copy by itself; {how_to_launch(launch, make)}."
    )


def _load(launch: Launch | None) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mpi4py

            if "mpi4py.MPI" not in sys.modules:
                mpi4py.rc.initialize = False  # the wiring is checked first
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        started = (
            f"{launch.launcher} started this process as rank {launch.rank} of {launch.size or 'several'} "
            f"({launch.variable} is set), but "
            if launch is not None
            else ""
        )
        raise SystemUnfitError(
            f"{started}no MPI library can be loaded: {error}\n"
            "  Load the cluster's MPI module or `pip install distmlp[mpich]`; one process alone needs none."
        ) from None
    return MPI


@contextmanager
def _aborts_explained(launch: Launch | None, library: str, make: str) -> Iterator[None]:
    """Turn an `exit` of the library inside MPI_Init into our message and exit code 4.

    MPICH ends the process where it cannot reach its launcher; a C exit handler is the only place left to speak
    from. What it prints meanwhile is kept back, and shown if all goes well. Other makes are left to speak for
    themselves: some end without running handlers, and their words would be lost.
    """
    if make not in ("MPICH", "Cray MPICH"):
        yield
        return
    real_stderr = os.dup(2)
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, or by the end of the process

    def explain() -> None:
        lines = _lines(said)
        reason = f"MPI_Init gave up: {lines[-1]}" if lines else "MPI_Init gave up"
        text = f"the MPI library cannot start; {reason}\n  MPI library: {library}"
        if launch is not None:
            text = str(mismatch(launch, reason, library, make))
        if rank_hint() == 0:
            os.write(real_stderr, f"distmlp: error: {text}\n".encode())
        else:
            time.sleep(1)  # launchers kill the others when one ends: rank 0 has to speak first
        os._exit(SystemUnfitError.exit_code)

    sys.stderr.flush()
    os.dup2(said.fileno(), 2)
    try:
        with _at_c_exit(explain):
            yield
    finally:
        os.dup2(real_stderr, 2)
        os.close(real_stderr)
        if lines := _lines(said):
            os.write(2, ("\n".join(lines) + "\n").encode())
        said.close()


@contextmanager
def _at_c_exit(function: Callable[[], None]) -> Iterator[None]:
    """Have `function` called if C's `exit` runs inside this block (where the C library allows it)."""
    inside = True
    libc = ctypes.CDLL(None)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function() if inside else None)
    group = ctypes.addressof(handle := ctypes.c_char(b"\0"))  # a "shared library" of our own that can be unloaded
    known = hasattr(libc, "__cxa_atexit")
    if known:
        libc.__cxa_atexit(handler, None, ctypes.c_void_p(group))
    try:
        yield
    finally:
        inside = False
        if known:
            libc.__cxa_finalize(ctypes.c_void_p(group))  # calls the handler a last time and forgets it
        del handle


def _lines(said: BinaryIO) -> list[str]:
    said.seek(0)
    return [line for line in said.read(1 << 16).decode(errors="replace").splitlines() if line.strip(" :-")]
