"""A deadline for the end of this process that holds whatever its threads are doing."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
from contextlib import suppress

_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2  # of Linux, on all its machines


class _Event(ctypes.Structure):
    """`struct sigevent`: call `function(value)` in a thread of its own."""

    _fields_ = (
        ("value", ctypes.c_size_t),  # `union sigval`
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "seconds", "nanoseconds"))


def end_within(seconds: float, code: int) -> None:
    """Have this process end with exit code `code` in `seconds`, if it has not ended by then. From any thread.

    The C library does it: a library's exit handler or MPI_Finalize that waits for ever holds Python's lock, so that
    no handler and no thread of Python would come to run.
    """
    with suppress(OSError, AttributeError, ValueError):
        _call_exit(seconds, code)
        seconds += 2
    # If there is no such timer, or the thread it runs in cannot start: the end at least, though by a signal.
    if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses handlers
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))


def _call_exit(seconds: float, code: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    library = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
    function = ctypes.cast(libc._exit, ctypes.c_void_p)
    event, timer = _Event(value=code, notify=_SIGEV_THREAD, function=function), ctypes.c_void_p()
    times = _Times(seconds=int(seconds), nanoseconds=int(seconds % 1 * 1e9))
    if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or library.timer_settime(
        timer, 0, ctypes.byref(times), None
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
