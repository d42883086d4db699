"""Other formats to shards: values, types, names, and what is refused."""

import gzip
import os
import resource
import struct
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
from data.samples import SOFTMAX, open_shards, write_shard

from distmlp.data.commands import convert_command
from distmlp.data.convert import convert
from distmlp.data.tables import Selection
from distmlp.data.writer import ShardWriter
from distmlp.errors import ConfigError, DataError
from tests.launching import run_distmlp

X = np.random.default_rng(0).integers(0, 256, (50, 4, 3)).astype("u1")
Y = np.arange(50) % 5


def content(path):
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file if isinstance(file[name], h5py.Dataset)}


def csv(folder, text, name="a.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_table_of_numbers(tmp_path):
    source = csv(tmp_path, "1,2,3\n4,5,6.5\n\n-1e3,0,7\n")
    done = convert([source], tmp_path / "o.h5")
    assert (done.paths, done.rows) == ([tmp_path / "o.h5"], {"": 3})
    held = content(tmp_path / "o.h5")
    assert held["inputs"].tolist() == [[1, 2], [4, 5], [-1000, 0]]
    assert held["targets"].tolist() == [[3], [6.5], [7]]
    assert held["inputs"].dtype == held["targets"].dtype == np.float32


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_names_categories_weights_and_quotes(tmp_path, delimiter):
    lines = ['size,kind,"the, class",w,note', '1.5,red,b,1,"x, y"', '"2.5",green,a,0.5,"two\nlines"', "3.5,red,a,2,z"]
    text = "\n".join(lines)
    if delimiter != ",":
        text = text.replace("the, class", "the~class").replace("x, y", "xy").replace(",", delimiter).replace("~", ", ")
    selection = Selection(
        inputs="size,kind", targets="the, class", weights="w",
        categories={"kind": ["green", "red"], "the, class": ["a", "b"]},
    )  # fmt: skip
    convert([csv(tmp_path, "\ufeff" + text)], tmp_path / "o.h5", selection=selection)
    held = content(tmp_path / "o.h5")
    assert held["inputs"].tolist() == [[1.5, 1], [2.5, 0], [3.5, 1]]
    assert held["targets"].tolist() == [1, 0, 0]
    assert held["targets"].dtype == np.int64
    assert held["sample_weights"].tolist() == [1, 0.5, 2]


@pytest.mark.parametrize("delimiter", [" ", ",", "   "])
@pytest.mark.parametrize("header", ["", "a b y", "made by hand"])
def test_what_numpy_saves_as_text(tmp_path, delimiter, header):
    values = np.arange(12).reshape(4, 3) / 4
    named = header.replace(" ", ",") if delimiter == "," else header
    np.savetxt(tmp_path / "a.txt", values, delimiter=delimiter, header=f"first line\n{named}" if header else "")
    convert([tmp_path / "a.txt"], tmp_path / "o.h5", selection=Selection(targets="y" if header == "a b y" else "0"))
    held, target = content(tmp_path / "o.h5"), 2 if header == "a b y" else 0
    np.testing.assert_array_equal(held["targets"][:, 0], values[:, target])
    np.testing.assert_array_equal(held["inputs"], np.delete(values, target, axis=1))


def test_blanks_around_names_and_categories(tmp_path):
    source = csv(tmp_path, " size  kind y\n 1.5   red  2 \n\n 2     NA   3\n")
    selection = Selection(categories={"kind": ["green", "red"]}, missing="-1")
    convert([source], tmp_path / "o.h5", selection=selection)
    assert content(tmp_path / "o.h5")["inputs"].tolist() == [[1.5, 1], [2, -1]]


def test_compressed_csv_and_column_numbers(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("7,1,2\n8,3,4\n")
    convert([tmp_path / "a.csv.gz"], tmp_path / "o.h5", selection=Selection(targets="0", inputs="-1"))
    held = content(tmp_path / "o.h5")
    assert (held["inputs"].tolist(), held["targets"].tolist()) == ([[2], [4]], [[7], [8]])


def test_missing_values(tmp_path):
    source = csv(tmp_path, "a,b\n1,2\n,3\n4,NA\n5,6\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3, column `a`: the value is missing; .*--missing"):
        convert([source], tmp_path / "o.h5")
    assert not (tmp_path / "o.h5").exists()
    done = convert([source], tmp_path / "drop.h5", selection=Selection(missing="drop"))
    assert (done.dropped, content(tmp_path / "drop.h5")["inputs"].tolist()) == (2, [[1], [5]])
    convert([source], tmp_path / "zero.h5", selection=Selection(missing="-1"))
    assert content(tmp_path / "zero.h5")["targets"][:, 0].tolist() == [2, 3, -1, 6]


@pytest.mark.parametrize(
    ("text", "selection", "message"),
    [
        ("a,b\n1,2\n1\n", {}, "line 3: 1 cells, expected 2"),
        ("a,b\n1,x\n", {}, "line 2, column `b`: 'x' is not a number; .*--category b=first"),
        ("a,b\n1,x\n", {"categories": {"b": ["y", "z"]}}, "'x' is not among its categories y, z"),
        ("a,b\n1,2\n", {"targets": "c"}, "no column `c`; it has a, b"),
        ("a,b\n1,2\n", {"categories": {"c": ["y"]}}, "no column `c`"),
        ("a,a\n1,2\n", {}, "two columns are called `a`"),
        ("a,b\n1,2\n3,1e400\n", {}, "line 3, column `b`: inf is infinite or beyond float32"),
        ("a,b\n-1e39,2\n", {}, "line 2, column `a`: -1e\\+39 is infinite or beyond float32"),
        ("a,b\n1,inf\n", {"labels": True}, "column `b`: inf is infinite"),
        ("a\n1\n", {}, "no column is left for the inputs"),
        ("a,b\n1,2.5\n", {"labels": True}, "class label 2.5 is not a whole number"),
        ('a,b\n1,"2\n', {}, "quotation mark is never closed"),
        ("a;b\n1,5;2\n", {}, "line 2, column `a`: '1,5' is not a number; write it with a decimal point"),
        ("", {}, "is empty"),
        ("# by hand\n#\n", {}, "is empty"),
        ("a,b\n", {}, "no row came out"),
    ],
)
def test_bad_tables(tmp_path, text, selection, message):
    with pytest.raises(DataError, match=message):
        convert([csv(tmp_path, text)], tmp_path / "o.h5", selection=Selection(**selection))
    assert not list(tmp_path.glob("o*"))


def test_a_bad_option_is_no_bad_table(tmp_path):
    with pytest.raises(ConfigError, match='--missing zero: expected "drop" or a number'):
        convert([csv(tmp_path, "a,b\n1,2\n")], tmp_path / "o.h5", selection=Selection(missing="zero"))


def test_lines_are_numbered_over_blocks(tmp_path):
    rows = [f"{k},{k + 1}" for k in range(20_000)]
    rows[17_000] = "1,oops"
    rows[9] += "\n\n"
    with pytest.raises(DataError, match="line 17003, column `1`: 'oops'"):
        convert([csv(tmp_path, "\n".join(rows))], tmp_path / "o.h5")
    rows[17_000] = "1,2"
    convert([csv(tmp_path, "\n".join(rows))], tmp_path / "o.h5")
    assert content(tmp_path / "o.h5")["inputs"].sum(dtype="f8") == sum(range(20_000)) - 17_000 + 1


def test_binary_rubbish_called_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(DataError, match="not UTF-8"):
        convert([tmp_path / "a.csv"], tmp_path / "o.h5")
    (tmp_path / "a.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        convert([tmp_path / "a.csv.gz"], tmp_path / "o.h5")


def idx(array, code):
    return b"\0\0" + bytes([code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("how", ["idx", "idx.gz", "npy", "npy-fortran", "npz"])
def test_arrays_of_images_and_labels(tmp_path, how):
    if how == "npz":
        np.savez_compressed(tmp_path / "a.npz", x=X, y=Y)
        sources = [tmp_path / "a.npz"]
    elif how.startswith("npy"):
        np.save(tmp_path / "x.npy", np.asfortranarray(X) if "fortran" in how else X)
        np.save(tmp_path / "y.npy", Y.astype(">i8"))
        sources = [tmp_path / "x.npy", tmp_path / "y.npy"]
    else:
        pack = gzip.compress if how.endswith("gz") else bytes
        suffix = ".gz" if how.endswith("gz") else ""
        sources = [tmp_path / f"labels{suffix}", tmp_path / f"images{suffix}"]
        sources[0].write_bytes(pack(idx(Y.astype(">i4"), 0x0C)))
        sources[1].write_bytes(pack(idx(X, 0x08)))
    done = convert(sources * 2, tmp_path / "o.h5", rows_per_shard=60, checksums=True)
    assert [path.name for path in done.paths] == ["o-00000.h5", "o-00001.h5"]
    shards = open_shards(tmp_path, SOFTMAX)
    rows = shards.read(0, 100)
    np.testing.assert_array_equal(rows.inputs, np.concatenate([X, X]).reshape(100, 12))
    assert rows.targets.tolist() == [*Y, *Y]
    assert shards.input_dtype == np.uint8
    assert shards.files[0]["inputs"].plain


def test_other_names_in_an_npz(tmp_path):
    np.savez(tmp_path / "a.npz", features=X, answers=Y)
    with pytest.raises(DataError, match=r"no array `inputs`; it holds `features` \(50, 4, 3\).*--inputs"):
        convert([tmp_path / "a.npz"], tmp_path / "o.h5")
    convert([tmp_path / "a.npz"], tmp_path / "o.h5", selection=Selection(inputs="features", targets="answers"))
    assert content(tmp_path / "o.h5")["targets"].tolist() == Y.tolist()


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    np.save(tmp_path / "a.npy", np.array([Bomb()], object), allow_pickle=True)
    np.savez(tmp_path / "b.npz", x=np.array([Bomb()], object), y=Y)
    for name in ("a.npy", "b.npz"):
        with pytest.raises(DataError, match="pickles are never read"):
            convert([tmp_path / name], tmp_path / "o.h5")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.npy", b"\x93NUMPY\x01\x00", "not an NPY array"),
        ("a.npz", b"PK\x03\x04 nothing", "not an NPZ file"),
        ("images", b"\0\0\x08", "not an IDX file"),
        ("images", b"\0\0\x08\x03\0\0", "ends within its header"),
        ("images", idx(X, 8)[:-5], "ends at row 49 of 50"),
        ("images", idx(X, 8) + b"x", "goes on after its 50 rows"),
        ("images", b"\0\0\x08\x03" + struct.pack(">3I", 50, 1 << 31, 1 << 31), "claims rows of"),
        ("images.gz", gzip.compress(idx(X, 8))[:-60], "cannot be read"),
        ("a.parquet", b"PAR1", "not a Parquet file"),
        ("a.h5", b"rubbish", "not an HDF5 file"),
    ],
)
def test_damaged_sources(tmp_path, name, data, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    (tmp_path / "labels").write_bytes(idx(Y.astype("u1"), 8))
    with pytest.raises(DataError, match=message):
        convert([tmp_path / name, tmp_path / "labels"], tmp_path / "o.h5")
    assert not list(tmp_path.glob("o*"))
    assert not list(tmp_path.glob(".*"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"a": [1.0, 2.0, 3.0], "b": [True, False, None], "c": ["u", "v", "u"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 0, column `c`: 'u' is not a number"):
        convert([tmp_path / "a.parquet"], tmp_path / "o.h5")
    parquet.write_table(pyarrow.table({"a": [[1.0, 2.0]], "b": [1.0]}), tmp_path / "n.parquet")
    with pytest.raises(DataError, match=r"column `a` holds list<.*>, expected a number in every row; spread it"):
        convert([tmp_path / "n.parquet"], tmp_path / "o.h5")
    selection = Selection(categories={"c": ["u", "v"]}, missing="drop")
    assert convert([tmp_path / "a.parquet"], tmp_path / "o.h5", selection=selection).dropped == 1
    held = content(tmp_path / "o.h5")
    assert (held["inputs"].tolist(), held["targets"].tolist()) == ([[1, 1], [2, 0]], [0, 1])


def test_repacking_a_bad_layout(tmp_path):
    rows = np.arange(600, dtype=">f4").reshape(100, 6)
    write_shard(tmp_path / "a.h5", rows, rows[:, :2], chunks=(1, 6), compression="gzip")
    (tmp_path / "out").mkdir()
    convert([tmp_path / "a.h5"], tmp_path / "out" / "o.h5")
    shards = open_shards(tmp_path / "out")
    assert shards.files[0]["inputs"].plain
    np.testing.assert_array_equal(shards.read(0, 100).inputs, rows)


def test_the_split_belongs_to_the_row_number(tmp_path):
    first, second = np.arange(3000.0)[:, None], np.arange(5000.0)[:, None]
    parts = []
    for name, rows in (("s", first), ("t", second)):
        np.save(tmp_path / "x.npy", rows)
        np.save(tmp_path / "y.npy", rows)
        done = convert([tmp_path / "x.npy", tmp_path / "y.npy"], tmp_path / f"{name}.h5", validation=0.25)
        assert [path.name for path in done.paths] == [f"{name}-train.h5", f"{name}-validation.h5"]
        parts.append([set(content(path)["inputs"][:, 0]) for path in done.paths])
    (train, held), (more_train, more_held) = parts
    assert not train & held
    assert train | held == set(range(3000))
    assert train <= more_train
    assert held <= more_held
    assert 0.22 < len(held) / 3000 < 0.28


def test_nothing_is_overwritten_unless_asked(tmp_path):
    source = csv(tmp_path, "1,2\n3,4\n5,6\n")
    convert([source], tmp_path / "o.h5", rows_per_shard=1)
    before = (tmp_path / "o-00002.h5").stat().st_mtime_ns
    with pytest.raises(DataError, match=r"o-00000\.h5: exists already; .*--overwrite"):
        convert([source], tmp_path / "o.h5", rows_per_shard=1)
    assert (tmp_path / "o-00002.h5").stat().st_mtime_ns == before
    convert([source], tmp_path / "o.h5", rows_per_shard=2, overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("o*")) == ["o-00000.h5", "o-00001.h5"]


def test_an_interrupted_conversion_goes_on_by_shard(tmp_path):
    source = csv(tmp_path, "".join(f"{k},{k}\n" for k in range(10)))
    whole = convert([source], tmp_path / "o.h5", rows_per_shard=4)
    kept = [path.stat().st_mtime_ns for path in whole.paths[:2]]
    wanted = content(whole.paths[2])["inputs"].tolist()
    whole.paths[2].unlink()  # as if killed before the last was complete
    again = convert([source], tmp_path / "o.h5", rows_per_shard=4, resume=True)
    assert (again.paths, again.rows) == (whole.paths, whole.rows)
    assert [path.stat().st_mtime_ns for path in whole.paths[:2]] == kept
    assert content(whole.paths[2])["inputs"].tolist() == wanted
    with pytest.raises(DataError, match=r"o-00000\.h5, dataset `inputs`: holds other rows than these sources"):
        convert([source], tmp_path / "o.h5", rows_per_shard=3, resume=True)
    changed = csv(tmp_path, "".join(f"{k},{k + (k == 6)}\n" for k in range(10)))
    with pytest.raises(DataError, match=r"o-00001\.h5, dataset `targets`: holds other rows"):
        convert([changed], tmp_path / "o.h5", rows_per_shard=4, resume=True)


def test_sources_that_do_not_fit_together(tmp_path):
    first, second = csv(tmp_path, "1,2\n"), csv(tmp_path, "1,2,3\n", "b.csv")
    with pytest.raises(DataError, match=r"b\.csv: rows of inputs \(2,\) float32, .* after rows of inputs \(1,\)"):
        convert([first, second], tmp_path / "o.h5", rows_per_shard=1)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y[:40])
    with pytest.raises(DataError, match=r"y\.npy: 40 rows beside 50 of .*x\.npy"):
        convert([tmp_path / "x.npy", tmp_path / "y.npy"], tmp_path / "o.h5")
    with pytest.raises(DataError, match="alone is no table"):
        convert([tmp_path / "x.npy"], tmp_path / "o.h5")
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["o.h5"], {}, "give one source at least"),
        (["a.csv", "o.txt"], {}, "must end in .h5"),
        (["a.csv", "o.h5"], {"validation": 1.0}, "a fraction from 0"),
        (["a.h5", "o.h5"], {"inputs": "none"}, "--inputs none: rows need inputs"),
        (["a.csv", ""], {}, "must end in .h5"),
        (["a.csv", "o.h5"], {"category": ["b"]}, "expected COLUMN=first,second"),
        (["a.csv", "o.h5"], {"category": ["b=x,x"]}, "with different values"),
    ],
)
def test_bad_requests(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        convert_command(arguments, **options)


def test_the_command_tells_what_it_wrote(tmp_path, capsys):
    source = csv(tmp_path, "a,b\n1,x\n,y\n")
    assert convert_command([str(source), str(tmp_path / "o.h5")], category=["b=x,y"], missing="drop") == 0
    assert capsys.readouterr().out == f"{tmp_path}/o.h5\n1 rows in 1 file; 1 incomplete rows left out\n"


def test_checksums_find_what_gzip_would_not(tmp_path):
    with ShardWriter(tmp_path / "a.h5", checksums=True) as writer:
        for start in range(0, 1000, 90):  # blocks of 256 rows are cut otherwise than the pieces
            rows = np.arange(start, min(start + 90, 1000), dtype="f4")[:, None]
            writer.append(inputs=rows, targets=rows)
    shards = open_shards(tmp_path)
    layout = shards.files[0]["inputs"]
    assert layout.checksum_rows == 256
    assert layout.checksums[3] == zlib.crc32(np.arange(768, 1000, dtype="f4").tobytes())
    assert shards.read(250, 900).inputs[:, 0].tolist() == list(range(250, 900))
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[layout.offset + 4 * 300] ^= 1
    (tmp_path / "a.h5").write_bytes(data)
    assert len(shards.read(0, 256)) == 256
    with pytest.raises(DataError, match=r"a\.h5, dataset `inputs`, rows 256 to 511: the checksum does not match"):
        shards.read(200, 260)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    """A limit on file sizes stands in for the full disk."""
    script = (
        "import resource, signal, sys, numpy as np, pathlib; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from distmlp.data.writer import ShardWriter; from distmlp.errors import DataError\n"
        "try:\n"
        "    with ShardWriter(pathlib.Path(sys.argv[1])) as writer:\n"
        "        for _ in range(40): writer.append(inputs=np.ones((1000, 10)))\n"
        "except DataError as error: print(error)"
    )
    assert resource.RLIM_INFINITY < 0
    told = subprocess.run([sys.executable, "-c", script, tmp_path / "a.h5"], capture_output=True, text=True)
    assert "a.h5: cannot be written: File too large (EFBIG)" in told.stdout, told.stderr
    assert told.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_command_ends_alike_on_all_ranks(tmp_path, ranks):
    csv(tmp_path, "".join(f"{k},{k}\n" for k in range(100)))
    arguments = ["data", "convert", "a.csv", "o/o.h5", "--rows-per-shard", "30"]
    done = run_distmlp(arguments, ranks, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [*(f"o/o-0000{k}.h5" for k in range(4)), "100 rows in 4 files"]
    again = run_distmlp(arguments, ranks, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (3, "")
    assert again.stderr.count("o/o-00000.h5: exists already") == len(again.stderr.splitlines()) == 1
    csv(tmp_path, "1,2\n" * 70 + "1,x\n", "bad.csv")
    bad = run_distmlp(["data", "convert", "bad.csv", "b.h5", "--rows-per-shard", "30"], ranks, cwd=tmp_path)
    assert bad.returncode == 3
    assert bad.stderr.count("bad.csv, line 71, column `1`: 'x' is not a number") == 1
    assert "Traceback" not in bad.stderr
    assert not list(tmp_path.glob(".*"))


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv: is a pipe or device"):
        convert([tmp_path / "a.csv"], tmp_path / "o.h5")
