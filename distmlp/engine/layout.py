"""The structures of kernels/params.cuh for the host, as NumPy types. Pure.

`Engine` lies in constant memory; the sizes are compared with the compiler's when a module is loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

MAX_LAYERS = 64
ACTIVATIONS = ("relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "softplus", "sine", "identity")
RAW_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")  # in the order of enum RawType
NOT_RUN, DONE, LEFT_OUT, NOT_FINITE = range(4)  # StepStatus
NOTHING, NORM, PEERS_SUM = range(3)  # BeforeUpdate
MAX_PEERS = 8

POINTER = "u8"


def _structure(*fields: tuple) -> np.dtype:
    return np.dtype(list(fields), align=True)


LAYER = _structure(
    ("weight_offset", "i8"), ("bias_offset", "i8"),
    ("weight", POINTER), ("output", POINTER), ("error", POINTER), ("column_sums", POINTER),
    ("fan_in", "i4"), ("fan_out", "i4"), ("ld_in", "i4"), ("ld_out", "i4"), ("activation", "i4"),
    ("tiles_n", "i4"), ("splits", "i4"), ("first_task", "i4"), ("first_tile", "i4"), ("padding", "i4"),
)  # fmt: skip
BATCH = _structure(("inputs", POINTER), ("labels", POINTER), ("weights", POINTER))
FLAGS = _structure(
    ("output", "u4", MAX_LAYERS + 1), ("error", "u4", MAX_LAYERS), ("loss", "u4"), ("gradient_not_finite", "u4"),
    ("weight", "f4"),
)  # fmt: skip
CONTROL = _structure(
    ("barrier", "u8"), ("forward_barrier", "u8"), ("step", "u8"), ("frozen", "u4"), ("skipped", "u4"),
    ("flags", FLAGS, 2),
)  # fmt: skip
STEP_INFO = _structure(("rate", "f4"), ("rows", "i4"), ("first", "i8"))
STEP_RESULT = _structure(("loss", "f8"), ("weight", "f4"), ("status", "i4"))
ENGINE = _structure(
    *((name, POINTER) for name in ("parameters", "first_slot", "second_slot", "ema", "gradient")),
    ("size", "i8"),
    *((name, POINTER) for name in (
        "partial_tiles", "tile_arrivals", "logits", "loss_partials", "norm_partials",
        "input_mean_high", "input_mean_low", "input_factor", "target_mean_high", "target_mean_low", "target_factor",
    )),
    ("batches", BATCH, 2),
    *((name, POINTER) for name in ("control", "steps", "results")),
    *((name, "i4") for name in (
        "layers", "gradient_tasks", "gradient_tiles", "raw_type", "stop_on_nonfinite", "needs_norm", "deferred",
    )),
    *((name, "f4") for name in (
        "clip_norm", "huber_delta", "weight_decay", "momentum", "epsilon", "ema_decay",
    )),
    ("beta1", "f8"), ("beta2", "f8"), ("rho", "f8"),
    ("lanes", POINTER), ("lane_sums", POINTER), ("lane_stride", "i4"), ("lane_nodes", "i4"),
    ("layer", LAYER, MAX_LAYERS),
)  # fmt: skip

POST = _structure(
    ("exchanges", "u8"), ("waited_ns", "u8"), ("votes", "f4", 4), ("totals", "f4", 4), ("lost", "u4"),
    ("padding", "u4", 19),
)  # fmt: skip
PEERS = _structure(
    ("mailbox", POINTER, MAX_PEERS), ("gone", POINTER), ("limit_ns", "u8"), ("stride", "i8"), ("ranks", "i4"),
    ("rank", "i4"),
)  # fmt: skip

SIZES = (ENGINE.itemsize, LAYER.itemsize, CONTROL.itemsize)


def raw_type(dtype: DTypeLike) -> int:
    """Number of the native NumPy type `dtype` in enum RawType. bool counts as bytes."""
    dtype = np.dtype(dtype)
    name = "u1" if dtype.kind == "b" else f"{dtype.kind}{dtype.itemsize}"
    return RAW_TYPES.index(name)


def offset(structure: np.dtype, field: str) -> int:
    """Bytes from the start of `structure` to `field`."""
    assert structure.fields is not None
    return structure.fields[field][1]
