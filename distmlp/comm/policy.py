"""How a process of the job ends: one message, the same exit code on every rank, nobody left waiting.

The one place that prints errors, aborts MPI and chooses exit codes. Imports nothing heavy: `--help` comes by here.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from distmlp.comm import opening
from distmlp.comm.hints import rank_hint, read_launch
from distmlp.errors import AgreedError, DistmlpError, StoppedError, SystemUnfitError
from distmlp.streams import allow_many_files, guard_streams

if TYPE_CHECKING:
    from distmlp.comm.world import World

# Ranks that failed by themselves tell each other for so long; then the first of them speaks and ends the job
# before the next one's turn.
_EXCHANGE_SECONDS = 0.5
_TURN_SECONDS, _LAST_TURN = 0.3, 10
_JOIN_SECONDS = 8.0
# So long may MPI and the exit handlers of libraries take: CUDA's take many seconds where many processes use a GPU, and
# one may wait for ever for the lock of a thread that is stuck in a read. A run that finished or saved its state is
# given more time, for mpirun takes a rank that goes without them for a failure.
_FINISHED_SECONDS, _FAILED_SECONDS = 60.0, 10.0


def guarded(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end this process with its exit code (None: 0); never returns, never leaves a rank waiting.

    A `DistmlpError` becomes one message and its exit code, any other exception one traceback and 1. A fault
    that only this rank knows of ends the whole job, since the others may be inside a collective.
    """
    guard_streams()
    allow_many_files()
    hold_output()
    try:
        code = main() or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here a full disk can still be told
    except SystemExit as stop:  # argument parsers end like this, after they printed
        code = _system_exit_code(stop)
    except BaseException as error:
        report(error)
    leave(code)


def report(error: BaseException) -> NoReturn:
    """Print `error` once for the job and end every rank with its exit code."""
    if isinstance(error, AgreedError):
        if _rank() == 0:
            tell(_worded((error.exit_code, str(error)), ""))
        leave(error.exit_code)
    fault = _fault(error)
    world = _join(fault)
    if world is None:  # alone, or under a launcher that the MPI library does not know
        if rank_hint() == 0:
            tell(_worded(fault, ""))
        leave(fault[0])
    where = f"rank {world.rank} on host {world.host}" if world.size > 1 else ""
    with suppress(Exception):  # MPI itself may be what failed
        faults = world.exchange_faults(fault, _EXCHANGE_SECONDS)
        if faults is not None:
            from distmlp.comm.faults import merge_faults

            merged = merge_faults(faults, world.rank_hosts)
            if world.rank == 0:
                tell(_worded((merged.exit_code, str(merged)), ""))
            leave(merged.exit_code)
    time.sleep(_TURN_SECONDS * min(world.rank, _LAST_TURN))
    tell(_worded(fault, where))
    abandon(fault[0])


def leave_to_first_rank() -> bool:
    """For a command that is one process's work: False on rank 0, which does it, True on the others, which are done.

    Rank 0 is a world of its own then: the others would not come to MPI_Init.
    """
    opening.first_rank_alone = True
    return rank_hint() > 0


def tell(text: str) -> None:
    """Print to standard error itself: a progress bar or `hold_output` may have put something else in its place."""
    with suppress(OSError, ValueError):
        print(text, file=sys.__stderr__ or sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process as all the others do: MPI finalized, output flushed, exit code `code`."""
    world = _current()
    if world is None or world.communicator is None:
        if code != 0 and rank_hint() > 0:
            time.sleep(2 * _EXCHANGE_SECONDS)  # launchers kill the others when one ends: rank 0 has to speak first
        if _threads_linger():  # Python's end would wait for them, perhaps for ever
            _flush()
            os._exit(code)
        _flush()
        sys.exit(code)
    from distmlp.comm import world as worlds
    from distmlp.comm.deadline import end_within

    end_within(_FINISHED_SECONDS if code in (0, StoppedError.exit_code) else _FAILED_SECONDS, code)
    worlds.close()
    _flush()
    _exit_from_c(code)


def abandon(code: int) -> NoReturn:
    """End the whole job at once with `code`, wherever the other ranks are. From any thread."""
    _flush()
    world = _current()
    beside = threading.current_thread() is not threading.main_thread()
    if world is not None and (not beside or world.thread_multiple):
        from distmlp.comm.deadline import end_within

        end_within(2.0, code)  # MPI_Abort may have to wait: for the main thread to leave MPI, or for a launcher
        with suppress(Exception):
            world.abort(code)
    os._exit(code)


def guard_script() -> None:
    """Make an uncaught exception in a user's own script end the whole job, as `guarded` does for the commands, and
    MPI be finalized when the script ends well. Does nothing for a process alone, and nothing the second time."""
    if getattr(sys.excepthook, "of_distmlp", False) or not _several():
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = _current()
        if world is not None and world.size == 1:
            previous(kind, error, trace)
        else:
            report(error)

    hook.of_distmlp = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _fault(error: BaseException) -> tuple[int, str]:
    if isinstance(error, DistmlpError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if shortage := _shortage(error):
        return SystemUnfitError.exit_code, shortage
    import traceback

    return 1, "".join(traceback.format_exception(error)).rstrip()


def _shortage(error: BaseException) -> str:
    """What the system refused, where that is what an unexpected error says; else ""."""
    number, text = getattr(error, "errno", None), str(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        reason = f" ({text})" if text else ""
        return f"out of memory{reason}; use a smaller network or data.batch, or more ranks"
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in text:
        return f"too many open files for this process or host ({text}); raise the limit: ulimit -n 4096"
    if isinstance(error, RuntimeError) and text.startswith("can't start new thread"):
        return "no further thread can be started; raise the limit (ulimit -u), or set data.readers = 1"
    return ""


def _worded(fault: tuple[int, str], where: str) -> str:
    code, text = fault
    if code == 1:
        return f"{where}:\n{text}" if where else text
    kind = "" if code == StoppedError.exit_code else "error: "  # a run that stopped as told is no error
    return f"distmlp: {kind}{text}" + (f" [{where}]" if where else "")


def _current() -> World | None:
    module = sys.modules.get("distmlp.comm.world")
    return module.current() if module is not None else None


def _rank() -> int:
    world = _current()
    return world.rank if world is not None else rank_hint()


def _join(fault: tuple[int, str]) -> World | None:
    """The world, opened if several processes were launched: hydra leaves the other ranks waiting in MPI_Init
    when one exits before it came there, so even a rank that failed has to come. If the others do not (because the
    command needs no MPI and they are done), this rank tells its `fault` and goes."""
    if _current() is None and _several() and not opening.first_rank_alone:
        patience = threading.Timer(_JOIN_SECONDS, _give_up, (fault,))
        patience.daemon = True
        patience.start()
        with suppress(Exception):
            from distmlp.comm.startup import start_in_background
            from distmlp.comm.world import open_world

            start_in_background()
            open_world()
        patience.cancel()
    return _current()


def _several() -> bool:
    """Whether a launcher has started several processes."""
    launch = read_launch()
    return launch is not None and launch.live and launch.size != 1


def _give_up(fault: tuple[int, str]) -> None:
    tell(_worded(fault, f"rank {rank_hint()} on host {os.uname().nodename}"))
    os._exit(fault[0])


def _system_exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    tell(str(stop.code))
    return 1


def hold_output() -> None:
    """Under a launcher only rank 0 prints: without this every rank would show `--help` or the same warning.

    Standard output of the other ranks is dropped for good, standard error of all kept until `release_output`.
    """
    if _several():
        if rank_hint() > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
        sys.stderr = io.StringIO()


def release_output(world: World) -> None:
    """Let standard error through again, once ranks can tell each other apart. Collective.

    What was held is shown by rank 0: the same text once, with the ranks that wrote it where not all did.
    """
    from distmlp.comm.faults import name_ranks

    texts = world.all_gather(_held())
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__
    if world.rank == 0:
        for text in dict.fromkeys(filter(None, texts)):
            ranks = [rank for rank, other in enumerate(texts) if other == text]
            tell(text if len(ranks) == world.size else f"{text} [{name_ranks(ranks, world.rank_hosts)}]")


def _held() -> str:
    return sys.stderr.getvalue().rstrip() if isinstance(sys.stderr, io.StringIO) else ""


def _threads_linger(seconds: float = 2.0) -> bool:
    """Whether threads go on that nobody has told to end, such as one that is stuck in a read."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return True
    return False


def _exit_from_c(code: int) -> NoReturn:
    """End through C's `exit`: MPICH tells its launcher that all went well in an exit handler, without which hydra
    kills the ranks that are still ending; but skip Python's end, which waits for threads."""
    import ctypes

    ctypes.PyDLL(None).exit(code)
    os._exit(code)


def _flush() -> None:
    if rank_hint() == 0 and (text := _held()):
        sys.stderr = sys.__stderr__
        tell(text)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


opening.when_started.append(guard_script)
opening.when_met.append(release_output)
