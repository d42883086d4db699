"""The ONNX graph of a trained network, from raw inputs to raw predictions.

Standardize → layers → softmax or sigmoid of logits → back to target units: the arithmetic of `Engine.predict` and the
`predict` command, in the same precisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distmlp.engine import Standardization
from distmlp.engine.functions import LEAKY_SLOPE
from distmlp.network import Network

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

OPSET = 17
IR_VERSION = 8  # what ONNX Runtime has read since 1.12
INPUT, OUTPUT = "inputs", "predictions"

# Activations that are one operator: name → (operator, attributes).
_SINGLE: dict[str, tuple[str, dict[str, float]]] = {
    "relu": ("Relu", {}),
    "leaky_relu": ("LeakyRelu", {"alpha": LEAKY_SLOPE}),
    "elu": ("Elu", {"alpha": 1.0}),
    "tanh": ("Tanh", {}),
    "sigmoid": ("Sigmoid", {}),
    "softplus": ("Softplus", {}),
    "sine": ("Sin", {}),
    "identity": ("Identity", {}),
}


class _Graph:
    """Nodes and constants in the making."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, NDArray] = {}

    def add(self, operator: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Append a node; returns the name of its output, which is `name`."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=f"{name}/{operator}", **attributes))
        return name

    def constant(self, name: str, value: NDArray) -> str:
        self.constants[name] = value
        return name


def onnx_model(
    network: Network, parameters: NDArray, standardization: Standardization, loss: str, metadata: dict[str, str]
) -> ModelProto:
    """A model with input `inputs` (rows, features) float32 and output `predictions` (rows, outputs) float32.

    `parameters`: flat float32 buffer of `network`. The predictions of the two cross-entropies are
    probabilities. Needs the package onnx; raises ValueError where the result would pass protobuf's 2 GiB.
    """
    from onnx import TensorProto, helper, numpy_helper

    if 4 * network.parameter_count > (1 << 31) - (1 << 20):
        raise ValueError("an ONNX file holds at most 2 GiB")
    graph = _Graph()
    value = _standardized(graph, standardization)
    for layer, (weight, bias) in zip(network.layers, network.views(parameters), strict=True):
        name = f"layer_{layer.index}"
        value = graph.add(
            "Gemm", value, graph.constant(f"{name}/weight", weight), graph.constant(f"{name}/bias", bias), name=name
        )
        value = _activated(graph, value, layer.activation)
    if loss == "softmax_cross_entropy":
        value = graph.add("Softmax", value, name="probabilities", axis=1)
    elif loss == "binary_cross_entropy":
        value = graph.add("Sigmoid", value, name="probabilities")
    graph.add("Identity", _in_target_units(graph, value, standardization), name=OUTPUT)

    def tensor(name: str, width: int) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])

    body = helper.make_graph(
        graph.nodes,
        "distmlp",
        [tensor(INPUT, network.inputs)],
        [tensor(OUTPUT, network.outputs)],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in graph.constants.items()],
    )
    model = helper.make_model(
        body, producer_name="distmlp", ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    helper.set_model_props(model, metadata)
    return model


def _standardized(graph: _Graph, standardization: Standardization) -> str:
    if standardization.inputs is None:
        return INPUT
    mean, deviation = standardization.inputs
    centred = graph.add("Sub", INPUT, graph.constant("inputs/mean", mean.astype(np.float32)), name="centred")
    factor = graph.constant("inputs/factor", (1.0 / deviation).astype(np.float32))
    return graph.add("Mul", centred, factor, name="standardized")


def _activated(graph: _Graph, value: str, activation: str) -> str:
    name = f"{value}/{activation}"
    if activation in _SINGLE:
        operator, attributes = _SINGLE[activation]
        return graph.add(operator, value, name=name, **attributes)
    if activation == "silu":
        return graph.add("Mul", value, graph.add("Sigmoid", value, name=f"{name}/gate"), name=name)
    if activation == "gelu":  # z/2 (1 + erf(z / sqrt 2)): opset 17 has no Gelu, but Erf
        half = graph.constant(f"{name}/half", np.full(1, 0.5, np.float32))
        one = graph.constant(f"{name}/one", np.ones(1, np.float32))
        root = graph.constant(f"{name}/root", np.sqrt(np.full(1, 0.5, np.float32)))
        error = graph.add("Erf", graph.add("Mul", value, root, name=f"{name}/scaled"), name=f"{name}/erf")
        gate = graph.add("Mul", graph.add("Add", error, one, name=f"{name}/sum"), half, name=f"{name}/gate")
        return graph.add("Mul", value, gate, name=name)
    raise AssertionError(f"unknown activation {activation!r}")


def _in_target_units(graph: _Graph, value: str, standardization: Standardization) -> str:
    """Through float64, as `Engine.predict` does: targets may be large and narrow."""
    from onnx import TensorProto

    if standardization.targets is None:
        return value
    mean, deviation = standardization.targets
    wide = graph.add("Cast", value, name="wide", to=TensorProto.DOUBLE)
    scaled = graph.add("Mul", wide, graph.constant("targets/deviation", deviation.astype(np.float64)), name="scaled")
    moved = graph.add("Add", scaled, graph.constant("targets/mean", mean.astype(np.float64)), name="moved")
    return graph.add("Cast", moved, name="in_target_units", to=TensorProto.FLOAT)
