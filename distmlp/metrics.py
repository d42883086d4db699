"""What a run says while it goes: progress for people, throughput that can be believed, warnings of all ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.hints import is_terminal

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.rank_log import RankLog


STARVED = 0.05  # of the time spent waiting for data: from there on it is told


class Throughput:
    """Rows trained a second, from stretches of training alone.

    The first stretch holds warm-up and compilation and counts only while it is the only one; validation,
    saving and start-up never count.
    """

    def __init__(self) -> None:
        self.warmup_seconds = 0.0
        self._first: tuple[int, float] | None = None
        self._rows, self._seconds = 0, 0.0
        self.latest: float | None = None  # rows a second in the last stretch

    def add(self, rows: int, seconds: float) -> None:
        """Count a stretch of training: `rows` of all ranks in `seconds` of wall time, device work included."""
        self.latest = rows / seconds if seconds > 0 else None
        if self._first is None:
            self._first, self.warmup_seconds = (rows, seconds), seconds
        else:
            self._rows += rows
            self._seconds += seconds

    @property
    def samples_per_second(self) -> float | None:
        rows, seconds = (self._rows, self._seconds) if self._seconds > 0 else self._first or (0, 0.0)
        return rows / seconds if seconds > 0 else None


class MeanLoss:
    """Mean loss over the rows of an epoch, weighted as the batches are. Begins anew with each epoch."""

    def __init__(self, epoch: int = 0, total: float = 0.0, weight: float = 0.0) -> None:
        self.epoch, self.total, self.weight = epoch, total, weight

    def add(self, epoch: int, losses: NDArray, weights: NDArray) -> None:
        """Count batches of `epoch`: mean losses (steps,) and weights (steps,); NaN marks a batch left out."""
        if epoch != self.epoch:
            self.epoch, self.total, self.weight = epoch, 0.0, 0.0
        done = np.isfinite(losses)
        for loss, weight in zip(losses[done].tolist(), weights[done].tolist(), strict=True):
            self.total += loss * weight  # one by one: the sum must not depend on where a run was interrupted
            self.weight += weight

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight > 0 else None


class Reporter:
    """Prints on rank 0: a progress bar on a terminal, elsewhere one plain line per call of `log`.

    Build it on every rank. Warnings of Python and of `warn` are gathered from all ranks by `exchange`, which
    every rank calls at the same point. `enabled` False: silent, for library use.
    """

    def __init__(self, world: World, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._world = world
        self._stream = (stream or sys.stdout) if enabled and world.rank == 0 else None
        self._progress: Any = None
        self._task: Any = None
        self._total = 0
        self._pending: list[str] = []
        self._told: set[str] = set()
        self._own: RankLog | None = None
        self._showwarning = warnings.showwarning
        if enabled:
            warnings.showwarning = self._take_warning

    def keep(self, own: RankLog) -> None:
        """Write what this rank says, does and warns of to a log of its own too, which `close` closes."""
        self._own = own

    def say(self, text: str) -> None:
        """One line or several, now."""
        if self._own:
            self._own.write(text)
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(text)

    def start(self, first: int, total: int) -> None:
        """Training goes from step `first` to `total`."""
        self._total = total
        if self._stream is None or not is_terminal(self._stream):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=self._stream)
        if console.is_dumb_terminal:
            return
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}"),
            TextColumn("left"), TimeRemainingColumn(), console=console, refresh_per_second=4,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=first, figures="")
        self._progress.start()

    def log(self, entry: dict[str, Any]) -> None:
        """Report the figures of a log point: the keys of a line of `metrics.jsonl`."""
        if self._own:
            self._own.write(f"step {entry['step']}  epoch {entry['epoch']}  {_figures(entry, [*_SHOWN, *_OF_RANK])}")
            if self._own.broken:
                self._pending.append(self._own.broken)
                self._own = None
        if self._progress is None:
            waiting = f"  {entry['data_wait_share']:.0%} waiting for data" if _starved(entry) else ""
            self._write(
                f"step {entry['step']}/{self._total}  epoch {entry['epoch']}  {_figures(entry, _SHOWN)}{waiting}"
            )
            return
        self._progress.update(self._task, completed=entry["step"], figures=_figures(entry, _SHOWN_IN_BAR))
        if any(key.startswith("validation_") for key in entry):
            self.say(f"step {entry['step']}  epoch {entry['epoch']}  {_figures(entry, _SHOWN)}")

    def warn(self, text: str) -> None:
        """Keep a warning of this rank until the next `exchange`."""
        self._pending.append(text)
        if self._own:
            self._own.write(f"warning: {text}")

    def exchange(self) -> None:
        """Print what any rank warned of since the last call: once, with the ranks that said it. Collective."""
        by_rank = self._world.all_gather(self._pending)
        self._pending = []
        for text in dict.fromkeys(text for texts in by_rank for text in texts):
            if text not in self._told:
                self._told.add(text)
                ranks = [rank for rank, texts in enumerate(by_rank) if text in texts]
                self.say(f"warning: {text}{_tag(ranks, self._world.size)}")

    def close(self) -> None:
        """End the progress bar; print what was not exchanged; give Python's warnings back. Not collective."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if warnings.showwarning == self._take_warning:
            warnings.showwarning = self._showwarning
        for text in dict.fromkeys(self._pending):
            if text not in self._told:
                print(f"warning: {text}{_tag([self._world.rank], self._world.size)}", file=sys.stderr, flush=True)
        self._pending = []
        if self._own:
            self._own.close()

    def _take_warning(self, message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        self.warn(f"{category.__name__}: {message}")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):  # the reader has gone (`| head`): no reason to end a run of days
            self._stream = None


_SHOWN = {
    "loss": "loss {:.6g}", "learning_rate": "lr {:.3g}", "samples_per_second": "{:,.0f} samples/s",
    "validation_loss": "validation loss {:.6g}", "validation_accuracy": "accuracy {:.4f}",
    "validation_rmse": "rmse {:.6g}",
}  # fmt: skip


_OF_RANK = {
    "train_seconds": "{:.3f} s training", "data_wait_seconds": "{:.3f} s waiting for data",
    "communication_seconds": "{:.3f} s communication",
}  # fmt: skip
_SHOWN_IN_BAR = ("loss", "samples_per_second")


def _starved(entry: dict[str, Any]) -> bool:
    return entry.get("data_wait_share", 0.0) >= STARVED


def _figures(entry: dict[str, Any], keys: Iterable[str]) -> str:
    return "  ".join((_SHOWN | _OF_RANK)[key].format(entry[key]) for key in keys if entry.get(key) is not None)


def _tag(ranks: Sequence[int], size: int) -> str:
    if size == 1:
        return ""
    if len(ranks) == size:
        return " [all ranks]"
    return f" [rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}]"
