"""Finished runs, as a scaling report reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distmlp.config import RunConfig
from distmlp.errors import DataError
from distmlp.network import Network
from distmlp.tools.scaling_math import Block, time_blocks


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind."""

    path: Path
    config: RunConfig
    summary: dict[str, Any]
    lines: list[dict[str, Any]]  # of metrics.jsonl

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Raises DataError naming the file that is missing or damaged."""
        try:
            config = RunConfig.from_toml((path / "run.toml").read_text(encoding="utf-8"), str(path / "run.toml"))
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
            text = (path / "metrics.jsonl").read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines()]
        except OSError as error:
            raise DataError(
                f"run {path}: {error.filename}: {error.strerror}; give the output directory of a finished run"
            ) from None
        except ValueError as error:
            raise DataError(f"run {path}: damaged: {error}") from None
        return cls(path, config, summary, lines)

    @property
    def ranks(self) -> int:
        return self.summary["ranks"]

    @property
    def batch(self) -> int:
        return self.config.data.batch

    @property
    def mean_batch(self) -> float:
        """Rows of a batch, short last batches included."""
        return self.summary["samples"] / max(1, self.summary["steps"])

    @property
    def network(self) -> Network:
        model = self.config.model
        return Network.build(model.layers, model.activation, model.output_activation)

    def blocks(self) -> list[Block]:
        """Timed blocks; what came before the first log point, warm-up and compilation, is none. Raises DataError."""
        blocks = time_blocks(self.lines, self.config.run.log_every)
        if not blocks:
            raise DataError(
                f"run {self.path}: {len(self.lines)} lines in metrics.jsonl are too few to time a step; it takes two "
                f"log points or more: raise run.steps or lower run.log_every (now {self.config.run.log_every})"
            )
        return blocks

    def seconds_to(self, target: float) -> float | None:
        """When the validation loss (the training loss, where none was measured) first reached `target`."""
        key = "validation_loss" if any("validation_loss" in line for line in self.lines) else "loss"
        return next((line["seconds"] for line in self.lines if (line.get(key) or np.inf) <= target), None)


def way_of(run: FinishedRun, transport: str = "") -> str:
    """How `AllReduce` names the way that this run's gradients go; "" where the kernel itself exchanges them.

    `transport`: as if the run had this one.
    """
    on_gpu = {"mpi": "device MPI", "nccl": "NCCL", "staged": "host"}
    return "host" if run.summary["engine"] == "reference" else on_gpu.get(transport or run.summary["transport"], "")


def modes_of(runs: Sequence[FinishedRun]) -> list[tuple[str, FinishedRun]]:
    """Each run with the mode it belongs to, by its batch beside that of the one-rank run.

    Raises DataError without exactly one one-rank run, or for a run that fits neither mode.
    """
    alone = [run for run in runs if run.ranks == 1]
    if len(alone) != 1:
        raise DataError(
            f"scaling: {len(alone)} of the runs have one rank; efficiency is relative to exactly one such run: "
            "add it with --from, or --ranks 1,…"
        )
    modes = []
    for run in runs:
        if run.ranks == 1:
            continue
        if run.batch == alone[0].batch * run.ranks:
            modes.append(("weak", run))
        elif run.batch == alone[0].batch:
            modes.append(("strong", run))
        else:
            raise DataError(
                f"run {run.path}: {run.ranks} ranks with a global batch of {run.batch} are neither a weak "
                f"({alone[0].batch * run.ranks}) nor a strong ({alone[0].batch}) step up from the one-rank run"
            )
    used = {mode for mode, _ in modes} or {"weak"}
    return [(mode, alone[0]) for mode in ("weak", "strong") if mode in used] + modes
