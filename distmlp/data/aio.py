"""Many reads of files in one call, without coming back to the interpreter between them: many reader threads would
wait longer for it than small reads take.

Linux's own asynchronous I/O (`io_submit`) reads what is in the page cache at once, in the thread that asks. Where it is
not to be had (a sandbox, too many of them in use), glibc's (`lio_listio`) has threads of its own read; else one by one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

WORTHWHILE = 4  # reads
TOGETHER = 256  # requests of one call: all threads of all programs share /proc/sys/fs/aio-max-nr of them
_SETUP, _DESTROY, _SUBMIT, _EVENTS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}.get(
    platform.machine(), (-1, -1, -1, -1)
)
_KNOWN = _SETUP >= 0 and sys.maxsize > 1 << 32 and sys.platform.startswith("linux")
_KERNEL_REQUEST = np.dtype({  # struct iocb of 64-bit little-endian Linux; operation 0 is a read
    "names": ["wanted", "operation", "handle", "address", "size", "offset"],
    "formats": ["i8", "u2", "u4", "u8", "u8", "i8"],
    "offsets": [0, 16, 20, 24, 32, 40],  # the first comes back with the event
    "itemsize": 64,
})  # fmt: skip
_KERNEL_EVENT = np.dtype([("wanted", "i8"), ("request", "u8"), ("done", "i8"), ("more", "i8")])
_READ, _WAIT, _NO_SIGNAL, _IN_PROGRESS = 0, 0, 1, 115
Reads = Sequence[tuple[NDArray | int, NDArray, NDArray]]  # see `read_all`
_LIBRARY_REQUEST = np.dtype({  # struct aiocb of 64-bit Linux, the same since glibc 2.1
    "names": ["handle", "operation", "address", "size", "notify", "error", "done", "offset"],
    "formats": ["i4", "i4", "u8", "u8", "i4", "i4", "i8", "i8"],
    "offsets": [0, 4, 16, 24, 44, 112, 120, 128],
    "itemsize": 168,
})  # fmt: skip


def _find_kernel(library: type[ctypes.CDLL] = ctypes.CDLL) -> Callable[..., int] | None:
    """`syscall`, where the calls above are known to be right."""
    if not _KNOWN:
        return None
    function = library(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _find_library() -> Callable[..., int] | None:
    """glibc's `lio_listio`."""
    if not _KNOWN or platform.libc_ver()[0] != "glibc":
        return None
    for library in (None, "librt.so.1"):
        try:
            function = ctypes.CDLL(library).lio_listio
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        return function
    return None


_syscall = _find_kernel()
_brief_syscall = _find_kernel(ctypes.PyDLL)  # keeps the interpreter: to get it back takes longer than the call
_lio_listio = _find_library()


class _Context:
    """The kernel's side of the reads of one thread; `number` is 0 where it gives none."""

    def __init__(self) -> None:
        number = ctypes.c_ulong(0)
        assert _syscall is not None
        refused = _syscall(ctypes.c_long(_SETUP), ctypes.c_long(TOGETHER), ctypes.byref(number))
        self.number = 0 if refused else number.value
        self.events = np.zeros(TOGETHER, _KERNEL_EVENT)
        self.at_once = (ctypes.c_long * 2)(0, 0)  # seconds and nanoseconds

    def __del__(self) -> None:
        if self.number and _syscall is not None:
            _syscall(ctypes.c_long(_DESTROY), ctypes.c_ulong(self.number))


_mine = threading.local()


def read_spans(handles: NDArray | int, spans: NDArray, out: NDArray) -> bool:
    """`read_all` of one file or array alone."""
    return read_all([(handles, spans, out)])


def read_all(reads: Reads) -> bool:
    """Offset and bytes (spans, 2) in files open as `handles`, one after the other into `out` (contiguous, not empty);
    several such together are (handles, spans, out) each.

    `handles`: one for all spans or one for each. False where not every read was whole; raises OSError.
    """
    if sum(len(spans) for _, spans, _ in reads) >= WORTHWHILE:
        if _syscall is not None:
            if not hasattr(_mine, "context"):
                _mine.context = _Context()
            if _mine.context.number:
                return _with_kernel(_mine.context, reads)
        if _lio_listio is not None:
            return _with_library(reads)
    for handles, spans, out in reads:
        view, done = out.reshape(-1).data.cast("B"), 0
        for handle, (offset, size) in zip(np.broadcast_to(handles, len(spans)).tolist(), spans.tolist(), strict=True):
            if os.preadv(handle, (view[done : done + size],), offset) != size:
                return False
            done += size
    return True


def _requests(kind: np.dtype, reads: Reads) -> tuple[NDArray, NDArray]:
    """The requests, and where each of them lies in memory."""
    requests = np.zeros(sum(len(spans) for _, spans, _ in reads), kind)
    begin = 0
    for handles, spans, out in reads:
        part = requests[begin : begin + len(spans)]
        offsets, sizes = spans.T
        part["handle"], part["offset"], part["size"] = handles, offsets, sizes
        part["address"] = out.ctypes.data + np.cumsum(sizes) - sizes
        begin += len(spans)
    return requests, requests.ctypes.data + kind.itemsize * np.arange(len(requests), dtype=np.uint64)


def _with_kernel(context: _Context, reads: Reads) -> bool:
    assert _syscall is not None
    assert _brief_syscall is not None
    requests, pointers = _requests(_KERNEL_REQUEST, reads)
    requests["wanted"] = requests["size"]
    number, events = ctypes.c_ulong(context.number), context.events
    for start in range(0, len(requests), TOGETHER):
        wanted = min(TOGETHER, len(requests) - start)
        asked = _syscall(
            ctypes.c_long(_SUBMIT), number, ctypes.c_long(wanted), ctypes.c_void_p(pointers[start:].ctypes.data)
        )
        if asked <= 0:
            return False
        at_once = ctypes.c_void_p(ctypes.addressof(context.at_once))
        call, least, wait = _brief_syscall, ctypes.c_long(0), at_once  # they have ended where all was in memory
        done = 0
        while done < asked:  # signals end the waiting early, and nobody may use the memory yet
            place, most = ctypes.c_void_p(events[done:].ctypes.data), ctypes.c_long(asked - done)
            done += max(0, call(ctypes.c_long(_EVENTS), number, least, most, place, wait))
            call, least, wait = _syscall, ctypes.c_long(asked - done), ctypes.c_void_p(None)
        if asked < wanted or (events["done"][:done] != events["wanted"][:done]).any():
            return False
    return bool(requests.size)  # which had to live until here


def _with_library(reads: Reads) -> bool:
    assert _lio_listio is not None
    requests, pointers = _requests(_LIBRARY_REQUEST, reads)
    requests["operation"], requests["notify"] = _READ, _NO_SIGNAL
    _lio_listio(_WAIT, pointers.ctypes.data, len(requests), None)
    while (requests["error"] == _IN_PROGRESS).any():  # a signal ended the waiting: nobody may use the memory yet
        time.sleep(1e-3)
    return bool((requests["done"] == requests["size"]).all())
