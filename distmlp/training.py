"""The training loop: a stretch of steps, then whatever is due: log, validate, save, stop."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from distmlp import output as outputs
from distmlp.checkpoint import Checkpoint
from distmlp.comm.signals import StopRequest
from distmlp.comm.watchdog import Watchdog
from distmlp.comm.world import World, open_world
from distmlp.config import RunConfig
from distmlp.engine import StepReport
from distmlp.errors import DataError, DistmlpError, DivergedError, StoppedError
from distmlp.interval import Interval
from distmlp.job import Job, open_job
from distmlp.metrics import MeanLoss, Reporter, Throughput
from distmlp.output import Summary
from distmlp.schedule import learning_rates
from distmlp.validation import Validation

_SKIPS_EXPLAINED = 10  # of a run: batches left out that are named one by one


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    world: World | None = None,
    report: bool = False,
) -> Summary:
    """Train a network as `config` says and leave the results in `config.run.output`.

    Call it on every rank of the job. `resume` continues from the newest good checkpoint, or starts anew where
    there is none; `overwrite` removes an earlier run's results; `report` prints progress on rank 0.
    Returns what `summary.json` holds. Raises DistmlpError: ConfigError, DataError, SystemUnfitError,
    DivergedError, StoppedError (a signal; a checkpoint was saved).
    """
    world = world or open_world(try_devices=True)
    reporter = Reporter(world, report)
    try:
        with (
            StopRequest() as stop,
            Watchdog(world, Interval.parse(config.run.stall_timeout).seconds, stop),
            open_job(
                config, world, resume=resume, overwrite=overwrite, reporter=reporter, stop=lambda: stop.requested
            ) as job,
        ):
            return Run(job).to_the_end()
    finally:
        reporter.close()


class Run:
    """A run under way. Every rank holds the same figures and takes the same decisions at the same step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.began = time.perf_counter()
        self.step, self.best, self.stale = job.start.step, job.start.best, job.start.stale_validations
        self.skipped = job.start.skipped
        self.skips_explained = 0
        self.validation: Validation | None = None
        if job.validation:
            self.validation = Validation(job.config, job.validation, job.world, job.reporter.warn)
        self.samples = self._samples_until(self.step)
        epoch = max(0, self.step - 1) // job.timeline.batches_per_epoch
        self.epoch_loss = MeanLoss(epoch, job.start.epoch_loss, job.start.epoch_weight)
        self.throughput = Throughput()
        self.validated: dict[str, float] | None = None
        self.validated_at = -1
        self.saved_at = -1
        self.saved_time = self.validated_time = self.began
        self.state = job.engine.state(job.start.state)  # as last seen on the host; takes the memory for snapshots now
        job.check_replicas(self.state)

    def to_the_end(self) -> Summary:
        job, run = self.job, self.job.config.run
        checkpoint_every, validate_every = Interval.parse(run.checkpoint_every), Interval.parse(run.validate_every)
        job.reporter.start(self.step, job.timeline.total_steps)
        status = "finished"
        if self.step >= job.timeline.total_steps:
            job.reporter.say(
                f"nothing left to do: all {job.timeline.total_steps} steps are done; raise run.epochs or "
                "run.steps to train on, or begin anew with --overwrite"
            )
        while self.step < job.timeline.total_steps:
            target = job.timeline.next_event(self.step, run.log_every, (checkpoint_every, validate_every))
            report, entry = self._advance(target)
            last = self.step == job.timeline.total_steps
            now = self._clock()
            if self.validation and (last or job.timeline.due(validate_every, self.step, now - self.validated_time)):
                entry |= self._validate()
            tired = 0 < run.early_stopping <= self.stale
            stopping = report.stopped and not last
            if last or tired or stopping or job.timeline.due(checkpoint_every, self.step, now - self.saved_time):
                self._save()
            self._log(entry)
            if tired:
                status = "early_stopped"
                break
            if stopping:
                summary = self._finish("stopped")
                raise StoppedError(
                    f"stopped by a signal after step {summary.steps}; the checkpoint is saved: continue with --resume"
                )
        if self.saved_at != self.step:
            self._save()
        return self._finish(status)

    def _advance(self, target: int) -> tuple[StepReport, dict[str, Any]]:
        """Train up to step `target` (or to where a signal stops it); the report and its log entry."""
        job, config = self.job, self.job.config
        epoch, first = job.timeline.position(self.step)
        rates = learning_rates(
            config.schedule, config.optimizer.learning_rate, self.step, target - self.step, job.timeline.total_steps
        )
        started = time.perf_counter()
        report = job.engine.train(epoch, first, rates)
        seconds = time.perf_counter() - started
        if report.nonfinite is not None:
            raise self._diverged(epoch, first + report.nonfinite)
        self.step += report.steps
        self.skipped += report.skipped
        self._warn_of_skipped(epoch, first, report)
        rows = self._samples_until(self.step) - self.samples
        self.samples += rows
        self.throughput.add(rows, seconds)
        self.epoch_loss.add(epoch, report.losses, report.weights)
        stretch = MeanLoss()
        stretch.add(0, report.losses, report.weights)
        return report, {
            "step": self.step,
            "epoch": epoch,
            "loss": stretch.value,
            "learning_rate": float(rates[max(report.steps - 1, 0)]),
            "samples_per_second": self.throughput.latest,
            "seconds": time.perf_counter() - self.began,
            "train_seconds": seconds,
            "data_wait_seconds": report.wait_seconds,
            "data_wait_share": report.wait_seconds / seconds if seconds > 0 else 0.0,
            "communication_seconds": report.communication_seconds,
        }

    def _validate(self) -> dict[str, float]:
        assert self.validation is not None
        try:
            self.validated = self.validation.measure(self.job.engine, self.step)
        except DistmlpError as error:
            if error.exit_code == DataError.exit_code and self.saved_at != self.step:
                self._save()  # the rows are bad: the training is sound
            raise
        self.validated_at, self.validated_time = self.step, self._clock()
        loss = self.validated["loss"]
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.stale = loss, 0
        else:
            self.stale += 1
        shown = ("loss", "accuracy", "rmse")
        return {f"validation_{name}": self.validated[name] for name in shown if name in self.validated}

    def _save(self) -> None:
        """Hand a checkpoint to the writer; the same weights on all ranks are a condition."""
        job = self.job
        job.world.agree(lambda: job.store.wait() if job.store else None, "saving")  # it reads the state saved before
        self.state = job.engine.state(self.state)
        job.check_replicas(self.state)
        epoch, step_in_epoch = job.timeline.position(self.step)
        checkpoint = Checkpoint(
            job.config,
            self.state,
            job.start.standardization,
            epoch=epoch,
            step=self.step,
            step_in_epoch=step_in_epoch,
            best=self.best,
            stale_validations=self.stale,
            validation=self.validated["loss"] if self.validated and self.validated_at == self.step else None,
            skipped=self.skipped,
            rows=job.shards.rows,
            epoch_loss=self.epoch_loss.total,
            epoch_weight=self.epoch_loss.weight,
            versions=outputs.versions(mpi=job.world.mpi_version),
            history=job.start.history,
        )
        job.world.agree(lambda: self._write(checkpoint), "saving")
        self.saved_at, self.saved_time = self.step, self._clock()

    def _write(self, checkpoint: Checkpoint) -> None:
        self.job.output.check()
        if self.job.store:
            self.job.store.save(checkpoint)

    def _log(self, entry: dict[str, Any]) -> None:
        job = self.job
        job.world.agree(lambda: self._record(entry), "writing results")
        if job.events:
            job.events.record(entry)
        job.reporter.exchange()
        job.reporter.log(entry)

    def _record(self, entry: dict[str, Any]) -> None:
        if self.job.store:
            self.job.store.check()  # a checkpoint that failed in the background must not stay unknown for hours
        self.job.output.record(entry)

    def _finish(self, status: str) -> Summary:
        """Wait for the last checkpoint to be on disk, then say how the run ended."""
        job = self.job
        job.world.agree(lambda: job.store.wait() if job.store else None, "saving")
        if self.validated is None and self.validation:
            self._validate()
        summary = Summary(
            status=status,
            steps=self.step,
            epochs=self.step / job.timeline.batches_per_epoch,
            samples=self.samples,
            ranks=job.world.size,
            hosts=list(job.world.hosts),
            engine=job.engine.name,
            transport=getattr(job.engine, "transport", "none" if job.world.size == 1 else "mpi"),
            precision=job.engine.precision,
            loss=self.epoch_loss.value,
            validation=self.validated,
            seconds=time.perf_counter() - self.began,
            samples_per_second=self.throughput.samples_per_second,
            weights_sha256=job.network.sha256(self.state.parameters),
            transfers=job.engine.transfers(),
            versions=outputs.versions(mpi=job.world.mpi_version),
            devices=getattr(job.engine, "devices", []),
            skipped=self.skipped,
        )
        if self.skipped:
            job.reporter.warn(f"{self.skipped} of {self.step} batches left out, as loss or gradient was not finite")
        job.world.agree(lambda: job.output.finish(summary), "summary")
        job.reporter.exchange()
        return summary

    def _diverged(self, epoch: int, batch: int) -> DivergedError:
        """A non-finite loss or gradient under the policy `stop`."""
        cause, advice = self._cause(epoch, batch)
        return DivergedError(
            f"{self._place(epoch, batch)}: loss or gradient is not finite: {cause}; {advice}, or leave such "
            "batches out with --set run.on_nonfinite=skip; nothing was updated, earlier checkpoints are intact"
        )

    def _warn_of_skipped(self, epoch: int, first: int, report: StepReport) -> None:
        """Name the batches that the policy `skip` left out, but do not fill a log with thousands of them."""
        for index in np.flatnonzero(np.isnan(report.losses)).tolist()[: _SKIPS_EXPLAINED - self.skips_explained]:
            cause, _ = self._cause(epoch, first + index)
            self.job.reporter.warn(
                f"{self._place(epoch, first + index)} left out: loss or gradient is not finite: {cause}"
            )
            self.skips_explained += 1

    def _place(self, epoch: int, batch: int) -> str:
        return f"step {epoch * self.job.timeline.batches_per_epoch + batch} (epoch {epoch}, batch {batch})"

    def _cause(self, epoch: int, batch: int) -> tuple[str, str]:
        """What is to blame for a non-finite loss or gradient, rows of the data or the training itself, and what to
        do about it. Collective."""
        job = self.job
        found = job.world.all_gather(job.world.agree(lambda: job.feed.blame(epoch, batch)))
        blamed = [f"rank {rank}: {where}" for rank, where in enumerate(found) if where]
        if blamed:
            return f"the data holds values that are not finite ({'; '.join(blamed)})", "mend those rows"
        rate = job.config.optimizer.learning_rate
        return (
            "the data of that batch is finite, so the training diverged",
            f"lower optimizer.learning_rate ({rate:g}) or set optimizer.clip_norm",
        )

    def _samples_until(self, step: int) -> int:
        """Rows trained on in the first `step` steps."""
        epochs, batches = self.job.timeline.position(step)
        return epochs * self.job.shards.rows + min(batches * self.job.config.data.batch, self.job.shards.rows)

    def _clock(self) -> float:
        """Rank 0's clock where a decision hangs on it: intervals in seconds must be due on all ranks at once."""
        run = self.job.config.run
        timed = any(Interval.parse(text).seconds for text in (run.checkpoint_every, run.validate_every))
        now = time.perf_counter()
        return self.job.world.broadcast(now) if timed else now
