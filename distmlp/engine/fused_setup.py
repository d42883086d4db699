"""What the fused engine settles when it opens: the task that kernels are planned for, and where the rows will lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cupy

from distmlp.config import RunConfig
from distmlp.engine.affine import Affine
from distmlp.engine.device_memory import Ledger
from distmlp.engine.device_rows import INDEX_ROWS, OwnRows, ResidentRows, StreamedRows, fits_device, raw_type
from distmlp.engine.device_windows import WindowRows
from distmlp.engine.lane_plan import LanePlan
from distmlp.engine.optimizers import needs_norm, slot_names
from distmlp.engine.plan import MAX_STEPS
from distmlp.engine.plan_task import Device, Task
from distmlp.errors import SystemUnfitError
from distmlp.network import Network
from distmlp.order import Order, owned_streams

if TYPE_CHECKING:
    from distmlp.data.feed import Feed
    from distmlp.data.rows import Rows

Placed = ResidentRows | StreamedRows | WindowRows


def make_task(
    config: RunConfig, network: Network, order: Order | None, sample: Rows | None, lanes: LanePlan | None, ranks: int
) -> Task:
    """The same on every rank, or their updates might be compiled differently. `order` None: nothing is trained."""
    return Task(
        network,
        1 if order is None else _rows_a_step(order, lanes, ranks),
        config.run.precision,
        config.model.loss,
        sample is not None and sample.targets.ndim == 1,
        sample is not None and sample.weights is not None,
        slot_names(config.optimizer.name),
        config.run.ema_decay > 0,
        2 if lanes else ranks,  # what lanes do must not depend on the ranks
        "f4" if sample is None else raw_type(sample),
        needs_norm(config.optimizer),
        lanes.rows if lanes else 0,
    )


def _rows_a_step(order: Order, lanes: LanePlan | None, ranks: int) -> int:
    """Most rows that a kernel takes as one step on any rank: the first has the most."""
    if lanes is None:
        return OwnRows(order, owned_streams(order.streams, ranks, 0)).largest_batch
    if lanes.most > MAX_STEPS:
        raise SystemUnfitError(
            f"run.reproducible = ranks takes up to {MAX_STEPS:,} streams a rank on a GPU, and these are "
            f"{lanes.most:,}; set data.streams to less"
        )
    return -(-min(order.batch, order.rows) // order.streams)


def empty_sample(feed: Feed) -> Rows:
    """No rows, but of the types that all have."""
    shards = getattr(feed, "shards", None)
    return feed.resident().map(lambda array: array[:0]) if shards is None else shards.empty(0)


def place_rows(
    wanted: str, feed: Feed, own: OwnRows, sample: Rows, targets: Affine, network: Network, device: Device,
    ledger: Ledger,
) -> Placed:  # fmt: skip
    """The rows on the device, if they fit and `wanted` (data.residence) does not forbid it; else streamed."""
    needed = ResidentRows.bytes_needed(feed, own, network.outputs)
    fits = own.count < INDEX_ROWS and fits_device(needed)
    if wanted == "device" and not fits:
        raise SystemUnfitError(
            f'data.residence = "device": this rank\'s rows need {needed:,} bytes, and GPU {device.name} has '
            f'{cupy.cuda.runtime.memGetInfo()[0]:,} free; use "auto", "host" or "stream"'
        )
    if wanted in ("auto", "device") and fits:
        return ResidentRows(feed, targets, own, ledger, device.capability)
    if hasattr(feed, "windows"):
        on_host, on_device = WindowRows.bytes_needed(feed, own, network.outputs)
        if feed.fits_memory(on_host) and fits_device(on_device):
            return WindowRows(feed, targets, own, ledger, device.capability)
    return StreamedRows(feed, sample, targets, own, ledger)
