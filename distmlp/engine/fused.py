"""The fused engine: whole training steps in one kernel launch, everything they need kept on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.config import RunConfig
from distmlp.engine import Evaluation, Standardization, State, StepReport, layout, tally
from distmlp.engine.affine import Affine
from distmlp.engine.backprop import Layers
from distmlp.engine.device_memory import Ledger, pinned
from distmlp.engine.device_rows import OwnRows, ResidentRows
from distmlp.engine.fused_setup import Placed, empty_sample, make_task, place_rows
from distmlp.engine.fused_state import DeviceState, check_capability, describe_device
from distmlp.engine.host_sums import open_hosts
from distmlp.engine.lane_plan import LanePlan
from distmlp.engine.peers import PeerSum, open_peers
from distmlp.engine.plan import MAX_STEPS, Plan, make_plan
from distmlp.engine.plan_task import Device
from distmlp.engine.reduction import Reduction, open_reduction
from distmlp.engine.rows import RowPasses
from distmlp.errors import DistmlpError
from distmlp.network import Network

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.data.feed import Feed

NO_ROWS = (np.uint64(0),) * 5
LAUNCH_SECONDS = 0.25  # a launch should not take longer: stop requests are looked at between launches


class FusedEngine:
    """`Engine` on one GPU a rank. `feed` may be None for an engine that only predicts and evaluates.

    `kernel` is as for `make_plan`, and `poison` fills fresh device memory with that byte: both for tests.
    """

    name = "fused"
    transport = "none"  # how gradients are reduced; set by `connect`
    devices: list[dict[str, Any]]  # of all ranks: rank, host, name, uuid; set by `open_engine`

    def __init__(
        self,
        config: RunConfig,
        network: Network,
        world: World,
        feed: Feed | None,
        standardization: Standardization,
        stop: Callable[[], bool] = lambda: False,
        kernel: str = "auto",
        poison: int | None = None,
    ) -> None:
        self._config, self._network, self._world, self._feed, self._stop = config, network, world, feed, stop
        device = Device(*describe_device())
        check_capability(device.capability, device.name)
        self._ledger = Ledger(cupy.cuda.Stream(non_blocking=True))
        sample = None if feed is None else empty_sample(feed)
        self._lanes = None
        if feed is not None and config.run.reproducible == "ranks":
            self._lanes = LanePlan(feed.order.streams, world.size, world.rank)
        task = make_task(config, network, feed.order if feed else None, sample, self._lanes, world.size)
        self.plan: Plan = make_plan(task, device, kernel)
        self.precision: str = config.run.precision if device.has_tensor_cores else "fp32"
        self._state = DeviceState(config, self.plan, standardization, self._ledger, poison)
        if self._lanes:
            self._state.use_lanes(self._lanes)
        self._own: OwnRows | None = None
        self._rows: Placed | None = None
        if feed is not None and sample is not None:
            self._own, targets = OwnRows(feed.order, feed.streams), Affine(standardization.targets, np.float32)
            self._rows = place_rows(
                config.data.residence, feed, self._own, sample, targets, network, device, self._ledger
            )  # fmt: skip
        self._reduction: Reduction | None = None
        self._peers: PeerSum | None = None
        self._uneven = False  # ranks may have to take different numbers of steps a launch
        self._seconds = 0.0  # a step of the last launch
        self._before = pinned(layout.STEP_RESULT.itemsize).view(layout.STEP_RESULT)  # what came of the step before
        self._table = pinned(MAX_STEPS * layout.STEP_INFO.itemsize).view(layout.STEP_INFO)
        self._came = pinned(MAX_STEPS * layout.STEP_RESULT.itemsize).view(layout.STEP_RESULT)
        self._there = cupy.cuda.Event(disable_timing=True)  # recorded behind the copy to `_came`
        if self._lanes and world.size == 1:
            self._reduction, _ = open_reduction("none", self._state, world)
        self._passes = _DevicePasses(self._state, config, network, standardization)
        self._launch_steps = 16
        self.reason = f"GPU {device.name}, {self.plan.kernel} kernel, {self.precision} products"
        if self._rows is not None:
            self.reason += f", {self._rows.about}"

    def connect(self, transport: str, between: str = "staged") -> str:
        """Join the ranks' gradients by `transport` (not "none"); a few words on how. Collective, before `train`.

        `between`: how `peer` goes on from host to host, "mpi" or "staged".
        Raises AgreedError, on every rank, where that does not work after all.
        """
        if transport == "peer" and len(self._world.hosts) > 1:
            self._reduction, note = open_hosts(self._state, self._world, between, self._config.run.stall_timeout)
        elif transport == "peer":
            self._peers, note = open_peers(self._state, self._world, self._config.run.stall_timeout)
            if self._state.plan.kernel != self.plan.kernel:
                note += f", {self._state.plan.kernel} kernel"
            self.plan = self._state.plan
            self._uneven = not all(self._world.all_gather(isinstance(self._rows, ResidentRows)))
        else:
            self._reduction, note = open_reduction(transport, self._state, self._world)
        self.transport = transport
        return note

    def load(self, state: State) -> None:
        self._state.load(state)

    def state(self, spare: State | None = None) -> State:
        return self._state.state(spare)

    def train(self, epoch: int, first: int, rates: NDArray) -> StepReport:
        feed, rows = self._feed, self._rows
        assert feed is not None, "this engine was opened without data"
        assert rows is not None
        assert self._reduction or self._peers or self._world.size == 1, "connect() comes first"
        waited = feed.wait_seconds
        communicated = self._communicated
        self._state.prepare_training()
        report = StepReport(np.empty(0), np.empty(0))
        parts: list[NDArray] = []
        train = self._train_reduced if self._reduction else self._train_peers if self._peers else self._train_alone
        done = 0
        while done < len(rates) and report.nonfinite is None and not report.stopped:
            count = self._steps_at_once(rows, epoch, first + done, len(rates) - done)
            results, report.stopped = train(rows, epoch, first + done, rates[done : done + count])
            bad = np.flatnonzero(results["status"] == layout.NOT_FINITE)
            if len(bad):
                report.nonfinite, report.stopped = done + int(bad[0]), False
                results = results[: bad[0]]
                self._state.thaw()
            parts.append(results)
            done += len(results)
        self._ledger.steps += done
        _fill(report, parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, layout.STEP_RESULT), *parts]))
        report.wait_seconds = feed.wait_seconds - waited
        report.communication_seconds = self._communicated - communicated
        return report

    @property
    def _communicated(self) -> float:
        joined = self._reduction or self._peers
        return joined.seconds if joined else 0.0

    def _steps_at_once(self, rows: Placed, epoch: int, first: int, left: int) -> int:
        if self._reduction:
            return MAX_STEPS // (self._lanes.most if self._lanes else 1)
        most = min(left, self._launch_steps, MAX_STEPS)
        if not self._peers:
            return most
        count = rows.steps_at_once(epoch, first, most)
        return min(self._world.all_gather(count)) if self._uneven else count

    def _train_alone(self, rows: Placed, epoch: int, first: int, rates: NDArray) -> tuple[NDArray, bool]:
        """All steps, or the first of them; their results and whether to stop.

        Where rows are streamed these are several launches, each queued while the one before it runs: the GPU never
        waits for the host between them.
        """
        started, done = perf_counter(), 0
        while done < len(rates) and not (done and self._stop()):
            count = rows.steps_at_once(epoch, first + done, len(rates) - done)
            try:
                place, firsts = rows.prepare(epoch, range(first + done, first + done + count))
            except DistmlpError:
                if not done:
                    raise
                break  # what has been queued counts; the next call comes to it again
            self._put_steps(first + done, rates[done : done + count], firsts, done)
            self._state.train_steps(place.arguments, done, done + count, False)
            rows.launched()
            done += count
        self._queue_results(done)
        rows.meanwhile()
        results = self._results(done)
        self._pace((perf_counter() - started) / done)
        return results, self._stop()

    def _pace(self, seconds: float) -> None:
        """Choose how many steps the next launch takes, from the `seconds` a step takes."""
        self._launch_steps = int(min(max(LAUNCH_SECONDS / seconds, 1), MAX_STEPS))

    def _train_peers(self, rows: Placed, epoch: int, first: int, rates: NDArray) -> tuple[NDArray, bool]:
        """As `_train_alone`; the kernels of all ranks exchange gradients and votes every step."""
        peers, world = self._peers, self._world
        assert peers is not None
        started, fault = perf_counter(), None
        arguments: tuple[np.uint64, ...] = NO_ROWS
        try:
            place, firsts = rows.prepare(epoch, range(first, first + len(rates)))
            arguments = place.arguments
        except DistmlpError as error:  # the others' kernels must hear of it: take part without rows
            fault, firsts = error, np.zeros(len(rates), np.int64)
        self._put_steps(first, rates, firsts, own=fault is None)
        peers.vote(self._stop(), fault is not None, self._seconds)
        self._state.train_steps(arguments, 0, len(rates), False)
        if fault is None:
            rows.launched()
        peers.start_outcome()
        self._queue_results(len(rates))
        if fault is None:
            rows.meanwhile()
        with world.inside("all_reduce"):
            results = self._results(len(rates))
        stop, failed, seconds = peers.end_outcome()
        if failed:
            world.agree(partial(_raise, fault), f"batches {first} to {first + len(rates) - 1} of epoch {epoch}")
        self._seconds = (perf_counter() - started) / len(rates)
        if seconds:  # the same number everywhere: all ranks must take the same steps a launch
            self._pace(seconds / world.size)
        return results, bool(stop)

    def _train_reduced(self, rows: Placed, epoch: int, first: int, rates: NDArray) -> tuple[NDArray, bool]:
        """As `_train_alone`, with the ranks' gradients summed after every launch.

        A launch begins with the update of the step before; one more launch does the last update.
        """
        reduction, world = self._reduction, self._world
        assert reduction is not None
        each = self._lanes.count if self._lanes else 1  # entries of the step table
        ahead = isinstance(rows, ResidentRows)  # reading cannot fail: one upload for all steps
        if ahead:
            place, firsts = rows.prepare(epoch, range(first, first + len(rates)))
            self._put_steps(first, rates, firsts)
        done = 0
        while done < len(rates):
            number, fault = first + done, None
            try:
                if not ahead:
                    place, firsts = rows.prepare(epoch, range(number, number + 1))
                    self._put_steps(number, rates[done : done + 1], firsts, done)
                self._state.train_steps(place.arguments, done * each, (done + 1) * each, done > 0)
                rows.launched()
            except DistmlpError as error:
                fault = error
            if done:  # there once the sums are: looking before them would leave ranks behind that failed just now
                before = self._state.arena.address("results") + (done * each - 1) * layout.STEP_RESULT.itemsize
                self._ledger.start_download(before, self._before)
            reduction.reduce(self._stop(), fault is not None)
            if reduction.tally[tally.FAILED]:
                world.agree(partial(_raise, fault), f"batch {number} of epoch {epoch}")
            if done and self._before["status"][0] == layout.NOT_FINITE:
                self._queue_results(done)
                return self._results(done), False  # every rank saw the same sums
            done += 1
            if reduction.tally[tally.STOP]:
                break
        stopped = bool(reduction.tally[tally.STOP])
        self._state.train_steps(NO_ROWS, done * each, done * each, True)
        self._queue_results(done)
        return self._results(done), stopped

    def _put_steps(self, first: int, rates: NDArray, firsts: NDArray, at: int = 0, own: bool = True) -> None:
        """Rates and row ranges of batches `first`, … to the step table from entry `at` on; no rows unless `own`."""
        assert self._own is not None
        bounds, each = self._own.bounds(first, len(rates)), 1
        counts = np.diff(bounds)
        if self._lanes:
            firsts, counts = self._lanes.split(bounds, firsts)
            each = self._lanes.count
        table = self._table[at * each : at * each + len(counts)]  # every launch of a call has its own part
        table["rate"], table["first"], table["rows"] = np.repeat(rates, each), firsts, counts if own else 0
        self._ledger.upload(self._state.arena.address("steps") + at * each * layout.STEP_INFO.itemsize, table)

    def _queue_results(self, count: int) -> None:
        """Have what came of the first `count` steps of this call copied behind all that is queued."""
        each = self._lanes.count if self._lanes else 1
        self._ledger.start_download(self._state.arena.address("results"), self._came[: count * each])
        self._there.record(self._ledger.stream)

    def _results(self, count: int) -> NDArray:
        """What `_queue_results` has asked for, once it is there."""
        self._there.synchronize()
        each = self._lanes.count if self._lanes else 1  # the last entry of a step is that of the update
        return self._came[each - 1 : count * each : each].copy()

    def predict(self, inputs: NDArray) -> NDArray:
        return self._passes.predict([], inputs)

    def evaluate(self, inputs: NDArray, targets: NDArray, weights: NDArray | None) -> Evaluation:
        return self._passes.evaluate([], inputs, targets, weights)

    def transfers(self) -> dict[str, int]:
        return self._ledger.as_dict()

    def close(self) -> None:
        """Give back all of the GPU's memory: an MPI that knows of it must not find it gone when it ends."""
        self._ledger.stream.synchronize()
        for joined in (self._reduction, self._peers):
            if joined:
                joined.close()
        self._rows = self._reduction = self._peers = None
        self._before, self._table, self._came = self._before.copy(), self._table.copy(), self._came.copy()
        self._state.arena.free()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


class _DevicePasses(RowPasses):
    """Predictions and metrics as the reference engine takes them, from outputs computed on the device."""

    def __init__(
        self, state: DeviceState, config: RunConfig, network: Network, standardization: Standardization
    ) -> None:
        super().__init__(config.model, network, standardization, np.float32, 0)
        self._state = state
        self._source = "ema" if config.run.ema_decay else "parameters"

    def _forward(self, layers: Layers, inputs: NDArray) -> NDArray:
        return self._state.forward(np.ascontiguousarray(inputs, np.float32), self._source)


def _fill(report: StepReport, results: NDArray) -> None:
    weights = results["weight"].astype(np.float64)
    left_out = results["status"] == layout.LEFT_OUT
    losses = results["loss"] / np.where(weights == 0, 1.0, weights)
    report.losses, report.weights = np.where(left_out, np.nan, losses), weights
    report.skipped = int(left_out.sum())


def _raise(fault: DistmlpError | None) -> None:
    if fault is not None:
        raise fault
