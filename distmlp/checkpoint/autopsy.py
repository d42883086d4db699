"""What is wrong inside a damaged checkpoint, found out in a child process.

libhdf5 may crash, hang or ask for any amount of memory when its structures are damaged. Nothing but the
wording of a message depends on what the child finds. It is started with exec (never forked alone, which
MPI forbids) and does not touch MPI.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_SECONDS = 60
_CHARACTERS = 500
_ADDRESS_SPACE_BYTES = 2 << 30  # of the child, besides a few times the file


def explained(path: Path) -> str:
    """What the child finds wrong; empty where it finds nothing, or died of it."""
    if not sys.executable:  # Python inside another program
        return ""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        child = subprocess.run(
            [sys.executable, "-m", "distmlp.checkpoint.autopsy", str(path.absolute())],
            cwd=Path(__file__).resolve().parent.parent.parent,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
        text = " ".join(child.stdout.split())
        return "".join(c if c.isprintable() else "?" for c in text)[:_CHARACTERS]
    return ""


def _main(path: str) -> None:
    from distmlp.checkpoint.contents import interpret
    from distmlp.errors import CheckpointError

    limit = _ADDRESS_SPACE_BYTES + 4 * os.stat(path).st_size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        with open(path, "rb") as file:
            interpret(file, path)
    except CheckpointError as error:
        print(str(error).removeprefix(f"{path}: "))


if __name__ == "__main__":
    _main(sys.argv[1])
