"""Learn the layout of HDF5 files without ever opening them with the HDF5 library in this process.

First what needs no library: existence, permission, signature, truncation. Then the structure, by a child
process (`probe`) whose crash, endless loop or greed is a message about the file here.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from distmlp.data.foreign import HEAD_BYTES, member_of_several, recognized
from distmlp.data.layout import CHUNK_ENTRY, Filter, Layout
from distmlp.errors import SystemUnfitError

PROBE = "distmlp.data.probe"
SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class Inspected:
    """What came out for one file: its datasets by role, or the reason why it cannot be used."""

    path: str
    layouts: dict[str, Layout]
    problem: str = ""
    contents: tuple[str, ...] = ()


def inspect_files(paths: Sequence[str], datasets: dict[str, str]) -> list[Inspected]:
    """Check every file of `paths`; `datasets` maps roles ("inputs", "targets", …) to names.

    With no datasets, only what the files hold is listed. Never raises for a bad file.
    """
    results: dict[str, Inspected] = {}
    for path in paths:
        problem = first_look(path)
        if problem:
            results[path] = Inspected(path, {}, problem)
    rest = [path for path in paths if path not in results]
    while rest:
        for answer in _probe(rest, datasets):
            results[answer.path] = answer
        done = [path for path in rest if path in results]
        rest = [path for path in rest if path not in results]
        if not done:
            raise SystemUnfitError(
                f"the process that checks data files ({sys.executable} -m {PROBE}) does not start; its error is above"
            )
    return [results[path] for path in paths]


def first_look(path: str) -> str:
    """Why `path` cannot be a whole HDF5 file, or "": what can be told from its status and first bytes."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return f"is a directory, expected an HDF5 file; give a pattern such as {os.path.join(path, '*.h5')}"
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file, expected an HDF5 file"
        with open(path, "rb", buffering=0) as file:
            return _superblock(file, status.st_size)
    except OSError as error:
        return f"cannot be read: {(error.strerror or str(error)).lower()}"


def _superblock(file: BinaryIO, size: int) -> str:
    if size == 0:
        return "is empty (0 bytes), expected an HDF5 file"
    base = 0
    while base < size:  # the signature stands at 0, 512, 1024, 2048, …: a user block may come first
        file.seek(base)
        head = file.read(160)
        if head.startswith(SIGNATURE):
            if several := member_of_several(head):
                return several
            end = _end_of_file(head)
            if end is not None and size < end:
                return (
                    f"is truncated: {size} bytes of the {end} that its header promises; a copy or writer was cut off: "
                    "copy or make the file again"
                )
            return ""
        base = max(512, base * 2)
    file.seek(0)
    other = recognized(file.read(HEAD_BYTES))
    return other or "is not an HDF5 file (no HDF5 signature); convert other formats with `distmlp data convert`"


def _end_of_file(head: bytes) -> int | None:
    """End-of-file address in a superblock of version 0 to 3 with 8-byte addresses, else None."""
    version = head[8] if len(head) > 8 else 255
    if version in (0, 1) and len(head) >= 64 and head[13] == 8:
        start = 24 if version == 0 else 28
    elif version in (2, 3) and len(head) >= 48 and head[9] == 8:
        start = 12
    else:
        return None
    addresses = np.frombuffer(head, "<u8", 3, start)  # base, free space or extension, end of file
    return int(addresses[2])


# Launchers and terminals send them to the whole process group; what they mean for the job is up to this process.
_NOT_FOR_THE_CHILD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _probe(paths: Sequence[str], datasets: dict[str, str]) -> Iterator[Inspected]:
    """Answers of one child, in order; where it dies, the file it died on is the culprit and the last."""
    read_end, write_end = os.pipe()
    request_read, request_write = os.pipe()
    arguments = [sys.executable, "-P", "-m", PROBE]
    actions = [
        (os.POSIX_SPAWN_DUP2, request_read, 0),
        (os.POSIX_SPAWN_DUP2, write_end, 1),
    ]
    # posix_spawn, not fork: with MPI running, a forked copy of this process is not safe.
    try:
        child = os.posix_spawn(
            sys.executable, arguments, _environment(), file_actions=actions, setsigmask=_NOT_FOR_THE_CHILD
        )
    except OSError as error:
        os.close(read_end)
        os.close(request_write)
        raise SystemUnfitError(
            f"{sys.executable}: cannot be started as a child process, which opens files that may be damaged: "
            f"{error.strerror or error}; see this user's permission for it, and the limits on processes and memory "
            "(ulimit -u, ulimit -v)"
        ) from None
    finally:
        os.close(request_read)
        os.close(write_end)
    answered = 0
    try:
        with open(read_end, "rb") as answers:
            try:
                with open(request_write, "wb") as request:
                    request.write(json.dumps({"files": list(paths), "datasets": datasets}).encode() + b"\n")
            except BrokenPipeError:
                pass  # it died at once: its status tells
            started = False
            while answered < len(paths):
                line = answers.readline()
                if line == b"ready\n":
                    started = True
                    continue
                result = _result(paths[answered], line, answers)
                if result is None:
                    break
                yield result
                answered += 1
    except BaseException:  # an interrupt: nobody will read the rest
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if answered < len(paths) and started:
        yield Inspected(paths[answered], {}, _epitaph(status))


def _environment() -> dict[str, str]:
    """The child's environment: no locks (some file systems have none), few threads, this package first."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    own = {"HDF5_USE_FILE_LOCKING": "FALSE", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **own}


def _result(path: str, line: bytes, answers: BinaryIO) -> Inspected | None:
    if not line.endswith(b"\n"):
        return None
    answer = json.loads(line)
    payload = [answers.read(size) for size in answer["payload"]]
    if sum(map(len, payload)) != sum(answer["payload"]):
        return None
    if "refused" in answer:
        return Inspected(path, {}, answer["refused"])
    layouts = {}
    for position, (role, facts) in enumerate(answer["datasets"].items()):
        layouts[role] = to_layout(path, facts, payload[4 * position : 4 * position + 4])
    return Inspected(path, layouts, contents=tuple(answer.get("contents", ())))


def to_layout(path: str, facts: dict[str, Any], parts: list[bytes]) -> Layout:
    """A layout out of what the probe answers: facts, and fill value, inline data, chunk table, checksums."""
    fill, inline, chunks, checksums = parts
    return Layout(
        path=path,
        name=facts["name"],
        shape=tuple(facts["shape"]),
        dtype=np.dtype(facts["dtype"]),
        kind=facts["kind"],
        file_bytes=facts["file_bytes"],
        offset=facts["offset"],
        chunk=tuple(facts.get("chunk", ())),
        filters=tuple(Filter(number, name, flags, tuple(v)) for number, name, flags, v in facts.get("filters", ())),
        chunks=np.frombuffer(chunks, CHUNK_ENTRY) if facts["kind"] == "chunked" else None,
        inline=inline,
        fill=fill,
        checksums=np.frombuffer(checksums, "<u4") if facts["checksum_rows"] else None,
        checksum_rows=facts["checksum_rows"],
        columns=tuple(facts["columns"]),
    )


def _epitaph(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return "is damaged: reading its structure takes HDF5 for ever; copy or make it again"
    if number:
        return f"is damaged: HDF5 crashes on it ({signal.Signals(number).name}); copy or make it again"
    return "is damaged: HDF5 gives up on it; copy or make it again"
