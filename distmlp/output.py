"""What a run leaves behind in `run.output`, and who may write there."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmlp import __version__, lock
from distmlp.checkpoint import store
from distmlp.config import RunConfig
from distmlp.errors import CheckpointError, ConfigError
from distmlp.events import require_tensorboard
from distmlp.files import describe, leftovers, replace_file
from distmlp.rank_log import remove_logs

if TYPE_CHECKING:
    from distmlp.comm.world import World

RUN, METRICS, SUMMARY, EVENTS = "run.toml", "metrics.jsonl", "summary.json", "tensorboard"
_PACKAGES = ("numpy", "h5py", "mpi4py", "cupy-cuda12x", "cupy-cuda13x")


@dataclass
class Summary:
    """The content of `summary.json`."""

    status: str  # finished, early_stopped, stopped
    steps: int
    epochs: float
    samples: int  # rows trained on, repeats counted
    ranks: int
    hosts: list[str]
    engine: str
    transport: str
    precision: str
    loss: float | None  # mean over the rows of the last epoch, or of the steps run if fewer
    validation: dict[str, float] | None
    seconds: float
    samples_per_second: float | None  # without warm-up, validation and saving
    weights_sha256: str
    transfers: dict[str, int]
    versions: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)  # the GPU of every rank: rank, host, name, uuid
    skipped: int = 0  # batches left out under the policy `skip`


class RunOutput:
    """The output directory of a run. Every rank builds one, together; only rank 0 touches files.

    Raises ConfigError when the directory is not empty (without `resume` or `overwrite`), is in use by another
    job or cannot be made; as AgreedError on all ranks.
    """

    def __init__(self, config: RunConfig, world: World, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(config.run.output)
        self.checkpoints = self.path / store.DIRECTORY
        self._writes = world.rank == 0
        self._lock: lock.OutputLock | None = None
        self._metrics: int | None = None
        self._tensorboard = config.run.tensorboard
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other")
        world.agree(lambda: self._claim(resume, overwrite) if self._writes else None)

    def begin(self, config: RunConfig, step: int) -> None:
        """Write `run.toml` and open `metrics.jsonl` with the lines up to `step`, where training goes on."""
        if not self._writes:
            return
        try:
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.checkpoints}: {describe(error, self.path)}") from None
        _replace(self.path / RUN, config.to_toml())
        try:
            (self.path / SUMMARY).unlink(missing_ok=True)  # it told of an end that is none
        except OSError as error:
            raise CheckpointError(f"{self.path / SUMMARY}: cannot be removed: {describe(error, self.path)}") from None
        path = self.path / METRICS
        _replace(path, "".join(_lines_until(path, step)))
        self._metrics = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def record(self, entry: dict[str, Any]) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null. Raises CheckpointError."""
        if self._metrics is None:
            return
        data = memoryview((strict_json(entry) + "\n").encode())
        try:
            while data:
                data = data[os.write(self._metrics, data) :]
        except OSError as error:
            path = self.path / METRICS
            raise CheckpointError(f"{path}: cannot be written: {describe(error, path, len(data))}") from None

    def finish(self, summary: Summary) -> None:
        """Write `summary.json`. Raises CheckpointError."""
        if self._writes:
            _replace(self.path / SUMMARY, strict_json(asdict(summary), indent=2) + "\n")

    def check(self) -> None:
        """Raise CheckpointError when the directory is no longer ours alone. Reads a small file."""
        if self._lock is not None and not self._lock.mine():
            raise CheckpointError(
                f"output {self.path}: its lock file {lock.NAME} was removed or taken over by another job; "
                "this run ends, so that two do not write the same files"
            )

    def close(self) -> None:
        """Close the files and let other jobs in; further calls do nothing. A directory left empty is removed."""
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None
        if self._lock is not None:
            with suppress(OSError):  # a run that never began must not stand in the way of the next try
                if self._lock.mine():
                    self.checkpoints.rmdir()
            self._lock.release()
            with suppress(OSError):
                self.path.rmdir()

    def _claim(self, resume: bool, overwrite: bool) -> None:
        if self._tensorboard:
            require_tensorboard()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock.OutputLock(self.path)
            try:
                present = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(lock.NAME))
                if present and not (resume or overwrite):
                    shown = ", ".join(present[:4]) + (", …" if len(present) > 4 else "")
                    raise ConfigError(
                        f"output {self.path}: not empty ({shown}); continue that run with --resume, replace it with "
                        "--overwrite, or choose another run.output"
                    )
                if overwrite:
                    remove_results(self.path)
                for path in leftovers(self.path, ".*"):
                    path.unlink()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            kind = CheckpointError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else ConfigError
            reason = describe(error, self.path)
            if error.errno in (errno.EEXIST, errno.ENOTDIR):
                above = next((path for path in (self.path, *self.path.parents) if os.path.lexists(path)), self.path)
                reason = f"{above} is there and no directory"
            raise kind(f"output {self.path}: cannot be used: {reason}; see run.output") from None


def remove_results(directory: Path) -> None:
    """Remove what a run leaves behind in `directory`, and nothing else. Raises OSError."""
    for name in (RUN, METRICS, SUMMARY):
        (directory / name).unlink(missing_ok=True)
    checkpoints = directory / store.DIRECTORY
    if checkpoints.is_dir():
        ours = [path for path in checkpoints.iterdir() if store.NAME.fullmatch(path.name) and not path.is_dir()]
        for path in (*ours, *leftovers(checkpoints, store.NAME.pattern)):
            path.unlink()
    remove_logs(directory)
    events = directory / EVENTS
    if events.is_dir():
        for path in events.glob("events.out.tfevents.*"):
            path.unlink()


def versions(**more: str) -> dict[str, str]:
    """Versions of this program and of what it computes with; `more` (the MPI library, the driver) where not empty."""
    return _installed() | {name: value for name, value in more.items() if value}


@functools.cache
def _installed() -> dict[str, str]:
    found = {"distmlp": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON without the literals NaN and Infinity, which few parsers know: null stands for them."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):  # NumPy's scalars
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole lines of `metrics.jsonl` up to `step`: those after it will come again, a torn last one is dropped."""
    kept: list[str] = []
    if not path.is_file():  # what else may be there, a pipe for one, is for `_replace` to judge
        return kept
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
    return kept if step else []


def _replace(path: Path, text: str) -> None:
    data = text.encode()
    try:
        replace_file(path, [data])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {describe(error, path.parent, len(data))}") from None
