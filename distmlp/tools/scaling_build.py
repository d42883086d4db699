"""From finished runs to the content of `report.json`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from distmlp.errors import DataError
from distmlp.tools.scaling_math import (
    Block,
    Measured,
    bus_bandwidth,
    derived_communication_us,
    efficiency,
    relative_error,
    speedup,
    time_split,
)
from distmlp.tools.scaling_model import AllReduce, fit, predict
from distmlp.tools.scaling_report import FORMAT, FORMAT_VERSION
from distmlp.tools.scaling_runs import FinishedRun, way_of

PREDICTED_RANKS = (8, 64, 512, 4096)
SPREAD_WARNED = 0.2  # (slowest - fastest) / median of a point's blocks
ERROR_WARNED = 0.1  # of the model at a measured point


def build_report(
    points: Iterable[tuple[str, FinishedRun]],
    exchanges: Sequence[AllReduce] = (),
    target_loss: float | None = None,
    notes: Sequence[str] = (),
    references: Sequence[FinishedRun] = (),
) -> dict[str, Any]:
    """The content of `report.json`: the measured points, the fitted model, its predictions.

    `points`: (mode, run), a one-rank run among those of each mode. `references`: more one-rank runs, over other
    batches, which are no points but tell compute from communication. Raises DataError for runs that do not
    belong together.
    """
    pairs = sorted(points, key=lambda pair: (pair[0] != "weak", pair[1].ranks))
    runs = list({id(run): run for _, run in pairs}.values())
    _check_alike([*runs, *references])
    base = next(run for run in runs if run.ranks == 1)
    gradient_bytes = 4 * base.network.parameter_count
    blocks = {id(run): run.blocks() for run in runs}
    raw = [_measured(mode, run, blocks[id(run)]) for mode, run in pairs]
    beside = [_measured("reference", run, run.blocks()) for run in references]
    measured, sources = _with_communication(raw, beside)
    table = [
        _point(point, source, run, blocks[id(run)], measured[0], gradient_bytes, target_loss)
        for point, source, (_, run) in zip(measured, sources, pairs, strict=True)
    ]
    used = [e for e in exchanges if e.way in {way_of(run) for run in runs if run.ranks > 1}]
    prediction = _prediction(measured, beside, base.batch, gradient_bytes, used)
    links = [bus_bandwidth(e.ranks, e.bytes, e.us) for e in exchanges]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": _device(runs),
        "hosts": sorted({host for run in runs for host in run.summary["hosts"]}),
        "versions": runs[-1].summary["versions"],
        "engine": base.summary["engine"],
        "transport": ", ".join(dict.fromkeys(run.summary["transport"] for run in runs if run.ranks > 1)) or "none",
        "precision": base.summary["precision"],
        "config": base.config.to_dict(),
        "parameters": base.network.parameter_count,
        "gradient_bytes": gradient_bytes,
        "baseline": f"the one-rank run of the {base.summary['engine']} engine in this sweep, "
        f"{measured[0].step_us:.4g} µs a step over {base.batch} rows",
        "points": table,
        "exchanges": [
            {"way": e.way, "ranks": e.ranks, "bytes": e.bytes, "us": e.us, "bytes_per_second": link}
            for e, link in zip(exchanges, links, strict=True)
        ],
        "link_bytes_per_second": max(links, default=None),
        **prediction,
        "target_loss": target_loss,
        "warnings": [
            *notes,
            *_warnings(runs, table),
            *_doubts(prediction["prediction_errors"]),
            *_slower(exchanges, gradient_bytes),
        ],
    }


def _prediction(
    measured: Sequence[Measured], beside: Sequence[Measured], batch: int, gradient_bytes: int,
    exchanges: Sequence[AllReduce],
) -> dict[str, Any]:  # fmt: skip
    """The fitted model, how far it is off at the measured points, and what it says of more ranks."""
    model = fit([*measured, *beside], gradient_bytes, exchanges)
    errors = []
    for point in measured:
        step_us = model.step_us(point.ranks, point.batch)
        place = {"mode": point.mode, "ranks": point.ranks, "measured_us": point.step_us, "predicted_us": step_us}
        errors.append(place | {"error": relative_error(step_us, point.step_us)})
    coefficients = {key: value for key, value in vars(model).items() if key not in ("per_byte_us", "gradient_bytes")}
    return {
        "model": coefficients | {"bandwidth_bytes_per_second": model.bandwidth_bytes_per_second},
        "predictions": [
            predict(model, mode, ranks, batch) | {"prediction": True}
            for mode in dict.fromkeys(point.mode for point in measured)
            for ranks in PREDICTED_RANKS
        ],
        "prediction_errors": errors,
        "held_out_error": _held_out_error(measured, beside, gradient_bytes, exchanges),
    }


def _check_alike(runs: Sequence[FinishedRun]) -> None:
    """The runs of one report differ in ranks and batch alone."""
    first = runs[0]
    for run in runs[1:]:
        for key in ("engine", "precision"):
            if run.summary[key] != first.summary[key]:
                raise DataError(
                    f"scaling: {key} {first.summary[key]} in {first.path}, {run.summary[key]} in {run.path}; "
                    "efficiency compares runs of one kind"
                )
        odd = [key for key in run.config.changes(first.config) if key.startswith("model.")]
        if odd:
            raise DataError(f"scaling: {', '.join(odd)} differ between {first.path} and {run.path}")


def _measured(mode: str, run: FinishedRun, blocks: Sequence[Block]) -> Measured:
    def median_us(part: str) -> float | None:
        values = [getattr(block, part) for block in blocks]
        known = [1e6 * value / block.steps for value, block in zip(values, blocks, strict=True) if value is not None]
        return float(np.median(known)) if known else None

    step_us = median_us("seconds")
    assert step_us is not None
    communication = median_us("communication_seconds")
    if run.ranks == 1:
        communication = 0.0
    elif not communication:
        communication = None  # inside the kernel: the host cannot tell it apart
    return Measured(
        mode, run.ranks, run.batch, step_us, communication, median_us("wait_seconds"), median_us("other_seconds")
    )


def _with_communication(
    points: Sequence[Measured], beside: Sequence[Measured]
) -> tuple[list[Measured], list[str | None]]:
    """Communication filled in from one-rank steps where it was not timed; and where each came from."""
    filled: list[Measured] = []
    sources: list[str | None] = []
    for point in points:
        if point.communication_us is not None:
            filled.append(point)
            sources.append("measured")
            continue
        derived = derived_communication_us(point, [*points, *beside])
        filled.append(Measured(**{**vars(point), "communication_us": derived}))
        sources.append(None if derived is None else "derived")
    return filled, sources


def _point(
    point: Measured, source: str | None, run: FinishedRun, blocks: Sequence[Block], baseline: Measured,
    gradient_bytes: int, target_loss: float | None,
) -> dict[str, Any]:  # fmt: skip
    times = [1e6 * block.seconds / block.steps for block in blocks]
    rate = None
    if point.ranks > 1 and point.communication_us:
        rate = bus_bandwidth(point.ranks, gradient_bytes, point.communication_us)
    return {
        "mode": point.mode,
        "ranks": point.ranks,
        "global_batch": point.batch,
        "hosts": len(run.summary["hosts"]),
        "transport": run.summary["transport"],
        "us_per_step_median": point.step_us,
        "us_per_step_min": min(times),
        "us_per_step_max": max(times),
        "blocks": len(blocks),
        "steps_per_block": blocks[0].steps,
        "samples_per_second": point.samples_per_second,
        "speedup": speedup(point, baseline),
        "efficiency": efficiency(point, baseline),
        "communication_share": _share(point.communication_us, point.step_us),
        "communication_source": source,
        "data_wait_share": _share(point.data_wait_us, point.step_us),
        "split_us": time_split(point),
        "all_reduce_bytes_per_second": rate,
        "seconds_to_target": None if target_loss is None else run.seconds_to(target_loss),
        "shared_gpus": _shared(run),
        "weights_sha256": run.summary["weights_sha256"],
    }


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None else part / whole


def _held_out_error(
    points: Sequence[Measured], beside: Sequence[Measured], gradient_bytes: int, exchanges: Sequence[AllReduce]
) -> float | None:
    """Largest relative error at the largest rank count of a model fitted without it; `None` below three counts."""
    counts = sorted({point.ranks for point in points})
    if len(counts) < 3:
        return None
    kept = [point for point in points if point.ranks < counts[-1]]
    model = fit([*kept, *beside], gradient_bytes, [e for e in exchanges if e.ranks < counts[-1]])
    errors = [relative_error(model.step_us(p.ranks, p.batch), p.step_us) for p in points if p.ranks == counts[-1]]
    return max(errors, key=abs)


def _gpus(run: FinishedRun) -> list[dict[str, Any]]:
    return run.summary.get("devices") or []


def _shared(run: FinishedRun) -> bool:
    uuids = [device["uuid"] for device in _gpus(run)]
    return len(set(uuids)) < len(uuids)


def _device(runs: Sequence[FinishedRun]) -> str:
    names = list(dict.fromkeys(device["name"] for run in runs for device in _gpus(run)))
    if names:
        return " + ".join(names)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return f"CPU {line.partition(':')[2].strip()}"
    return f"CPU {platform.machine()}"


def _warnings(runs: Sequence[FinishedRun], table: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    names = sorted({device["name"] for run in runs for device in _gpus(run)})
    if len(names) > 1:
        found.append(f"mixed GPU models: {', '.join(names)}; the slowest sets the pace, efficiency is not comparable")
    for run in runs:
        if _shared(run):
            count = len({device["uuid"] for device in _gpus(run)})
            found.append(f"{run.ranks} ranks shared {count} GPU(s): their speed is not that of one GPU a rank")
        if run.mean_batch < 0.95 * run.batch:
            found.append(
                f"{run.ranks} ranks, global batch {run.batch}: batches had {run.mean_batch:.0f} rows on average, for "
                "the last of an epoch is short; use more rows or a smaller batch"
            )
    for point in table:
        spread = (point["us_per_step_max"] - point["us_per_step_min"]) / point["us_per_step_median"]
        if spread > SPREAD_WARNED:
            ranks = f"{point['ranks']} rank{'s' * (point['ranks'] > 1)}"
            found.append(f"{point['mode']}, {ranks}: the blocks spread by {spread:.0%} of their median")
    return list(dict.fromkeys(found))


def _slower(exchanges: Sequence[AllReduce], gradient_bytes: int) -> list[str]:
    """MPI on GPU memory that is slower than host memory at about the gradient's size, as where the library copies to
    the host to add."""
    sizes = {e.bytes for e in exchanges}
    size = min(sizes, key=lambda other: abs(np.log(other / gradient_bytes)), default=0)
    host = {e.ranks: e.us for e in exchanges if e.way == "host" and e.bytes == size}
    return [
        f"MPI's all-reduce of {size:,} bytes over {e.ranks} ranks takes {e.us:.0f} µs in GPU memory, "
        f"{host[e.ranks]:.0f} µs in host memory: compare --set run.transport=staged"
        for e in exchanges
        if e.way == "device MPI" and e.bytes == size and e.us > host.get(e.ranks, e.us)
    ]


def _doubts(errors: Sequence[dict[str, Any]]) -> list[str]:
    worst = max((abs(point["error"]) for point in errors), default=0.0)
    if worst <= ERROR_WARNED:
        return []
    return [f"the model misses a measured point by {worst:.0%}: take its predictions for a rough guess"]
