"""What all subjects of `step.py` share: problems, the learning check, and how a measurement is reported.

A subject is a program `subject_NAME.py` with the arguments of `run_subject`. It measures problem after problem and
appends one JSON object a line to its output, so that what was measured is kept whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from distmlp.data.shards import Rows
from distmlp.network import Network
from distmlp.tools.bench import Preset, find_preset, make_rows, summary

BLOCKS = 7
BLOCK_SECONDS = 0.05
LEARN_STEPS = 20
RATE = 1e-3  # the rest of Adam as all subjects have it by default: 0.9, 0.999, 1e-8
PRECISIONS = ("bf16", "tf32", "fp32")


@dataclass
class Measurement:
    """µs per step of every block, and the loss of each of the first steps."""

    subject: str
    times: list[float]
    losses: list[float]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Problem:
    """A network with its data and initial weights: the same numbers for every subject."""

    preset: Preset
    precision: str
    batches: int
    block_seconds: float = BLOCK_SECONDS

    @classmethod
    def of(cls, preset: Preset, precision: str = "bf16", data_bytes: int = 2048 << 20) -> Problem:
        most = 256 if preset.batch * sum(preset.layers) > 1 << 20 else 1000
        return cls(preset, precision, min(preset.batches_in(data_bytes), most))

    @cached_property
    def rows(self) -> Rows:
        return make_rows(self.preset, self.batches)

    def some_rows(self, batches: int = 2) -> Rows:
        """As `rows` but few: enough for a compiler."""
        return make_rows(self.preset, min(batches, self.batches))

    @property
    def learn_steps(self) -> int:
        return min(LEARN_STEPS, self.batches)

    @property
    def network(self) -> Network:
        return Network.build(self.preset.layers, "relu", "identity")

    def weights(self) -> list[tuple[NDArray, NDArray]]:
        """`(weight (fan_in, fan_out), bias (fan_out,))` of every layer, float32."""
        return self.network.views(self.network.initial(0, "he_normal"))

    def stacked(self, rows: Rows, ranks: int = 1) -> tuple[NDArray, NDArray]:
        """Inputs and targets of whole batches as (batches, batch, columns), float32.

        Of every batch each of `ranks` GPUs has an equal part, from its own share of the rows, as distmlp's ranks have.
        """

        def batches(array: NDArray) -> NDArray:
            parts = array.reshape(ranks, -1, self.preset.batch // ranks, array.shape[1]).swapaxes(0, 1)
            return parts.reshape(-1, self.preset.batch, array.shape[1])

        return batches(rows.inputs), batches(np.asarray(rows.targets))


def run_subject(measure: Callable[[Problem, bool], Iterator[Measurement]], quiet: bool = False, name: str = "") -> None:
    """The program of a subject: `measure(problem, warm)` yields measurements; with `warm` it only compiles.

    With `--ranks` the problem is what all of them do together. `quiet`: another rank tells of failures, with `name`.
    """
    options = arguments()
    for chosen in options.presets.split(","):
        try:
            preset = find_preset(chosen)
            preset = replace(preset, batch=preset.batch * options.ranks)
            problem = Problem.of(preset, options.precision, options.megabytes << 20)
            problem.block_seconds = options.block_seconds
            for result in measure(problem, options.warm):
                line = {"preset": chosen, "subject": result.subject, "batches": problem.batches}
                line |= summary(result.times) | result.extra
                report(options.out, line | {"losses": result.losses})
        except Exception as error:  # the other presets are still measured, and the file says what is missing
            traceback.print_exc(limit=5)
            if not quiet:
                text = f"{name + ': ' if name else ''}{type(error).__name__}: {error}"
                report(options.out, {"preset": chosen, "failed": text[:300]})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", required=True, help="comma separated; also WIDTHS@BATCH")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the matrix products")
    parser.add_argument("--megabytes", type=int, default=2048, help="of rows, about")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with the preset's batch")
    parser.add_argument("--block-seconds", type=float, default=BLOCK_SECONDS, help="(default: %(default)s)")
    parser.add_argument("--warm", action="store_true", help="fill the compilers' caches, measure nothing")
    return parser.parse_args()


def report(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps({k: v for k, v in line.items() if k != "losses"}), flush=True)
