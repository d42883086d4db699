"""Faults a user can cause or meet, each with the exit code promised for it.

A message says four things: what is wrong, where, what was expected, what to do.
Whatever else is raised is a bug of ours and ends with exit code 1 and a traceback.
"""

from __future__ import annotations


class DistmlpError(Exception):
    """A fault with one clear message and no traceback."""

    exit_code = 1


class ConfigError(DistmlpError):
    """A bad command line or configuration."""

    exit_code = 2


class DataError(DistmlpError):
    """A bad shard, data set or checkpoint."""

    exit_code = 3


class CheckpointError(DataError):
    """A checkpoint that cannot be read or written."""


class SystemUnfitError(DistmlpError):
    """This environment cannot run the job: no GPU, wrong launcher, out of memory."""

    exit_code = 4


class DivergedError(DistmlpError):
    """Non-finite loss or gradients under the policy `stop`."""

    exit_code = 5


class StoppedError(DistmlpError):
    """Ended by a signal after a checkpoint was saved; `--resume` continues."""

    exit_code = 75


class AgreedError(DistmlpError):
    """A fault that every rank knows of and that rank 0 alone reports.

    The message lists what each failing rank said. `exit_code` is that of the gravest fault.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
