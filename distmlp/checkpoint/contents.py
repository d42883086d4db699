"""Checkpoints: everything a run needs to go on, in one HDF5 file that any HDF5 tool reads.

The file begins with a seal (see `seal.py`). Tensors are contiguous little-endian float32 (`/model`,
`/optimizer`, `/ema`) and float64 (`/standardization`). HDF5 writes and reads only the structure around
them, in memory; the tensors' bytes go between our buffers and the file directly, so that a long save does
not hold the lock that h5py shares with the readers of the training data, and needs no copy of the state.

`sha256` is over the content: for each other root attribute in sorted order the line
`attribute NAME JSON-VALUE`, then for each dataset in sorted order of its path the line
`dataset /PATH DTYPE JSON-SHAPE` followed by its bytes (C order); lines end with a newline, DTYPE is NumPy's
(`<f4`), JSON as Python's `json.dumps` writes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmlp.checkpoint.layout import read_layout
from distmlp.checkpoint.seal import FORMAT, FORMAT_VERSION, newer_format
from distmlp.config import RunConfig
from distmlp.engine import Standardization, State
from distmlp.engine.optimizers import slot_names
from distmlp.errors import CheckpointError, ConfigError
from distmlp.network import Network


@dataclass
class Checkpoint:
    """A moment of a run between two steps."""

    config: RunConfig  # with all widths in `model.layers`
    state: State
    standardization: Standardization = field(default_factory=Standardization)
    epoch: int = 0
    step: int = 0  # batches done in the run, those left out as non-finite included
    step_in_epoch: int = 0
    best: float | None = None  # lowest validation loss so far
    stale_validations: int = 0  # validations since then
    validation: float | None = None  # validation loss at this very step, where measured
    skipped: int = 0  # batches left out as non-finite
    rows: int = 0  # of the training data
    epoch_loss: float = 0.0  # weighted sum of the losses of this epoch's batches so far
    epoch_weight: float = 0.0  # and the sum of their weights
    versions: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # changed keys of each resume: {"step", "changes"}

    @property
    def network(self) -> Network:
        return network_of(self.config)


def network_of(config: RunConfig) -> Network:
    """The network of a configuration whose widths are all known."""
    model = config.model
    return Network.build(model.layers, model.activation, model.output_activation)


def content_sha256(attributes: dict[str, Any], tensors: dict[str, NDArray]) -> str:
    """The digest kept as attribute `sha256`; defined at the top of this file."""
    digest = hashlib.sha256()
    for name in sorted(attributes.keys() - {"sha256"}):
        digest.update(f"attribute {name} {json.dumps(attributes[name])}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"dataset {name} {tensor.dtype.str} {json.dumps(tensor.shape)}\n".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def tensors_of(checkpoint: Checkpoint, network: Network) -> dict[str, NDArray]:
    """Dataset path → C-contiguous little-endian array, views wherever they can be."""
    state, scaling = checkpoint.state, checkpoint.standardization
    groups = {"/model": state.parameters} | {f"/optimizer/{name}": slot for name, slot in state.slots.items()}
    if state.ema is not None:
        groups["/ema"] = state.ema
    tensors = {}
    for group, flat in groups.items():
        for index, (weight, bias) in enumerate(network.views(flat)):
            tensors[f"{group}/layer_{index}/weight"] = np.ascontiguousarray(weight, "<f4")
            tensors[f"{group}/layer_{index}/bias"] = np.ascontiguousarray(bias, "<f4")
    for side, pair in (("inputs", scaling.inputs), ("targets", scaling.targets)):
        if pair is not None:
            for name, values in zip(("mean", "deviation"), pair, strict=True):
                tensors[f"/standardization/{side}/{name}"] = np.ascontiguousarray(values, "<f8")
    return tensors


def attributes_of(checkpoint: Checkpoint) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "step_in_epoch": checkpoint.step_in_epoch,
        "seed": checkpoint.config.run.seed,
        "updates": checkpoint.state.step,
        "skipped": checkpoint.skipped,
        "stale_validations": checkpoint.stale_validations,
        "rows": checkpoint.rows,
        "standardized": " ".join(s for s in ("inputs", "targets") if getattr(checkpoint.standardization, s)),
        "config": checkpoint.config.to_toml(),
        "versions": json.dumps(checkpoint.versions),
        "history": json.dumps(checkpoint.history),
    }
    for name in ("best", "validation", "epoch_loss", "epoch_weight"):
        if (value := finite_or_none(getattr(checkpoint, name))) is not None:
            attributes[name] = value
    return attributes


def finite_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def interpret(file: BufferedReader, where: str) -> Checkpoint:
    """Interpret an open checkpoint, its seal aside.

    Every size it claims is compared with what its configuration and its length allow before memory is
    asked for. Raises CheckpointError.
    """
    size_bytes = file.seek(0, 2)
    attributes, offsets, shapes = read_layout(file, where, size_bytes, expected_shapes)
    config = _config(attributes, where)
    network = network_of(config)
    tensors = {}
    flats: dict[str, NDArray] = {}
    for name, (dtype, shape) in shapes.items():
        group, _, place = name.partition("/layer_")
        if place:
            if group not in flats:
                flats[group] = np.zeros(network.size, np.float32)
            index, _, part = place.partition("/")
            target = network.views(flats[group])[int(index)][part == "bias"]
        else:
            target = np.empty(shape, dtype)
        file.seek(offsets[name])
        if file.readinto(target.data.cast("B")) != target.nbytes:
            raise CheckpointError(f"{where}: {name}: the file ends within it")
        tensors[name] = target
    if content_sha256(attributes, tensors) != attributes["sha256"]:
        raise CheckpointError(f"{where}: the content does not match the attribute sha256")
    return _checkpoint(config, attributes, tensors, flats, where)


def _config(attributes: dict[str, Any], where: str) -> RunConfig:
    try:
        config = RunConfig.from_toml(attributes["config"], f"{where}, attribute config")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not config.model.layers:
        raise CheckpointError(f"{where}: attribute config: model.layers must give all widths")
    return config


def expected_shapes(attributes: dict[str, Any], where: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dataset path → dtype and shape that a checkpoint with these attributes has, no more and no fewer."""
    if attributes["format"] != FORMAT:
        raise CheckpointError(f"{where}: attribute format is {attributes['format'][:40]!r}, not {FORMAT!r}")
    if attributes["format_version"] > FORMAT_VERSION:
        raise newer_format(where, attributes["format_version"])
    config = _config(attributes, where)
    network = network_of(config)
    groups = ["/model", *(f"/optimizer/{slot}" for slot in slot_names(config.optimizer.name))]
    groups += ["/ema"] if config.run.ema_decay else []
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in groups:
        for layer in network.layers:
            shapes[f"{group}/layer_{layer.index}/weight"] = ("<f4", (layer.fan_in, layer.fan_out))
            shapes[f"{group}/layer_{layer.index}/bias"] = ("<f4", (layer.fan_out,))
    for side, width in (("inputs", network.inputs), ("targets", network.outputs)):
        if side in attributes["standardized"].split():
            for name in ("mean", "deviation"):
                shapes[f"/standardization/{side}/{name}"] = ("<f8", (width,))
    return shapes


def _checkpoint(
    config: RunConfig, attributes: dict[str, Any], tensors: dict[str, NDArray], flats: dict[str, NDArray], where: str
) -> Checkpoint:
    scaling = {
        side: (tensors[f"/standardization/{side}/mean"], tensors[f"/standardization/{side}/deviation"])
        for side in ("inputs", "targets")
        if f"/standardization/{side}/mean" in tensors
    }
    slots = {slot: flats[f"/optimizer/{slot}"] for slot in slot_names(config.optimizer.name)}
    versions, history = _notes(attributes, where)
    return Checkpoint(
        config=config,
        state=State(flats["/model"], slots, flats.get("/ema"), attributes["updates"]),
        standardization=Standardization(**scaling),
        **{name: attributes[name] for name in (
            "epoch", "step", "step_in_epoch", "stale_validations", "skipped", "rows")},
        best=attributes.get("best"),
        validation=attributes.get("validation"),
        epoch_loss=attributes.get("epoch_loss", 0.0),
        epoch_weight=attributes.get("epoch_weight", 0.0),
        versions=versions,
        history=history,
    )  # fmt: skip


def _notes(attributes: dict[str, Any], where: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """`versions` and `history`, which only people read, in the form that they rely on."""
    try:
        versions = {str(name): str(version) for name, version in json.loads(attributes["versions"]).items()}
        history = [
            {
                "step": int(part["step"]),
                "changes": {str(key): [old, new] for key, (old, new) in part["changes"].items()},
            }
            for part in json.loads(attributes["history"])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{where}: attributes versions and history are not in their form") from None
    return versions, history
