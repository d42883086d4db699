"""Files that are complete or absent: written under a temporary name, flushed to disk, renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

PIECE_BYTES = 8 << 20  # a piece of a long write: short enough for other threads to get their turn
_TEMPORARY = re.compile(r"\.(?P<final>.+)\.[0-9a-f]{24}\.tmp")


def check_replaceable(path: Path, sources: Iterable[str | Path] = ()) -> None:
    """Raise OSError where a file called `path` would do harm: it is there and is a folder, device or pipe (root could
    rename a file over /dev/null), or it is one of `sources`, the files that are read to make it."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # not there; what else is wrong shows when it is written
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is there and no regular file, but a device, pipe or socket")
    for source in sources:
        if _same(path, source):
            raise OSError(errno.EEXIST, f"would replace {source}, which it is made from")


def _same(path: Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def replace_file(path: Path, pieces: Iterable[bytes | memoryview], header: Callable[[], bytes] | None = None) -> None:
    """Write `pieces` one after the other to `path`, which is afterwards complete or as it was before.

    `header` is asked after the last piece and replaces the first bytes: for a digest of what follows.
    The temporary name lies in the same directory and cannot be guessed; the file obeys the umask; file
    and directory are on disk on return. Raises OSError and leaves nothing behind.
    """
    check_replaceable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(12)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            for piece in pieces:
                _write_all(handle, memoryview(piece).cast("B"))
            if header is not None:
                os.lseek(handle, 0, os.SEEK_SET)
                _write_all(handle, memoryview(header()))
            os.fsync(handle)
        finally:
            os.close(handle)  # raises too: some file systems report a full disk or quota only here
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def open_regular(path: Path) -> BufferedReader:
    """`path`, opened for reading. Raises OSError, also for a pipe or device, whose reader might wait for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without a block, a pipe opens at once
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        os.close(handle)
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, "is a directory" if is_folder else "no regular file")
    return open(handle, "rb")


def _write_all(handle: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(handle, data[:PIECE_BYTES]) :]


def sync_directory(path: Path) -> None:
    """Make a rename or removal in `path` last. File systems that cannot sync a directory are left alone."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EROFS):
            raise
    finally:
        os.close(handle)


def leftovers(directory: Path, final: str) -> list[Path]:
    """Temporary files in `directory` that a dead writer left for a final name matching the pattern `final`."""
    found: list[Path] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _TEMPORARY.fullmatch(path.name)
        if match and re.fullmatch(final, match["final"]) and path.is_file() and not path.is_symlink():
            found.append(path)
    return sorted(found)


def describe(error: OSError, path: Path, needed_bytes: int | None = None) -> str:
    """What went wrong with `path`, for a message: reason, errno's name, needed and free bytes of its file system."""
    name = errno.errorcode.get(error.errno or 0, "")
    text = f"{error.strerror or error}" + (f" ({name})" if name else "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = f"{needed_bytes:,} bytes needed, " if needed_bytes is not None else ""
        text += f": {needed}{free_bytes(path)} free on its file system"
        text += " (a quota may allow less)" if error.errno != errno.ENOSPC else ""
    return text


def free_bytes(path: Path) -> str:
    """Bytes free for this user on the file system of the nearest existing parent of `path`, as text."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            status = os.statvfs(folder)
            return f"{status.f_bavail * status.f_frsize:,}"
    return "an unknown number"
