"""Where a run stands and what comes next: steps, epochs and the events between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distmlp.config import RunSection
from distmlp.interval import Interval


@dataclass(frozen=True)
class Timeline:
    """The steps of a run. Steps count from 0; "after step n" means that n steps are done."""

    batches_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, run: RunSection, batches_per_epoch: int) -> Timeline:
        return cls(batches_per_epoch, run.steps or run.epochs * batches_per_epoch)

    @property
    def epochs(self) -> float:
        return self.total_steps / self.batches_per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """`(epoch, batch within the epoch)` of `step`."""
        return divmod(step, self.batches_per_epoch)

    def next_event(self, step: int, log_every: int, intervals: Iterable[Interval]) -> int:
        """The first step count after `step` at which something may be due.

        Epoch ends, the end of the run, log points, and the intervals that count epochs or steps; a stretch
        of steps that ends here stays within one epoch.
        """
        ends = [self.total_steps, _next_multiple(step, self.batches_per_epoch), _next_multiple(step, log_every)]
        ends += [_next_multiple(step, every.steps) for every in intervals if every.steps]
        return min(ends)

    def due(self, every: Interval, step: int, seconds: float = 0.0) -> bool:
        """Whether `every` is due after `step`; `seconds` have passed since it last was."""
        if every.steps:
            return step % every.steps == 0
        if every.epochs:
            return step % (every.epochs * self.batches_per_epoch) == 0
        return seconds >= every.seconds


def _next_multiple(step: int, unit: int) -> int:
    return (step // unit + 1) * unit
