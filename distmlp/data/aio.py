"""Many reads of one file in one call, through glibc's asynchronous I/O: its own threads do them one after the other
without coming back to the interpreter, for which many reader threads would wait longer than for small reads."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

WORTHWHILE = 4  # reads
_READ, _WAIT, _NO_SIGNAL, _IN_PROGRESS = 0, 0, 1, 115
_REQUEST = np.dtype({  # struct aiocb of 64-bit Linux, the same since glibc 2.1
    "names": ["handle", "operation", "address", "size", "notify", "error", "done", "offset"],
    "formats": ["i4", "i4", "u8", "u8", "i4", "i4", "i8", "i8"],
    "offsets": [0, 4, 16, 24, 44, 112, 120, 128],
    "itemsize": 168,
})  # fmt: skip


def _find() -> Callable[..., int] | None:
    known = platform.machine() in ("x86_64", "aarch64") and sys.maxsize > 1 << 32
    if not known or not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    for library in (None, "librt.so.1"):
        try:
            function = ctypes.CDLL(library).lio_listio
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        return function
    return None


_lio_listio = _find()


def read_spans(handle: int, spans: NDArray, out: NDArray) -> bool:
    """Offset and bytes (spans, 2) in a file, one after the other into `out` (contiguous, not empty).

    False where not every read was whole; raises OSError.
    """
    if _lio_listio is None or len(spans) < WORTHWHILE:
        view, done = out.reshape(-1).data.cast("B"), 0
        for offset, size in spans.tolist():
            if os.preadv(handle, (view[done : done + size],), offset) != size:
                return False
            done += size
        return True
    offsets, sizes = spans.T
    requests = np.zeros(len(spans), _REQUEST)
    requests["handle"], requests["operation"], requests["notify"] = handle, _READ, _NO_SIGNAL
    requests["offset"], requests["size"] = offsets, sizes
    requests["address"] = out.ctypes.data + np.cumsum(sizes) - sizes
    pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(len(spans), dtype=np.uint64)
    _lio_listio(_WAIT, pointers.ctypes.data, len(spans), None)
    while (requests["error"] == _IN_PROGRESS).any():  # a signal ended the waiting: nobody may use the memory yet
        time.sleep(1e-3)
    return bool((requests["done"] == sizes).all())
