"""`distmlp scaling`: train at several rank counts, or read finished runs, and report how well it scales."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distmlp.comm.hints import read_launch
from distmlp.config import RunConfig
from distmlp.errors import ConfigError
from distmlp.tools.launcher import launch_command
from distmlp.tools.scaling_build import build_report
from distmlp.tools.scaling_report import require_packages, write_report
from distmlp.tools.scaling_runs import FinishedRun, modes_of
from distmlp.tools.scaling_sweep import BLOCKS, NEVER, ChildFailed, Findings, Sweep, child_environment, cores, timed

MODES = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}


def run_scaling(
    run: Path | None,
    ranks: str,
    mode: str,
    out: Path,
    *,
    from_: Sequence[Path] = (),
    set_: Sequence[str] = (),
    launcher: str = "",
    steps: int = 0,
    target_loss: float | None = None,
) -> int:
    """Sweep over `ranks` ("1,2,4") and write the report to `out`; or report on the finished runs `from_`.

    `mode`: weak keeps the batch per rank, strong the global batch, both does both. `set_`: overrides for every
    run. `launcher`: a launch line instead of the one found. `steps`: steps of a point, warm-up included (0: as many
    as give blocks of about 0.3 s). `target_loss`: the runs go their configured length, and the report says when
    each first reached this loss. Returns 0. Raises DistmlpError; a point that fails ends the sweep, with a report on
    those before it where there are any.
    """
    require_packages()
    if target_loss is not None and not math.isfinite(target_loss):
        raise ConfigError(f"scaling --target-loss {target_loss}: expected a finite number")
    if from_:
        report = build_report(modes_of([FinishedRun.read(path) for path in from_]), target_loss=target_loss)
        return _conclude(report, out)
    if run is None:
        raise ConfigError("scaling: give a RUN.toml, or finished runs with --from")
    if mode not in MODES:
        raise ConfigError(f"scaling --mode {mode}: expected weak, strong or both")
    if (launch := read_launch()) is not None and launch.live:
        raise ConfigError(f"scaling starts its ranks itself; run it without {launch.launcher}")
    RunConfig.load(run, set_)  # its faults are the user's, and to be told before anything runs
    counts = _counts(ranks)
    if max(counts) > 1 or launcher:
        launch_command(max(counts), launcher)  # likewise
    sweep = Sweep(
        run.absolute(), tuple(set_), launcher, (out / "runs").absolute(), child_environment(max(counts)),
        _length(steps, target_loss),
    )  # fmt: skip
    return _sweep(sweep, counts, MODES[mode], out, target_loss)


def _sweep(sweep: Sweep, counts: Sequence[int], modes: Sequence[str], out: Path, target_loss: float | None) -> int:
    found = Findings(notes=_thread_notes(sweep.environment, max(counts)))
    data = sweep.config.data
    try:
        alone = sweep.train("ranks-1", 1, data.batch, max(data.streams, *counts))
        tell("ranks-1", alone)
        found.run_points(sweep, counts, modes, alone, tell)
    except ChildFailed as failure:
        if found.points:
            print(f"the sweep ended early; the report in {out} holds the points before that")
            found.notes.insert(0, f"ended early: {failure}")
            _conclude(build_report(found.points, found.exchanges, target_loss, found.notes, found.references), out)
        raise
    return _conclude(build_report(found.points, found.exchanges, target_loss, found.notes, found.references), out)


def _conclude(report: dict, out: Path) -> int:
    write_report(report, out)
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    print(f"wrote {out / 'report.json'}, report.html, speedup.png, speedup.svg")
    return 0


def tell(name: str, run: FinishedRun) -> None:
    """Print how fast a point was."""
    blocks = run.blocks()
    times = [1e6 * block.seconds / block.steps for block in blocks]
    print(
        f"{name}: {np.median(times):,.1f} µs a step ({min(times):,.1f} to {max(times):,.1f} in {len(blocks)} blocks "
        f"of {blocks[0].steps})",
        flush=True,
    )


def _counts(text: str) -> list[int]:
    """Rank counts, ascending, the one-rank baseline always among them."""
    if not re.fullmatch(r"[1-9]\d{0,6}(\s*,\s*[1-9]\d{0,6})*", text.strip()):
        raise ConfigError(f"scaling --ranks {text}: expected rank counts such as 1,2,4")
    return sorted({1, *map(int, text.split(","))})


def _length(steps: int, target_loss: float | None) -> tuple[str, ...]:
    """The --set words that give every run its length; none where it is to be found."""
    if target_loss is not None:  # to the end as configured, or the target would be missed
        return (f"run.checkpoint_every={NEVER}", "run.tensorboard=false")
    if not steps:
        return ()
    block = steps // (BLOCKS + 1)
    if block < 1:
        raise ConfigError(f"scaling --steps {steps}: expected at least {BLOCKS + 1}: {BLOCKS} blocks and a warm-up")
    return timed(block, BLOCKS + 1)


def _thread_notes(environment: dict[str, str], most: int) -> list[str]:
    if "SLURM_JOB_ID" in environment or most <= cores():
        return []
    return [f"{most} ranks were to share {cores()} cores: beyond {cores()} ranks the CPU itself limits speed-up"]
