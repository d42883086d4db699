"""`distmlp export`: a checkpoint as ONNX, safetensors or NPZ, standardization included."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmlp.checkpoint import Checkpoint, load
from distmlp.checkpoint.store import resolve_checkpoint
from distmlp.errors import CheckpointError, ConfigError, SystemUnfitError
from distmlp.files import check_replaceable, describe, replace_file


def run_export(checkpoint: Path, to: str, out: Path) -> int:
    """Write the network in `checkpoint` to `out` in the format `to`; returns 0.

    The averaged weights are taken where the run kept them, as `predict` does. Raises CheckpointError for a
    bad checkpoint or an `out` that cannot be written, SystemUnfitError when the format's package is missing,
    ConfigError for an unknown format or a network too large for it.
    """
    if to not in FORMATS:
        raise ConfigError(f"export --to {to}: unknown format; known: {', '.join(FORMATS)}")
    path = resolve_checkpoint(checkpoint)
    encoded = FORMATS[to](load(path))
    try:
        check_replaceable(out, [path])
        replace_file(out, [encoded])
    except OSError as error:
        raise CheckpointError(
            f"export {out}: {describe(error, out, len(encoded))}; give a path that can be written"
        ) from None
    print(f"{out}: {to}, {len(encoded):,} bytes")
    return 0


def weights(checkpoint: Checkpoint) -> NDArray:
    """The flat parameters that predict."""
    state = checkpoint.state
    return state.parameters if state.ema is None else state.ema


def metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """What a reader needs beside the numbers, as text."""
    network, parameters = checkpoint.network, weights(checkpoint)
    return {
        "format": "distmlp-export",
        "widths": json.dumps(network.widths),
        "activations": json.dumps(network.activations),
        "loss": checkpoint.config.model.loss,
        "forward": "x = (inputs - inputs.mean) / inputs.deviation; x = activation(x @ weight + bias) for every layer; "
        "softmax of the outputs for softmax_cross_entropy, sigmoid for binary_cross_entropy; "
        "x * targets.deviation + targets.mean; a standardization that is absent is left out",
        "step": str(checkpoint.step),
        "weights_sha256": network.sha256(parameters),
        "config": checkpoint.config.to_toml(),
        "versions": json.dumps(checkpoint.versions),
    }


def tensors(checkpoint: Checkpoint) -> dict[str, NDArray]:
    """`layer_K.weight` (fan_in, fan_out) and `layer_K.bias` (fan_out,), float32; `inputs.mean` … float64."""
    network, parameters = checkpoint.network, weights(checkpoint)
    result = {}
    for layer, (weight, bias) in zip(network.layers, network.views(parameters), strict=True):
        result[f"layer_{layer.index}.weight"] = np.ascontiguousarray(weight, "<f4")
        result[f"layer_{layer.index}.bias"] = np.ascontiguousarray(bias, "<f4")
    for side in ("inputs", "targets"):
        moments = getattr(checkpoint.standardization, side)
        if moments is not None:
            result[f"{side}.mean"], result[f"{side}.deviation"] = (np.ascontiguousarray(m, "<f8") for m in moments)
    return result


def _npz(checkpoint: Checkpoint) -> bytes:
    stream = io.BytesIO()
    text = np.array(json.dumps(metadata(checkpoint)))  # a unicode array: loads without pickle
    np.savez(stream, allow_pickle=False, metadata=text, **tensors(checkpoint))
    return stream.getvalue()


def _safetensors(checkpoint: Checkpoint) -> bytes:
    try:
        from safetensors.numpy import save
    except ImportError:
        raise _missing("safetensors") from None
    return save(tensors(checkpoint), metadata(checkpoint))


def _onnx(checkpoint: Checkpoint) -> bytes:
    try:
        import onnx
    except ImportError:
        raise _missing("onnx") from None
    from distmlp.tools.onnx_graph import onnx_model

    network, parameters = checkpoint.network, weights(checkpoint)
    loss = checkpoint.config.model.loss
    try:
        model = onnx_model(network, parameters, checkpoint.standardization, loss, metadata(checkpoint))
    except ValueError as error:
        raise ConfigError(
            f"export --to onnx: {network.parameter_count:,} parameters are too many: {error}; use --to safetensors"
        ) from None
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _missing(package: str) -> SystemUnfitError:
    return SystemUnfitError(
        f"export --to {package}: the package {package} is not installed; pip install 'distmlp[export]' brings it"
    )


FORMATS: dict[str, Callable[[Checkpoint], bytes]] = {"onnx": _onnx, "safetensors": _safetensors, "npz": _npz}
