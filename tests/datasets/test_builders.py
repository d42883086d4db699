"""The builders of `datasets/`: right rows, the same from any number of ranks, complete files, runs that are ready."""

import gzip
import importlib.util
import json
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
from launching import clean_environment, mpirun_path, run_distmlp

from distmlp.config import RunConfig

DATASETS = Path(__file__).parents[2] / "datasets"


def build(name, out, *options, ranks=0):
    launcher = [mpirun_path(), "-n", str(ranks)] if ranks else []
    command = [*launcher, sys.executable, DATASETS / f"{name}.py", "--out", out, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=120)


def rows_of(folder, part):
    parts = []
    for path in sorted(folder.glob(f"{part}-*.h5")):
        with h5py.File(path) as file:
            parts.append((file["inputs"][...], file["targets"][...]))
    return tuple(np.concatenate(side) for side in zip(*parts, strict=True))


@pytest.fixture
def modules(monkeypatch):
    """Import a builder as its script would."""
    monkeypatch.syspath_prepend(str(DATASETS))
    return importlib.import_module


def test_teacher_and_student(tmp_path, modules):
    options = ("--rows", 5001, "--validation-rows", 3000, "--features", 5, "--noise", 0.2)
    assert build("teacher_student", tmp_path / "a", *options).returncode == 0
    inputs, targets = rows_of(tmp_path / "a", "train")
    held_inputs, held_targets = rows_of(tmp_path / "a", "validation")
    assert (inputs.shape, targets.shape, held_inputs.shape) == ((5001, 5), (5001, 2), (3000, 5))
    teacher = modules("teacher_student").Teacher(5, 16, 2, 0)
    for x, y in ((inputs, targets), (held_inputs, held_targets)):
        noise = y - teacher(x.astype("f8"))
        assert noise.std() == pytest.approx(0.2, rel=0.03)
        assert abs(noise.mean()) < 0.01
        assert abs(x.mean()) < 0.03
        assert x.std() == pytest.approx(1, rel=0.02)
    assert teacher(inputs).var() == pytest.approx(1, abs=0.5)
    assert len(np.unique(np.concatenate([inputs, held_inputs])[:, 0])) > 7900


def test_rows_depend_on_their_number_alone(tmp_path):
    """Other ranks, other shards, more rows: the rows that were there stay what they are."""
    for name, rows, shards, ranks in (("a", 2500, 3, 0), ("b", 2500, 7, 3), ("c", 4000, 2, 2)):
        done = build("teacher_student", tmp_path / name, "--rows", rows, "--shards", shards,
                     "--validation-rows", 10, ranks=ranks)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("rows in") == 2
    first = rows_of(tmp_path / "a", "train")
    for name in "bc":
        for ours, theirs in zip(first, rows_of(tmp_path / name, "train"), strict=True):
            np.testing.assert_array_equal(ours, theirs[:2500])


def test_a_builder_can_run_again_and_leaves_no_stale_shard(tmp_path):
    for shards in (5, 2):
        build("teacher_student", tmp_path, "--rows", 100, "--shards", shards, "--validation-rows", 10)
    names = ["train-00000.h5", "train-00001.h5", "validation-00000.h5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_burgers_solves_its_equation(modules):
    solution = modules("burgers").solution
    rng = np.random.default_rng(0)
    x, t, v = rng.uniform(-0.95, 0.95, 400), rng.uniform(0.05, 0.95, 400), 10.0 ** rng.uniform(-2.4, -1, 400)
    h = 1e-4
    u = solution(x, t, v)
    u_t = (solution(x, t + h, v) - solution(x, t - h, v)) / (2 * h)
    right, left = solution(x + h, t, v), solution(x - h, t, v)
    u_x, u_xx = (right - left) / (2 * h), (right - 2 * u + left) / h**2
    terms = np.abs(u_t) + np.abs(u * u_x) + np.abs(v * u_xx)
    assert (np.abs(u_t + u * u_x - v * u_xx) / (terms + 0.1)).max() < 1e-3
    np.testing.assert_allclose(solution(x, np.zeros(400), v), -np.sin(np.pi * x), atol=1e-12)
    assert np.abs(solution(np.array([0.0, 1.0, -1.0]), np.full(3, 0.5), np.full(3, 0.01))).max() < 1e-9


def test_burgers_file(tmp_path, modules):
    assert build("burgers", tmp_path, "--rows", 300, "--validation-rows", 20).returncode == 0
    inputs, targets = rows_of(tmp_path, "train")
    assert (inputs.min(0) >= [-1, 0, -2.4001]).all()
    assert (inputs.max(0) <= [1, 1, -1]).all()
    x, t, log_viscosity = inputs.T.astype("f8")
    exact = modules("burgers").solution(x, t, 10.0**log_viscosity)
    np.testing.assert_allclose(targets[:, 0], exact, atol=1e-6)


def test_real_fluid(tmp_path):
    if importlib.util.find_spec("CoolProp") is None:
        done = build("realfluid", tmp_path)
        assert (done.returncode, done.stdout) == (4, "")
        assert "pip install CoolProp" in done.stderr
        return
    assert build("realfluid", tmp_path, "--rows", 200, "--validation-rows", 20).returncode == 0
    inputs, targets = rows_of(tmp_path, "train")
    ideal = 10.0 ** inputs[:, 1] * 0.0440098 / (8.314462618 * inputs[:, 0])  # kg/m3
    thin = inputs[:, 1] < 5.3
    np.testing.assert_allclose(10.0 ** targets[thin, 0], ideal[thin], rtol=0.02)


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    assert build("digits", tmp_path).returncode == 0
    inputs, labels = rows_of(tmp_path, "train")
    held, held_labels = rows_of(tmp_path, "validation")
    assert (inputs.dtype, inputs.shape[1:], len(labels) + len(held_labels)) == (np.uint8, (8, 8), 1797)
    assert set(labels) == set(held_labels) == set(range(10))
    assert inputs.max() == 16
    assert 0.15 < len(held) / 1797 < 0.25


def test_fashion_from_idx_files(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28)).astype("u1")
    labels = (np.arange(30) % 10).astype("u1")
    for prefix, count in (("train", 30), ("t10k", 10)):
        for kind, array in (("images-idx3", images[:count]), ("labels-idx1", labels[:count])):
            head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    done = build("fashion_mnist", tmp_path / "out", "--source", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for part, count in (("train", 30), ("test", 10)):
        held, held_labels = rows_of(tmp_path / "out", part)
        np.testing.assert_array_equal(held, images[:count])
        np.testing.assert_array_equal(held_labels, labels[:count])
    missing = build("fashion_mnist", tmp_path / "out", "--source", tmp_path / "gone")
    assert missing.returncode == 3
    assert "apt-get install dataset-fashion-mnist" in missing.stderr


@pytest.mark.parametrize("path", sorted(DATASETS.glob("*.toml")), ids=lambda path: path.stem)
def test_ready_runs_are_valid_and_stay_in_their_folder(path):
    config = RunConfig.load(path)
    name = path.stem
    assert config.run.output == str(DATASETS / "runs" / name)
    for patterns in (config.data.train, config.data.validation):
        assert str(patterns).startswith(str(DATASETS / "shards" / name) + "/")
    assert (DATASETS / f"{'fashion_mnist' if name == 'fashion' else name}.py").exists()
    if name == "fashion":
        document = tomllib.loads(path.read_text())
        assert document["model"]["layers"] == [784, 256, 128, 10]
        assert (config.optimizer.name, config.data.batch, config.run.epochs) == ("adam", 256, 8)


def test_a_run_of_digits_learns(tmp_path):
    pytest.importorskip("sklearn")
    assert build("digits", tmp_path / "digits").returncode == 0
    done = run_distmlp(
        ["train", DATASETS / "digits.toml", "--output", tmp_path / "run", "--set", "run.epochs=6",
         "--set", f"data.train={tmp_path}/digits/train-*.h5",
         "--set", f"data.validation={tmp_path}/digits/validation-*.h5"], 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(summary)["validation"]["accuracy"] > 0.93


def test_prediction_against_truth_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    build("teacher_student", tmp_path / "s", "--rows", 2000, "--validation-rows", 300, "--features", 4)
    done = run_distmlp(
        ["train", DATASETS / "teacher_student.toml", "--output", tmp_path / "run", "--set", "run.epochs=3",
         "--set", f"data.train={tmp_path}/s/train-*.h5", "--set", f"data.validation={tmp_path}/s/validation-*.h5"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = [sys.executable, DATASETS / "plot.py", tmp_path / "run", f"{tmp_path}/s/validation-*.h5"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "p.png"], capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    errors = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines()[:2]]
    assert all(0.1 < error < 0.7 for error in errors)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
