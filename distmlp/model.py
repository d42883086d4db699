"""Trained networks in use: load a checkpoint, predict, evaluate. One process or all ranks of a job."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distmlp.checkpoint import Checkpoint, network_of
from distmlp.checkpoint import load as load_checkpoint
from distmlp.checkpoint.store import resolve_checkpoint
from distmlp.comm.world import World, open_world
from distmlp.config import DataConfig, RunConfig
from distmlp.data.predictions import PredictionWriter
from distmlp.data.shards import Shards
from distmlp.engine import Engine
from distmlp.engine.functions import sigmoid, softmax
from distmlp.engine.select import open_engine
from distmlp.errors import DataError
from distmlp.evaluation import evaluate, metrics, own_blocks, refuse
from distmlp.overrides import absolute


@dataclass
class Model:
    """A trained network. `config` and `step` are those of the checkpoint it came from."""

    config: RunConfig
    step: int
    _engine: Engine

    def predict(self, inputs: ArrayLike) -> NDArray:
        """Predictions (rows, outputs), float32, of raw `inputs` (rows, features).

        Class probabilities for `softmax_cross_entropy`, probabilities for `binary_cross_entropy`, values in
        the targets' own units otherwise. One row alone may be flat. Raises DataError for other widths and for what are
        no real numbers.
        """
        array = np.asarray(inputs)
        width = self.config.model.layers[0]
        if array.dtype.kind not in "biuf":
            raise DataError(f"inputs of type {array.dtype}: expected real numbers")
        fits = math.prod(array.shape[1:]) == width if array.ndim > 1 else array.size % width == 0
        if not fits:
            raise DataError(f"inputs of shape {array.shape}: the network takes {width} features a row")
        return probabilities(self._engine.predict(array.reshape(array.size // width, width)), self.config.model.loss)


def load(checkpoint: str | Path) -> Model:
    """Load a checkpoint (a file, or the output directory of a run: its newest) for prediction.

    Raises CheckpointError.
    """
    path = resolve_checkpoint(checkpoint)
    saved = load_checkpoint(path)
    return Model(saved.config, saved.step, _engine_for(saved, open_world()))


def probabilities(outputs: NDArray, loss: str) -> NDArray:
    """What users call predictions: softmax or logistic function of logits, other outputs as they are."""
    if loss == "softmax_cross_entropy":
        return softmax(outputs)
    if loss == "binary_cross_entropy":
        return sigmoid(outputs)
    return outputs


def run_evaluate(checkpoint: Path, data: str, inputs: str, targets: str) -> int:
    """`distmlp evaluate`: print one JSON object."""
    world, saved, shards, engine = _open(checkpoint, data, inputs, targets)
    total = evaluate(engine, shards, world, refuse)
    if world.rank == 0:
        figures = {key: _json(value) for key, value in metrics(total, saved.config.model.loss).items()}
        print(json.dumps({"samples": int(total.rows), **figures}))
    return 0


def run_predict(checkpoint: Path, data: str, out: Path, inputs: str) -> int:
    """`distmlp predict`: write `predictions`, in input order, complete or not at all."""
    world, saved, shards, engine = _open(checkpoint, data, inputs, None)
    blocks = list(own_blocks(shards.rows, world))
    rounds = max(world.all_gather(len(blocks)))
    shape = (shards.rows, saved.config.model.layers[-1])

    def open_writer() -> PredictionWriter | None:
        return (
            PredictionWriter(out, shape, [*shards.paths, resolve_checkpoint(checkpoint)]) if world.rank == 0 else None
        )

    writer = world.agree(open_writer)
    try:
        for turn in range(rounds):  # a block of every rank at a time: constant memory on rank 0
            mine = blocks[turn] if turn < len(blocks) else range(0)

            def predict_block(rows: range = mine) -> tuple[int, NDArray]:
                read = shards.read(rows.start, rows.stop)
                return rows.start, probabilities(engine.predict(read.inputs), saved.config.model.loss)

            gathered = world.all_gather(world.agree(predict_block) if mine else world.agree(lambda: None))
            world.agree(partial(_write, writer, gathered))
        world.agree(lambda: writer.finish() if writer else None)
    finally:
        if writer:
            writer.close()
    if world.rank == 0:
        print(f"wrote predictions {shape[0]} x {shape[1]} to {out}")
    return 0


def _write(writer: PredictionWriter | None, parts: list[tuple[int, NDArray] | None]) -> None:
    if writer is not None:
        for part in parts:
            if part is not None:
                writer.write(*part)


def _open(checkpoint: Path, data: str, inputs: str, targets: str | None) -> tuple[World, Checkpoint, Shards, Engine]:
    """The world, the checkpoint, the shards (`targets` None: inputs alone) and an engine that holds the weights."""
    world = open_world()
    saved = world.agree(lambda: load_checkpoint(resolve_checkpoint(checkpoint)))
    trained = saved.config.data
    with_targets = targets is not None
    chosen = DataConfig.model_construct(  # unchecked: this path need not be text that a file could hold
        train=absolute(data),
        inputs=inputs or trained.inputs,
        targets=targets or trained.targets,
        sample_weights=trained.sample_weights if with_targets else "",
    )
    model = saved.config.model
    shards = Shards.open(chosen, world, loss=model.loss if with_targets else "", layers=model.layers)
    return world, saved, shards, _engine_for(saved, world)


def _engine_for(saved: Checkpoint, world: World) -> Engine:
    engine, _ = open_engine(saved.config, network_of(saved.config), world, None, saved.standardization)
    engine.load(saved.state)
    return engine


def _json(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
