"""A small problem for runs that are to be killed, stopped, filled up and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from distmlp.checkpoint.store import newest
from distmlp.output import versions
from tests.launching import run_distmlp

ROWS = 500


def make_problem(
    folder: Path, widths: Sequence[int] = (8, 24, 2), splits: Sequence[int] = (300,), **run: object
) -> Path:
    """Shards (cut at `splits`) and `run.toml` in `folder`; `run` are keys of its section [run]. Returns the TOML."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    inputs = random.normal(size=(ROWS, widths[0])).astype("f4")
    targets = np.tanh(inputs @ random.normal(size=(widths[0], widths[-1]))).astype("f4")
    for number, (start, stop) in enumerate(zip((0, *splits), (*splits, ROWS), strict=True)):
        with h5py.File(folder / f"train-{number}.h5", "w") as file:
            file["inputs"], file["targets"] = inputs[start:stop], targets[start:stop]
    keys = {"steps": 40, "checkpoint_every": "1 step", "log_every": 1} | run
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    toml = folder / "run.toml"
    toml.write_text(
        f"[model]\nlayers = {list(widths)}\n"
        '[data]\ntrain = "train-*.h5"\nbatch = 64\nstreams = 8\n'
        '[schedule]\nwarmup_steps = 30\n[run]\noutput = "run"\n' + "\n".join(lines) + "\n"
    )
    return toml


def train(toml: Path, output: Path, ranks: int = 0, *arguments: str, code: int = 0) -> str:
    """Run `distmlp train` to its end, expect exit code `code`; all that it printed."""
    done = run_distmlp(["train", str(toml), "--output", str(output), *arguments], ranks)
    assert done.returncode == code, f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def sha256(output: Path) -> str:
    return json.loads((output / "summary.json").read_text())["weights_sha256"]


def losses(output: Path) -> list[tuple[int, float]]:
    """(step, loss) of every line of `metrics.jsonl`."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def newest_step(output: Path) -> int:
    """Step of the newest good checkpoint, 0 without any; a damaged file under a final name is a failure."""
    found = newest(output / "checkpoints")
    assert found is None or found.rejected == []
    return found.checkpoint.step if found else 0


def record(name: str, **facts: object) -> None:
    """Keep the outcome of a long suite in `results/`, for the repository."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    entry = {"date": time.strftime("%Y-%m-%d"), **facts, "versions": versions()}
    path.write_text(json.dumps(entry, indent=2) + "\n")
