"""Exported networks predict what `distmlp predict` predicts."""

from __future__ import annotations

import json
import typing

import numpy as np
import pytest
from launching import run_distmlp

import distmlp
from distmlp.checkpoint import Checkpoint, network_of, save
from distmlp.config import Activation, RunConfig
from distmlp.engine import Standardization, State
from distmlp.errors import CheckpointError, ConfigError, SystemUnfitError
from distmlp.tools.export import run_export

ACTIVATIONS = typing.get_args(Activation)


def make_checkpoint(path, activation="relu", loss="mse", standardize="both", layers=(7, 12, 9, 3), ema=0.0):
    config = RunConfig.parse(
        {
            "model": {"layers": list(layers), "activation": activation, "loss": loss},
            "data": {"train": "x.h5", "standardize": standardize},
            "optimizer": {"name": "sgd"},
            "run": {"ema_decay": ema},
        }
    )
    network = network_of(config)
    random = np.random.default_rng(5)
    parameters = network.initial(3, "glorot_normal")
    for _, bias in network.views(parameters):
        bias[:] = random.normal(size=bias.shape)
    averaged = network.initial(4, "glorot_normal") if ema else None
    moments = [(random.normal(size=n) * 5, random.uniform(0.5, 3, n)) for n in (layers[0], layers[-1])]
    sides = {"none": 0, "inputs": 1, "both": 2}[standardize]
    scaling = Standardization(*moments[:sides])
    save(path, Checkpoint(config, State(parameters, {}, averaged), scaling, step=9), network)
    inputs = (random.normal(size=(40, layers[0])) * 3 + 2).astype(np.float32)
    return inputs, distmlp.load(path).predict(inputs)


def run_onnx(path, inputs):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["inputs"]
    (outputs,) = session.run(["predictions"], {"inputs": inputs})
    assert outputs.dtype == np.float32
    return outputs


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_onnx_predicts_the_same_with_every_activation(tmp_path, activation):
    inputs, expected = make_checkpoint(tmp_path / "c.h5", activation)
    assert run_export(tmp_path / "c.h5", "onnx", tmp_path / "m.onnx") == 0
    assert run_onnx(tmp_path / "m.onnx", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert run_onnx(tmp_path / "m.onnx", inputs[:1]) == pytest.approx(expected[:1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "binary_cross_entropy", "huber"])
@pytest.mark.parametrize("standardize", ["none", "inputs"])
def test_onnx_predicts_the_same_with_every_kind_of_output(tmp_path, loss, standardize):
    inputs, expected = make_checkpoint(tmp_path / "c.h5", "tanh", loss, standardize)
    run_export(tmp_path / "c.h5", "onnx", tmp_path / "m.onnx")
    assert run_onnx(tmp_path / "m.onnx", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    if loss == "softmax_cross_entropy":
        assert expected.sum(axis=1) == pytest.approx(np.ones(len(inputs)), abs=1e-5)


def test_the_averaged_weights_are_exported(tmp_path):
    inputs, expected = make_checkpoint(tmp_path / "c.h5", ema=0.9)
    run_export(tmp_path / "c.h5", "onnx", tmp_path / "m.onnx")
    assert run_onnx(tmp_path / "m.onnx", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def _by_hand(tensors, activation, inputs):
    """The forward pass that the metadata describes, for tanh and mean squared error."""
    assert activation == "tanh"
    x = (inputs - tensors["inputs.mean"]) / tensors["inputs.deviation"]
    for layer in range(3):
        x = x @ tensors[f"layer_{layer}.weight"] + tensors[f"layer_{layer}.bias"]
        x = np.tanh(x) if layer < 2 else x
    return x * tensors["targets.deviation"] + tensors["targets.mean"]


def test_npz_holds_all_that_a_forward_pass_needs(tmp_path):
    inputs, expected = make_checkpoint(tmp_path / "c.h5", "tanh")
    run_export(tmp_path / "c.h5", "npz", tmp_path / "weights")
    with np.load(tmp_path / "weights", allow_pickle=False) as tensors:
        about = json.loads(str(tensors["metadata"]))
        assert json.loads(about["activations"]) == ["tanh", "tanh", "identity"]
        assert _by_hand(tensors, "tanh", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_safetensors_holds_all_that_a_forward_pass_needs(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    inputs, expected = make_checkpoint(tmp_path / "c.h5", "tanh")
    run_export(tmp_path / "c.h5", "safetensors", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["step"] == "9"
        assert RunConfig.from_toml(file.metadata()["config"], "metadata").model.layers == (7, 12, 9, 3)
    assert _by_hand(tensors, "tanh", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("package", ["onnx", "safetensors"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
    make_checkpoint(tmp_path / "c.h5")
    for module in (package, f"{package}.numpy"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(SystemUnfitError, match=r"pip install 'distmlp\[export\]'"):
        run_export(tmp_path / "c.h5", package, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_checkpoint(tmp_path):
    inputs, expected = make_checkpoint(tmp_path / "c.h5")
    done = run_distmlp(["export", "c.h5", "--to", "onnx", "m.onnx"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("m.onnx: onnx, ")
    assert run_onnx(tmp_path / "m.onnx", inputs) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert run_distmlp(["export", "c.h5", "--to", "pickle", "m"], cwd=tmp_path).returncode == ConfigError.exit_code


def test_what_cannot_be_done_is_refused_and_leaves_nothing(tmp_path):
    make_checkpoint(tmp_path / "c.h5")
    with pytest.raises(ConfigError, match="known: onnx, safetensors, npz"):
        run_export(tmp_path / "c.h5", "pickle", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"nowhere.*No such file"):
        run_export(tmp_path / "c.h5", "npz", tmp_path / "nowhere" / "out")
    (tmp_path / "c.h5").write_bytes(b"not HDF5")
    with pytest.raises(CheckpointError, match=r"c\.h5"):
        run_export(tmp_path / "c.h5", "npz", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.h5"]
