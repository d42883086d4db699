"""The checkpoints of a run: which are kept, which is the newest good one, and writing them beside the training."""

from __future__ import annotations

import re
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from distmlp.checkpoint.contents import Checkpoint
from distmlp.checkpoint.saving import load, save
from distmlp.checkpoint.seal import Seal, read_seal
from distmlp.errors import CheckpointError
from distmlp.files import leftovers, open_regular
from distmlp.network import Network

DIRECTORY = "checkpoints"
NAME = re.compile(r"step-(\d{8,19})\.h5")


@dataclass
class Found:
    """The newest good checkpoint of a directory, and why newer files were passed over."""

    checkpoint: Checkpoint
    path: Path
    rejected: list[str]


def newest(directory: Path) -> Found | None:
    """The newest good checkpoint in `directory`, told by content; None where there is no checkpoint at all.

    Damaged ones are passed over and named in `rejected`. Raises CheckpointError when all are damaged: a run
    must not start from scratch because of that without being told to.
    """
    steps = {path: seal.step if (seal := _seal(path)) else _step(path) for path in _files(directory)}
    rejected: list[str] = []
    for path in sorted(steps, key=lambda path: (steps[path], path.name), reverse=True):
        try:
            return Found(load(path), path, rejected)
        except CheckpointError as error:
            rejected.append(str(error))
    if rejected:
        reasons = "\n".join(f"  {reason}" for reason in rejected)
        raise CheckpointError(
            f"{directory}: none of the {len(rejected)} checkpoints is good:\n{reasons}\n"
            "restore one from a copy, or begin anew with --overwrite"
        )
    return None


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` means: a file itself; of a run's output directory, or of a directory of
    checkpoints, the newest good one. Raises CheckpointError; warns of newer ones that are damaged."""
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(
                f"checkpoint {path}: there is no such file; give a checkpoint or the output directory of a run"
            )
        return path
    for directory in (path / DIRECTORY, path):
        if directory.is_dir() and (found := newest(directory)):
            for reason in found.rejected:
                warnings.warn(f"passed over: {reason}", stacklevel=2)
            return found.path
    raise CheckpointError(f"checkpoint {path}: no checkpoint (step-….h5) here or in {path / DIRECTORY}")


class Store:
    """Writes the checkpoints of the one run that owns `directory`, and keeps the newest `keep` and the best.

    At most one write is under way, in a thread of its own; its failure is raised by the next call of
    `check`, `wait` or `save`. Used as a context manager it waits for the last write on leaving.
    """

    def __init__(self, directory: Path, network: Network, keep: int) -> None:
        self._directory, self._network, self._keep = directory, network, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        for path in leftovers(directory, NAME.pattern):  # of a writer that was killed: the directory is ours alone
            with suppress(OSError):
                path.unlink()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # the error under way is the one to report

    def path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}.h5"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Begin to write `checkpoint`, whose arrays must not change until `wait` returns; its path to be.

        Waits for the write before. Raises CheckpointError when that one failed.
        """
        self.wait()
        path = self.path(checkpoint.step)
        # not a daemon: a program that ends by itself finishes its last checkpoint first
        self._thread = threading.Thread(target=self._write, args=(path, checkpoint), name="checkpoint")
        self._thread.start()
        return path

    def check(self) -> None:
        """Raise CheckpointError when the last write has failed; never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when the last write is on disk. Raises CheckpointError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, path: Path, checkpoint: Checkpoint) -> None:
        try:
            save(path, checkpoint, self._network)
            self._retain(path, checkpoint.step)
        except BaseException as error:  # handed to the training thread, which raises it
            self._error = error

    def _retain(self, written: Path, step: int) -> None:
        """Remove all but the newest `keep` and the best.

        Files whose seal is broken help nobody; those of later steps were passed over as damaged on resume.
        """
        seals = {path: seal for path in _files(self._directory) if (seal := _seal(path))}
        seals = {path: seal for path, seal in seals.items() if seal.step <= step}
        by_step = sorted(seals, key=lambda path: (seals[path].step, path.name))
        kept = {written, *by_step[-self._keep :]}
        ranked = [(seal.validation, seal.step, path) for path, seal in seals.items() if seal.validation is not None]
        if ranked:
            kept.add(min(ranked)[2])
        for path in _files(self._directory):
            if path not in kept:
                with suppress(OSError):  # one too many is no reason to end a run
                    path.unlink()


def _files(directory: Path) -> list[Path]:
    """Files with the name of a checkpoint. Raises CheckpointError when the directory cannot be read."""
    try:
        return [path for path in directory.iterdir() if NAME.fullmatch(path.name) and not path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror or error}") from None


def _seal(path: Path) -> Seal | None:
    with suppress(OSError, CheckpointError), open_regular(path) as file:
        return read_seal(file, str(path))[0]
    return None


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
