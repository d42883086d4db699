"""Shards: everything that can be wrong is named before the first step; rows are found by their global number."""

import gzip
import itertools
import os
import re
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from data.samples import SOFTMAX, alone, names, on_ranks, open_shards, write_ids, write_shard

from distmlp.data.openfiles import OpenFiles
from distmlp.data.shards import Shards
from distmlp.errors import AgreedError, DataError

X = np.arange(24, dtype="f4").reshape(8, 3)
LABELS = np.arange(8) % 3


def test_rows_over_files_in_the_order_of_their_paths(tmp_path):
    inputs = write_ids(tmp_path, (5, 1, 9))
    shards = open_shards(tmp_path)
    assert (shards.rows, shards.features, shards.outputs, shards.labels) == (15, 3, 1, False)
    rows = shards.read(3, 14)
    np.testing.assert_array_equal(rows.inputs, inputs[3:14])
    np.testing.assert_array_equal(rows.targets, inputs[3:14, :1])
    assert rows.weights is None
    assert shards.locate([0, 5, 6, 14]) == "; ".join(
        f"{tmp_path}/part-0{n}.h5 {text}" for n, text in ((0, "row 0"), (1, "row 0"), (2, "rows 0, 8"))
    )


def test_images_are_flattened_and_keep_their_type(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 5)).astype("u1")
    write_shard(tmp_path / "a.h5", images, LABELS[:6], chunks=(4, 2, 5), compression="gzip")
    shards = open_shards(tmp_path, SOFTMAX)
    assert (shards.features, shards.outputs, shards.labels, shards.input_dtype) == (20, 3, True, np.uint8)
    np.testing.assert_array_equal(shards.read(1, 6).inputs, images.reshape(6, 20)[1:])


def test_files_of_different_number_types_and_layouts_go_together(tmp_path):
    write_shard(tmp_path / "a.h5", X.astype(">f8"), X[:, :2].astype("<f2"))
    write_shard(tmp_path / "b.h5", X.astype("<i2"), X[:, :2].astype(">f4"), chunks=(3, 2), compression="lzf")
    rows = open_shards(tmp_path).read(0, 16)
    np.testing.assert_array_equal(rows.inputs, np.concatenate([X, X]))
    assert rows.inputs.dtype == np.float64
    np.testing.assert_array_equal(rows.targets, np.concatenate([X, X])[:, :2])


@pytest.mark.parametrize("order", list(itertools.permutations(("<f4", "<f8", ">f8", "<i2"))))
def test_files_of_all_types_in_any_order(tmp_path, order):
    """The common type is that of one of them, whose rows are read as they lie, wherever it stands."""
    for number, dtype in enumerate(order):
        options = {"chunks": (3, 3)} if number % 2 else {}
        write_shard(tmp_path / f"{number}.h5", (X + 10 * number).astype(dtype), X[:, :1], **options)
    found = open_shards(tmp_path).read(0, 32).inputs
    wanted = np.concatenate([(X + 10 * k).astype(dtype).astype("f8") for k, dtype in enumerate(order)])
    np.testing.assert_array_equal(found, wanted)


def test_one_target_column_however_it_is_shaped(tmp_path):
    write_shard(tmp_path / "a.h5", X[:, 0], X[:, 1])
    rows = open_shards(tmp_path).read(0, 8)
    assert rows.inputs.shape == rows.targets.shape == (8, 1)
    write_shard(tmp_path / "a.h5", X, LABELS[:, None])
    assert open_shards(tmp_path, SOFTMAX).read(0, 8).targets.shape == (8,)
    write_shard(tmp_path / "a.h5", X, LABELS < 1)
    shards = open_shards(tmp_path, "binary_cross_entropy")
    assert shards.read(0, 8).targets.tolist() == [[1], [0], [0], [1], [0], [0], [1], [0]]


def test_one_hot_targets_and_weights(tmp_path):
    path = write_shard(tmp_path / "a.h5", X, np.eye(3, dtype="u1")[LABELS])
    with h5py.File(path, "a") as file:
        file["deep/weight"] = np.linspace(0, 1, 8)
    shards = open_shards(tmp_path, SOFTMAX, (3, 5, 3), sample_weights="deep/weight")
    assert not shards.labels
    np.testing.assert_array_equal(shards.read(2, 4).weights, np.linspace(0, 1, 8)[2:4])


@pytest.mark.parametrize(
    ("loss", "value", "said"),
    [
        ("binary_cross_entropy", 1.5, "must be between 0 and 1"), ("binary_cross_entropy", -0.5, "from -0.5 to 1"),
        (SOFTMAX, -0.5, "targets of softmax_cross_entropy must not be below 0"), (SOFTMAX, 7, ""),  # of several draws
    ],
)  # fmt: skip
def test_targets_that_are_no_probabilities(tmp_path, loss, value, said):
    write_shard(tmp_path / "a.h5", X, np.where(np.eye(3)[LABELS] > 0, 1, [0, 0, value]))
    if said:
        with pytest.raises(DataError, match=said):
            open_shards(tmp_path, loss, (3, 5, 3))
    else:
        open_shards(tmp_path, loss, (3, 5, 3))


def test_prediction_needs_no_targets(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["inputs"] = X
    shards = open_shards(tmp_path, "", targets="nothing")
    assert shards.read(0, 8).targets.shape == (8, 0)


def vary(**changes):
    """Writes a shard in which some datasets differ; a value may be a function of the file."""

    def write(path):
        with h5py.File(path, "w") as file:
            for name, value in ({"inputs": X, "targets": LABELS, "w": np.ones(8)} | changes).items():
                if callable(value):
                    value(file)
                elif value is not None:
                    file[name] = value

    return write


def compound(file):
    file["inputs"] = np.zeros(8, [("a", "f4"), ("b", "f4")])


def unknown_filter(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 3))
    plist.set_filter(40001, h5py.h5z.FLAG_OPTIONAL, (2, 2, 4, 48))
    space, kind = h5py.h5s.create_simple((8, 3)), h5py.h5t.py_create(np.dtype("f4"))
    dataset = h5py.h5d.create(file.id, b"inputs", kind, space, plist)
    for start in (0, 4):
        dataset.write_direct_chunk((start, 0), b"\0" * 48, 0)


def external_storage(file):
    file.create_dataset("inputs", (8, 3), "f4", external=[("raw.bin", 0, 96)])


def virtual(file):
    layout = h5py.VirtualLayout((8, 3), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "inputs", (8, 3))
    file.create_virtual_dataset("inputs", layout)


def circle(file):
    file["inputs"] = h5py.SoftLink("/other")
    file["other"] = h5py.SoftLink("/inputs")


def absurd(file):
    file.create_dataset("inputs", (1 << 50, 3), "f4", chunks=(1 << 10, 3))


def own_format(file):
    kind = h5py.h5t.IEEE_F32LE.copy()  # bfloat16
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    h5py.h5d.create(file.id, b"inputs", kind, h5py.h5s.create_simple((8, 3)))


def references(file):
    file.create_dataset("inputs", (8, 3), dtype=h5py.ref_dtype)


def ragged(file):
    file.create_dataset("inputs", (8,), dtype=h5py.vlen_dtype("f4"))


def arrays(file):
    kind = h5py.h5t.array_create(h5py.h5t.IEEE_F32LE, (3,))
    h5py.h5d.create(file.id, b"inputs", kind, h5py.h5s.create_simple((8,)))


def bits(file):
    h5py.h5d.create(file.id, b"inputs", h5py.h5t.STD_B8LE, h5py.h5s.create_simple((8, 3)))


def times(file):
    file["inputs"] = np.zeros((8, 3), "M8[s]").astype(h5py.opaque_dtype("M8[s]"))


def open_to_write(path):
    """As a program leaves it that was killed."""
    with h5py.File(path.with_suffix(".tmp"), "w", libver="latest") as file:
        file["inputs"], file["targets"], file["w"] = X, LABELS, np.ones(8)
        file.flush()
        shutil.copy(path.with_suffix(".tmp"), path)


def family(path):
    with h5py.File(path.with_name("%d.family"), "w", driver="family", memb_size=8192) as file:
        file["inputs"] = np.zeros((999, 3))
    path.with_name("0.family").rename(path)


BAD = {
    "name": (vary(inputs=None, features=X), ["no dataset `inputs`", "`features` (8, 3) float32", "data.inputs"]),
    "nested": (vary(inputs=None, **{"a/b": X}), ["no dataset `inputs`", "`a/b` (8, 3) float32"]),
    "group": (vary(inputs=None, **{"inputs/x": X}), ["`inputs` is a group", "`inputs/x` (8, 3)"]),
    "empty file": (vary(inputs=None, targets=None, w=None), ["the file holds no dataset"]),
    "complex": (vary(inputs=X.astype("c8")), ["complex64", "1 to 8 bytes"]),
    "strings": (vary(targets=[b"cat"] * 8), ["`targets` holds strings", "np.unique"]),
    "strings of any length": (vary(targets=["cat"] * 8), ["`targets` holds strings"]),
    "references": (vary(inputs=references), ["`inputs` holds references to other objects"]),
    "ragged": (vary(inputs=ragged), ["`inputs` holds rows of varying length"]),
    "arrays": (vary(inputs=arrays), ["`inputs` holds an array type (3,) in every element"]),
    "bits": (vary(inputs=bits), ["`inputs` holds bits (size 1"]),
    "times": (vary(inputs=times), ["`inputs` holds datetime64[s]", "astype(np.int64)"]),
    "sparse": (vary(inputs=None, **{f"inputs/{n}": X[0] for n in ("data", "indices", "indptr")}), ["a sparse matrix"]),
    "transposed": (vary(inputs=X.T), ["`inputs` has 3 rows, but `targets` has 8", "looks transposed"]),
    "open to write": (open_to_write, ["a program has it open to write", "h5clear -s"]),
    "compound": (
        vary(inputs=compound),
        ["records with the fields `a`, `b`", "structured_to_unstructured"],
    ),
    "long double": (vary(inputs=X.astype(np.longdouble)), ["`inputs` holds float128"]),
    "bfloat16": (vary(inputs=own_format), ["number format of its own"]),
    "scalar": (vary(inputs=np.float32(1)), ["a single value"]),
    "null": (vary(inputs=h5py.Empty("f4")), ["`inputs` has no rows"]),
    "no columns": (vary(inputs=np.empty((8, 0), "f4")), ["rows without numbers"]),
    "rows": (vary(targets=LABELS[:7]), ["`inputs` has 8 rows, but `targets` has 7"]),
    "weight rows": (vary(w=np.ones(9)), ["`w` has 9"]),
    "weight width": (vary(w=np.ones((8, 2))), ["expected one weight a row"]),
    "width": (vary(inputs=X[:, :2]), ["2 numbers a row, but the network takes 3"]),
    "filter": (vary(inputs=unknown_filter), ["filter 40001", "hdf5plugin"]),
    "external link": (vary(inputs=lambda f: f.update(inputs=h5py.ExternalLink("o.h5", "/x"))), ["another file (o.h5)"]),
    "external storage": (vary(inputs=external_storage), ["external storage"]),
    "virtual": (vary(inputs=virtual), ["is virtual"]),
    "circle": (vary(inputs=circle), ["in a circle"]),
    "dangling": (vary(inputs=lambda f: f.update(inputs=h5py.SoftLink("/gone"))), ["no dataset `inputs`"]),
    "absurd": (vary(inputs=absurd), ["claims (1125899906842624, 3)", "cannot hold"]),
    "labels 1 to C": (vary(targets=LABELS + 1), ["class labels from 1 to 3", "expected 0 to 2", "shifted"]),
    "label -1": (vary(targets=LABELS - 1), ["class labels from -1 to 1"]),
    "label 255": (vary(targets=np.where(LABELS, LABELS, 255).astype("u1")), ["class labels from 1 to 255"]),
    "float labels": (vary(targets=LABELS + 0.5), ["class labels from 0.5 to 2.5 stored as float64"]),
    "huge label": (vary(targets=np.full(8, (1 << 64) - 1, "u8")), ["to 18446744073709551615"]),
    "weights": (vary(w=np.linspace(-1, 1, 8)), ["values from -1 to 1; sample weights must not be below 0"]),
    "family": (family, ["one of a family of files", "h5repart"]),
    "not HDF5": (lambda path: path.write_bytes(b"x,y\n1,2\n" * 100), ["not an HDF5 file", "data convert"]),
    "empty": (lambda path: path.write_bytes(b""), ["is empty (0 bytes)"]),
    "zeros": (lambda path: path.write_bytes(bytes(9000)), ["begins with zeros"]),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"x" * 99)), ["compressed with gzip", "gunzip"]),
    "npz": (lambda path: np.savez(path.open("wb"), x=X), ["an NPZ file"]),
    "npy": (lambda path: np.save(path.open("wb"), X), ["an NPY file"]),
    "netCDF-3": (lambda path: path.write_bytes(b"CDF\x01" + bytes(99)), ["netCDF-3 file", "nccopy"]),
    "web page": (lambda path: path.write_bytes(b"\n<!DOCTYPE HTML>\n<html>"), ["is a web page"]),
    "LFS": (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), ["git lfs pull"]),
    "directory": (lambda path: path.mkdir(), ["is a directory", "*.h5"]),
    "fifo": (lambda path: os.mkfifo(path), ["not a regular file"]),
    "broken link": (lambda path: path.symlink_to("gone.h5"), ["no such file"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_shard_is_named_with_what_was_expected(tmp_path, case):
    write, expected = BAD[case]
    vary()(tmp_path / "a.h5")
    write(tmp_path / "b.h5")
    with pytest.raises(DataError) as caught:
        open_shards(tmp_path, SOFTMAX, (3, 4, 3), sample_weights="w")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/b.h5: ")
    assert "a.h5" not in message
    for text in expected:
        assert text in message


def test_every_cut_of_a_file_is_refused(tmp_path):
    vary()(tmp_path / "a.h5")
    whole = (tmp_path / "a.h5").read_bytes()
    for length in [*range(0, 96, 7), *range(96, len(whole), 311), len(whole) - 1]:
        (tmp_path / "a.h5").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"truncated: \d+ bytes of the \d+|is empty|not an HDF5 file|cannot read"):
            open_shards(tmp_path, SOFTMAX)


def test_a_shorter_dataset_than_its_header_claims(tmp_path):
    """The size in the header is checked against the file before memory is asked for."""
    path = tmp_path / "a.h5"
    write_shard(path, X, X)
    data = bytearray(path.read_bytes())
    at = data.index(np.array([8, 3], "<u8").tobytes())  # the dataspace of the inputs
    data[at : at + 8] = np.array([1 << 40], "<u8").tobytes()
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"claims|cannot read its structure"):
        open_shards(tmp_path)


def test_all_bad_files_are_named_at_once_on_every_rank(tmp_path):
    for number in range(7):
        vary()(tmp_path / f"{number}.h5")
    vary(targets=LABELS + 5)(tmp_path / "2.h5")
    (tmp_path / "3.h5").write_bytes(b"?")
    vary(inputs=X[:, :2])(tmp_path / "5.h5")
    for ranks in (1, 3):
        told = on_ranks(ranks, lambda world: _refusal(tmp_path, world))
        assert len(set(told)) == 1
        assert re.findall(r"(\d)\.h5: ", told[0]) == ["2", "3", "5"]
        assert "3 of 7 files cannot be used" in told[0]
        assert "2.h5: dataset `targets`: class labels from 5 to 7" in told[0]


def _refusal(folder, world):
    with pytest.raises((DataError, AgreedError)) as caught:
        open_shards(folder, SOFTMAX, (3, 3), world)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_ranks_agree_on_what_there_is(tmp_path):
    write_ids(tmp_path, (5, 1, 9))
    found = on_ranks(4, lambda world: open_shards(tmp_path, world=world))
    assert {(shards.rows, shards.features, shards.paths) for shards in found} == {(15, 3, found[0].paths)}
    vary(targets=np.array([0, 0, 0, 0, 0, 0, 0, 6]))(tmp_path / "part-00.h5")
    for name in "12":
        vary()(tmp_path / f"part-0{name}.h5")
    assert {shards.outputs for shards in on_ranks(4, lambda world: open_shards(tmp_path, SOFTMAX, world=world))} == {7}


def test_widths_that_differ_between_files(tmp_path):
    vary()(tmp_path / "a.h5")
    vary(inputs=X[:, :2])(tmp_path / "b.h5")
    with pytest.raises(DataError, match=r"b\.h5: dataset `inputs` has rows of 2 numbers, but .*a\.h5 has 3"):
        open_shards(tmp_path)


def test_columns_in_another_order(tmp_path):
    """Where files name their columns: an attribute, a dimension scale, or what pandas writes beside them."""

    def write(path, names, how):
        with h5py.File(path, "w") as file:
            file["x/block0_values"], file["targets"] = X, LABELS
            inputs = file["x/block0_values"]
            if how == "attribute":
                inputs.attrs["columns"] = names
            elif how == "scale":
                file["names"] = names
                file["names"].make_scale("names")
                inputs.dims[1].attach_scale(file["names"])
            elif how == "pandas":
                file["x/block0_items"] = np.array(names, "S")

    hows = ("attribute", "scale", "pandas")
    for how, other in itertools.product(hows, hows):
        write(tmp_path / "a.h5", ["p", "q", "r"], how)
        write(tmp_path / "b.h5", ["p", "q", "r"], other)
        write(tmp_path / "c.h5", [], "none")
        assert open_shards(tmp_path, inputs="x/block0_values").rows == 24
        write(tmp_path / "b.h5", ["p", "r", "q"], other)
        write(tmp_path / "c.h5", ["p", "q", "s"], other)
        with pytest.raises(DataError) as caught:
            open_shards(tmp_path, inputs="x/block0_values")
        lines = str(caught.value).splitlines()
        there = f"than {tmp_path}/a.h5: column"
        assert f"its columns in another order {there} 1 is `r`, there it is `q`" in lines[1]
        assert f"other columns {there} 2 is `s`, there it is `r`" in lines[2]


def test_names_that_are_none_do_no_harm(tmp_path):
    for name, value in (("columns", np.zeros(1_000_000)), ("names", [1, 2, 3]), ("feature_names", "a,b,c")):
        with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
            file["inputs"], file["targets"] = X, LABELS
            file["inputs"].attrs[name] = value
            file["inputs"].attrs["columns of old"] = ["a", "b"]
        assert open_shards(tmp_path).files[0]["inputs"].columns == ()


def test_a_file_that_is_written_and_may_be_read_meanwhile(tmp_path):
    """HDF5's single-writer-multiple-readers mode: the rows that are there when training begins."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        inputs = file.create_dataset("inputs", data=X, chunks=(4, 3), maxshape=(None, 3))
        targets = file.create_dataset("targets", data=LABELS, chunks=(4,), maxshape=(None,))
        file.swmr_mode = True
        file.flush()
        shards = open_shards(tmp_path)
        for dataset in (inputs, targets):
            dataset.resize(16, axis=0)
            dataset[8:] = 7
            dataset.flush()
        assert shards.rows == 8
        np.testing.assert_array_equal(shards.read(0, 8).inputs, X)
        assert open_shards(tmp_path).rows == 16


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("none-*.h5", "matches no file; the folder holds a.h5"),
        ("b.h5", "no such file; the folder holds a.h5"),
        ("gone/*.h5", "the folder does not exist"),
    ],
)
def test_patterns_that_match_nothing(tmp_path, pattern, text):
    vary()(tmp_path / "a.h5")
    with pytest.raises(DataError, match=re.escape(text)):
        Shards.open(names(tmp_path / pattern), alone(), loss="mse")


def test_no_rows_at_all(tmp_path):
    write_shard(tmp_path / "a.h5", X[:0], X[:0])
    with pytest.raises(DataError, match="not one row"):
        open_shards(tmp_path)
    write_shard(tmp_path / "b.h5", X, X)
    assert open_shards(tmp_path).rows == 8


def test_a_soft_link_and_a_path_inside_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/er/x"] = X
        file["deep/inputs"] = h5py.SoftLink("er/x")
        file["targets"] = X
    shards = open_shards(tmp_path, inputs="/deep/inputs")
    np.testing.assert_array_equal(shards.read(0, 8).inputs, X)


def test_no_permission(tmp_path):
    vary()(tmp_path / "a.h5")
    (tmp_path / "a.h5").chmod(0)
    tmp_path.chmod(0o755)
    script = (
        "import os, sys; from distmlp.data.inspection import first_look; os.geteuid() or os.setuid(65534); "
        "print(first_look(sys.argv[1]))"
    )
    folder = tmp_path
    while folder != folder.parent and not folder.stat().st_mode & 0o001:
        folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
    told = subprocess.run([sys.executable, "-c", script, tmp_path / "a.h5"], capture_output=True, text=True)
    assert told.stdout == "cannot be read: permission denied\n", told.stderr


def test_open_files_are_bounded(tmp_path):
    write_ids(tmp_path, (2,) * 40)
    shards = open_shards(tmp_path)
    shards._reader._files = OpenFiles(16)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert shards.read(0, 80).inputs[:, 0].tolist() == list(range(80))
        assert len(os.listdir("/proc/self/fd")) - before <= 16
    assert 8 <= OpenFiles()._most <= 1024
