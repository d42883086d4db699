"""The checkpoint file: what it holds, that it is complete or absent, and what damage and forgery lead to."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distmlp.checkpoint import load, save
from distmlp.checkpoint.seal import SEAL_BYTES
from distmlp.engine import Standardization
from distmlp.engine.optimizers import slot_names
from distmlp.errors import CheckpointError
from tests.checkpoint_samples import assert_equal, configuration, reseal, sample, write
from tests.faults.problem import record

OPTIMIZERS = ("sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw", "lamb")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    widths=st.lists(st.integers(1, 70), min_size=2, max_size=6),
    optimizer=st.sampled_from(OPTIMIZERS),
    ema_decay=st.sampled_from((0.0, 0.99)),
    seed=st.integers(0, 2**63 - 1),
    best=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    figures=st.tuples(*[st.integers(0, 2**62)] * 3),
    targets=st.booleans(),
)
def test_what_is_saved_is_what_is_loaded(tmp_path, widths, optimizer, ema_decay, seed, best, figures, targets):
    config = configuration(tuple(widths), optimizer, ema_decay, seed=seed)
    saved = sample(
        config, step=figures[0], epoch=figures[1], stale_validations=figures[2], best=best, validation=best,
        history=[{"step": 3, "changes": {"run.keep": [1, 2]}}], epoch_loss=0.25, epoch_weight=3.0,
    )  # fmt: skip
    if targets:
        width = widths[-1]
        saved.standardization = Standardization(None, (np.linspace(0, 1, width), np.full(width, 2.5)))
    save(tmp_path / "c.h5", saved, saved.network)
    assert_equal(load(tmp_path / "c.h5"), saved)


def test_layout_is_the_contract(tmp_path):
    checkpoint = sample(configuration((5, 7, 3), "adam", 0.9), best=0.5)
    with h5py.File(write(tmp_path / "c.h5", checkpoint)) as file:
        found = {}
        file.visititems(
            lambda name, item: found.update({name: (item.shape, item.dtype.str)}) if hasattr(item, "shape") else None
        )
        layers = {"layer_0/weight": (5, 7), "layer_0/bias": (7,), "layer_1/weight": (7, 3), "layer_1/bias": (3,)}
        groups = ("model", "optimizer/first_moment", "optimizer/second_moment", "ema")
        expected = {f"{group}/{name}": (shape, "<f4") for group in groups for name, shape in layers.items()}
        expected |= {f"standardization/inputs/{name}": ((5,), "<f8") for name in ("mean", "deviation")}
        assert found == expected
        weight, bias = checkpoint.network.views(checkpoint.state.parameters)[1]
        np.testing.assert_array_equal(file["model/layer_1/weight"], weight)
        np.testing.assert_array_equal(file["model/layer_1/bias"], bias)
        attributes = dict(file.attrs)
        assert attributes["format"] == "distmlp-checkpoint"
        assert [attributes[n] for n in ("format_version", "step", "epoch", "step_in_epoch", "seed")] == [1, 18, 1, 4, 0]
        assert attributes["config"] == checkpoint.config.to_toml()
        assert json.loads(attributes["versions"]) == {"distmlp": "0"}


def test_sha256_is_the_documented_one(tmp_path):
    digest = hashlib.sha256()
    with h5py.File(write(tmp_path / "c.h5")) as file:
        for name in sorted(set(file.attrs) - {"sha256"}):
            value = file.attrs[name]
            digest.update(
                f"attribute {name} {json.dumps(value.item() if hasattr(value, 'item') else value)}\n".encode()
            )
        datasets = []
        file.visit(lambda name: datasets.append(name) if isinstance(file[name], h5py.Dataset) else None)
        for name in sorted(f"/{name}" for name in datasets):
            data = file[name][...]
            digest.update(f"dataset {name} {data.dtype.str} {json.dumps(data.shape)}\n".encode() + data.tobytes())
        assert file.attrs["sha256"] == digest.hexdigest()


def test_same_state_same_bytes(tmp_path):
    assert write(tmp_path / "a.h5").read_bytes() == write(tmp_path / "b.h5").read_bytes()


def test_a_long_configuration_is_kept(tmp_path):
    document = configuration().to_dict()
    document["data"]["train"] = [f"/somewhere/shard-{n:05d}.h5" for n in range(5000)]  # beyond HDF5's 64 KiB attributes
    saved = sample(type(configuration()).parse(document))
    assert load(write(tmp_path / "c.h5", saved)).config == saved.config


def test_file_obeys_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        assert write(tmp_path / "c.h5").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_state_that_does_not_fit_its_configuration_is_not_written(tmp_path):
    checkpoint = sample()
    del checkpoint.state.slots["first_moment"]
    with pytest.raises(ValueError, match="tensors"):
        save(tmp_path / "c.h5", checkpoint, checkpoint.network)
    assert not list(tmp_path.iterdir())


# Damage: what each does to the file, and words the message must hold.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "empty"),
    "shorter than the seal": (lambda p: os.truncate(p, 100), "cut short: 100 bytes"),
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 1), "cut short"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "grown"),
    "zeroed at the start": (lambda p: _poke(p, 0, bytes(4096)), "damaged at its start"),
    "seal's padding": (lambda p: _poke(p, 500, b"x"), "first 512 bytes"),
    "superblock": (lambda p: _poke(p, SEAL_BYTES + 13, b"\xff"), "SHA-256"),
    "a weight": (lambda p: _poke(p, p.stat().st_size - 5, b"\xee"), "content does not match the attribute sha256"),
    "no optimizer": (lambda p: _edit(p, lambda f: f.__delitem__("optimizer")), "/optimizer is missing"),
    "no step": (lambda p: _edit(p, lambda f: f.attrs.__delitem__("step")), "attribute step is missing"),
    "newer format": (lambda p: _edit(p, lambda f: f.attrs.__setitem__("format_version", 7)), "version 7 is newer"),
    "newer seal": (lambda p: p.write_bytes(p.read_bytes().replace(b'"format_version": 1', b'"format_version": 8')),
                   "format_version 8 is newer"),
    "text": (lambda p: p.write_text("hello" * 500), "not a checkpoint"),
    "other HDF5": (lambda p: _edit_new(p), "not a checkpoint of distmlp"),
    "directory": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
    "absent": (lambda p: p.unlink(), "No such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path, case):
    path = write(tmp_path / "step-00000018.h5")
    damage, words = DAMAGE[case]
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def _poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET)
        file.write(data)


def _edit(path: Path, change: Callable[[h5py.File], object]) -> None:
    with h5py.File(path, "r+") as file:
        change(file)


def _edit_new(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["inputs"] = np.zeros(3)


# Forgeries: every one gets a valid seal, so that only the checks of the structure stand between it and us.


def _many_attributes(file: h5py.File) -> None:
    for index in range(10_000):
        file.attrs[f"a{index}"] = index


def _replace(file: h5py.File, name: str, make: Callable[[h5py.File, str], object]) -> None:
    del file[name]
    make(file, name)


def _put(name: str, value: Callable[[h5py.File], object]) -> Callable[[h5py.File], None]:
    return lambda file: _replace(file, name, lambda f, n: f.__setitem__(n, value(f)))


def _external_storage(file: h5py.File, name: str) -> None:
    file.create_dataset(name, (7,), "<f4", external=[("/etc/passwd", 0, 28)])


def _virtual(file: h5py.File, name: str) -> None:
    layout = h5py.VirtualLayout((7,), "<f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (7,))
    file.create_virtual_dataset(name, layout)


def _wide(file: h5py.File) -> None:
    text = file.attrs["config"].replace("    7,\n", "    16777216,\n    16777216,\n")
    file.attrs["config"] = text


BIAS = "model/layer_0/bias"
FORGERIES: dict[str, tuple[Callable[[h5py.File], object], str]] = {
    "external link": (_put(BIAS, lambda f: h5py.ExternalLink("/etc/passwd", "/x")),
                      "links are refused"),
    "soft link": (_put(BIAS, lambda f: h5py.SoftLink("/model")), "links are refused"),
    "soft link for a group": (_put("optimizer", lambda f: h5py.SoftLink("/model")),
                              "links are refused"),
    "cyclic group": (lambda f: f["model"].__setitem__("loop", f["/"]), "does not belong"),
    "cyclic group in place of a layer": (_put("model/layer_0", lambda f: f["/model"]),
                                         "/model/layer_0/bias is missing"),
    "external storage": (lambda f: _replace(f, BIAS, _external_storage), "storage is refused"),
    "virtual dataset": (lambda f: _replace(f, BIAS, _virtual), "storage is refused"),
    "chunked": (lambda f: _replace(f, BIAS, lambda g, n: g.create_dataset(n, (7,), "<f4", chunks=True)), "is refused"),
    "no storage": (lambda f: _replace(f, BIAS, lambda g, n: g.create_dataset(n, (7,), "<f4")), "holds no data"),
    "huge dataset": (lambda f: _replace(f, BIAS, lambda g, n: g.create_dataset(n, (1 << 60,), "<f4", chunks=(1024,))),
                     "refused"),
    "huge network": (_wide, "the file has"),
    "other shape": (_put(BIAS, lambda f: np.zeros(6, "<f4")), "(6,)"),
    "other type": (_put(BIAS, lambda f: np.zeros(7, "<f8")), "float64"),
    "group for dataset": (lambda f: _replace(f, BIAS, lambda g, n: g.create_group(n)), "should be a dataset"),
    "dataset for group": (_put("model", lambda f: np.zeros(3)), "should be a group"),
    "more datasets": (lambda f: f.__setitem__("more", np.zeros(3)), "'more', which does not belong"),
    "10,000 attributes": (_many_attributes, "attributes at the root"),
    "unknown attribute": (lambda f: f.attrs.__setitem__("x", 1), "attribute x"),
    "attribute on a group": (lambda f: f["model"].attrs.__setitem__("x", 1), "does not belong|do not belong"),
    "array attribute": (lambda f: f.attrs.__setitem__("step", np.zeros(4000, "i8")), "attribute step"),
    "text for a number": (lambda f: f.attrs.__setitem__("step", "3"), "attribute step"),
    "number for a text": (lambda f: f.attrs.__setitem__("config", 3), "attribute config"),
    "negative step": (lambda f: f.attrs.__setitem__("step", -1), "negative"),
    "not a configuration": (lambda f: f.attrs.__setitem__("config", "hello"), "attribute config"),
    "unknown key": (lambda f: f.attrs.__setitem__("config", f.attrs["config"] + "x = 1\n"), "unknown key"),
    "wrong hash": (lambda f: f.attrs.__setitem__("step", 99), "does not match the attribute sha256"),
    "another format": (lambda f: f.attrs.__setitem__("format", "other"), "attribute format"),
    "newer version": (lambda f: f.attrs.__setitem__("format_version", 3), "format_version 3 is newer"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGERIES)
def test_forgery_is_refused_whatever_its_seal(tmp_path, case):
    path = write(tmp_path / "c.h5")
    forge, words = FORGERIES[case]
    _edit(path, forge)
    reseal(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert any(word in str(caught.value) for word in words.split("|")), str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB: no memory for what is claimed


def mutations(path: Path, count: int, seed: int) -> list[bytes]:
    """Copies of a file with flipped, zeroed, repeated, removed or foreign bytes, most of them in its structure."""
    original, rng, made = path.read_bytes(), random.Random(seed), []
    with h5py.File(path) as file:
        structure = file["model/layer_0/weight"].id.get_offset()
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8))):
            end = rng.choice((96, SEAL_BYTES, SEAL_BYTES + 96, structure, len(data)))
            at = rng.randrange(min(end, len(data)))
            kind = rng.randrange(6)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, rng.randbytes(8)))
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                data[at:at] = data[at : at + rng.randrange(1, 600)]
            elif kind == 4:
                del data[at : at + rng.randrange(1, 600)]
            else:
                data[at] = rng.randrange(256)
            if not data:
                break
        made.append(bytes(data))
    return [data for data in made if data != original]


def _load_mutations(tmp_path: Path, count: int, *, sealed: bool) -> list[str]:
    """Load mutated checkpoints in one child process; with `sealed` each gets a valid seal first."""
    path = write(tmp_path / "c.h5", sample(configuration((5, 7, 3), "adam", 0.9)))
    folder = tmp_path / "mutated"
    folder.mkdir()
    for index, data in enumerate(mutations(path, count, seed=1)):
        mutated = folder / f"{index:05d}.h5"
        mutated.write_bytes(data)
        if sealed:
            reseal(mutated)
    script = (
        "import sys, resource\n"
        "from pathlib import Path\n"
        "from distmlp.checkpoint import load\n"
        "from distmlp.errors import CheckpointError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    print(path.name, end=' ', flush=True)\n"
        "    try:\n"
        "        loaded = load(path, explain=False)\n"
        "        print('loaded', loaded.network.sha256(loaded.state.parameters))\n"
        "    except CheckpointError as error:\n"
        "        print('refused' if str(path) in str(error) else f'no name: {error}')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.returncode == 0, f"{child.stdout[-200:]}\n{child.stderr[-2000:]}"
    shutil.rmtree(folder)
    return [line.split(" ", 1)[1] for line in child.stdout.splitlines()]


def test_mutated_checkpoints_are_refused(tmp_path):
    outcomes = _load_mutations(tmp_path, 150, sealed=False)
    assert len(outcomes) > 130
    assert set(outcomes) == {"refused"}


def test_mutations_under_a_valid_seal_are_refused_or_harmless(tmp_path):
    """libhdf5 meets these bytes: it must not crash, and what is loaded must be what was saved (gaps were hit)."""
    outcomes = _load_mutations(tmp_path, 150, sealed=True)
    saved = sample(configuration((5, 7, 3), "adam", 0.9))
    assert set(outcomes) == {"refused", f"loaded {saved.network.sha256(saved.state.parameters)}"}


@pytest.mark.full
def test_two_thousand_mutations(tmp_path):
    plain, sealed = (Counter(_load_mutations(tmp_path, 2000, sealed=sealed)) for sealed in (False, True))
    saved = sample(configuration((5, 7, 3), "adam", 0.9))
    same = f"loaded {saved.network.sha256(saved.state.parameters)}"
    assert plain.keys() == {"refused"}
    assert sealed.keys() == {"refused", same}
    record(
        "mutated-checkpoints", files=plain.total(), refused=plain["refused"], files_with_forged_seal=sealed.total(),
        refused_with_forged_seal=sealed["refused"], loaded_unharmed=sealed[same],
    )  # fmt: skip


ENOLCK = r"""
#include <errno.h>
int flock(int fd, int operation) { (void)fd; (void)operation; errno = ENOLCK; return -1; }
"""


def test_file_systems_without_locks(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the shim")
    (tmp_path / "shim.c").write_text(ENOLCK)
    shim = tmp_path / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    script = (
        "import sys, fcntl\n"
        "from pathlib import Path\n"
        "from tests.checkpoint_samples import write\n"
        "from distmlp.checkpoint import load\n"
        "try:\n"
        "    fcntl.flock(0, fcntl.LOCK_SH); sys.exit('the shim is not in force')\n"
        "except OSError: pass\n"
        "load(write(Path(sys.argv[1])))\n"
    )
    for setting in ({}, {"HDF5_USE_FILE_LOCKING": "TRUE"}):
        child = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "c.h5")], capture_output=True, text=True, timeout=60,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(sys.path)} | setting,
        )  # fmt: skip
        assert child.returncode == 0, child.stderr


def test_slots_of_every_optimizer_have_their_place(tmp_path):
    for optimizer in OPTIMIZERS:
        with h5py.File(write(tmp_path / f"{optimizer}.h5", sample(configuration(optimizer=optimizer)))) as file:
            assert tuple(file.get("optimizer", ())) == slot_names(optimizer)
