"""A log file of every rank (`run.log_ranks`): what this rank did and warned of, and when, for looking into a job that
goes wrong on some ranks only. Rank 0's is more than it prints: every rank writes its own waiting and communication."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distmlp.errors import CheckpointError
from distmlp.files import describe

if TYPE_CHECKING:
    from distmlp.comm.world import World

DIRECTORY, PATTERN = "ranks", "rank-*.log"


class RankLog:
    """`directory`/ranks/rank-00003.log, appended to line by line. Raises CheckpointError where it cannot be opened.

    A line that cannot be written ends the log and not the run; `broken` then says why.
    """

    def __init__(self, directory: Path, world: World) -> None:
        self.path = directory / DIRECTORY / f"rank-{world.rank:05d}.log"
        self.broken = ""
        try:
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {describe(error, directory)}; see run.log_ranks") from None
        self.write(f"rank {world.rank} of {world.size} on host {world.host}, process {os.getpid()}")

    def write(self, text: str) -> None:
        """One line or several, each with the time."""
        if self._file < 0:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() // 1_000_000 % 1000:03d}Z"
        try:
            os.write(self._file, "".join(f"{now} {line}\n" for line in text.splitlines()).encode())
        except OSError as error:
            self.broken = f"{self.path}: {describe(error, self.path)}; this rank's log ends here"
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1


def remove_logs(directory: Path) -> None:
    """Remove the logs of an earlier run in `directory`. Raises OSError."""
    for path in (directory / DIRECTORY).glob(PATTERN):
        path.unlink()
    with suppress(OSError):
        (directory / DIRECTORY).rmdir()
