"""Standard streams that can be relied on, whatever the caller did with them, and as many files as the system allows.

A closed one would give its number to the next file that is opened, and with it all that C libraries print.
A reader that has gone (`| head`) is no fault of the command; output that cannot be stored is one to be told.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import sys
from contextlib import suppress
from typing import Any

from distmlp.errors import SystemUnfitError

MOST_FILES = 1 << 16


class OutputError(SystemUnfitError, OSError):
    """Standard output could not be written. An OSError too, for those who can do without output."""


def guard_streams() -> None:
    """Open closed standard streams on the null device, and let writing to standard output fail as described."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, mode)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
    out: Any = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:  # not that of a test or notebook
        out.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(out.fileno(), "w", closefd=False)),
            encoding=out.encoding,
            errors="backslashreplace" if out.errors == "strict" else out.errors,  # as standard error has it
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )


def allow_many_files() -> None:
    """Readers of many shards keep files open; the limit that counts is the system's, not the shell's lower default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Output(io.FileIO):
    """Swallows what nobody reads; fails once, with OutputError, where what is written cannot be stored."""

    _gone = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._gone:
            return size
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise
            self._gone = True
            if error.errno == errno.EPIPE:
                return size
            raise OutputError(
                f"standard output cannot be written: {error.strerror or error}; what is there is cut short"
            ) from None
