"""What HDF5 may do to the process that opens a file stays in the child."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data.samples import open_shards, write_shard

from distmlp.data import inspection
from distmlp.data.inspection import inspect_files
from distmlp.errors import DataError, SystemUnfitError

DATASETS = {"inputs": "inputs", "targets": "targets"}
WAYS = {
    "crash": "os.kill(os.getpid(), 11)",
    "loop": "resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\n            while True: pass",
    "leave": "os._exit(0)",
    "greed": "b'x' * (1 << 40)",
    "half": "sys.stdout.buffer.write(b'{\"data'); sys.stdout.buffer.flush(); os._exit(1)",
}


@pytest.fixture
def files(tmp_path):
    rows = np.ones((4, 2), "f4")
    return [str(write_shard(tmp_path / f"{name}.h5", rows, rows)) for name in ("a", "bad", "c")]


@pytest.fixture
def misbehave(tmp_path, monkeypatch):
    """Make the probe do something at the file called bad.h5."""

    def install(way):
        (tmp_path / "unruly.py").write_text(
            "import os, resource, sys\n"
            "import distmlp.data.probe as real\n"
            "good = real.probe\n"
            "def probe(path, datasets):\n"
            "    if path.endswith('bad.h5'):\n"
            f"            {way}\n"
            "    return good(path, datasets)\n"
            "real.probe = probe\n"
            "sys.exit(real.main())\n"
        )
        monkeypatch.setattr(inspection, "PROBE", "unruly")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return install


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("crash", "HDF5 crashes on it (SIGSEGV)"), ("loop", "takes HDF5 for ever"), ("leave", "gives up"),
        ("greed", "far more memory"), ("half", "gives up"),
    ],
)  # fmt: skip
def test_a_file_that_harms_the_child_is_named_and_the_others_are_checked(files, misbehave, way, text):
    misbehave(WAYS[way])
    first, bad, last = inspect_files(files, DATASETS)
    assert text in bad.problem
    assert bad.layouts == {}
    for good in (first, last):
        assert good.problem == ""
        assert good.layouts["inputs"].rows == 4


def test_a_child_that_cannot_start(files, monkeypatch, capfd):
    monkeypatch.setattr(inspection, "PROBE", "no_such_module")
    with pytest.raises(SystemUnfitError, match="no_such_module"):
        inspect_files(files, DATASETS)
    assert "No module named no_such_module" in capfd.readouterr().err


@pytest.mark.parametrize("request_", [b"", b'{"files": [], "datasets": {}}\n'], ids=["no question", "no listener"])
def test_a_child_whose_parent_has_died_is_silent(request_):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", inspection.PROBE]
    done = subprocess.run(command, input=request_, stdout=write_end, stderr=subprocess.PIPE, timeout=20)
    os.close(write_end)
    assert done.stderr == b""


def test_an_interrupt_of_the_whole_process_group_is_not_for_the_child(files, misbehave):
    misbehave("os.kill(os.getpid(), 2)")
    assert [item.problem for item in inspect_files(files, DATASETS)] == ["", "", ""]


def test_contents_without_names(files):
    (item,) = inspect_files(files[:1], {})
    assert item.contents == ("`inputs` (4, 2) float32", "`targets` (4, 2) float32")


def test_modules_of_the_working_directory_are_not_run(files, tmp_path, monkeypatch):
    (tmp_path / "h5py.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(tmp_path)
    assert inspect_files(files[:1], DATASETS)[0].problem == ""


def test_no_child_outlives_the_check(files):
    inspect_files(files, DATASETS)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


LOCKLESS = """
#include <errno.h>
#include <sys/file.h>
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
"""


@pytest.fixture(scope="module")
def lockless(tmp_path_factory):
    """A library that makes every file system refuse locks, as some of a cluster's do."""
    folder = tmp_path_factory.mktemp("lockless")
    (folder / "lockless.c").write_text(LOCKLESS)
    library = folder / "lockless.so"
    command = ["gcc", "-shared", "-fPIC", "-o", library, folder / "lockless.c"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no C compiler: {built.stderr}")
    return library


@pytest.mark.parametrize("setting", [None, "TRUE", "FALSE", "BEST_EFFORT"])
def test_file_systems_without_locks_work_by_themselves(tmp_path, lockless, setting):
    rows = np.arange(8, dtype="f4").reshape(4, 2)
    path = write_shard(tmp_path / "a.h5", rows, rows, chunks=(2, 2), compression="lzf")
    path.chmod(0o444)
    environment = {key: value for key, value in os.environ.items() if key != "HDF5_USE_FILE_LOCKING"}
    environment |= {"LD_PRELOAD": str(lockless)} | ({"HDF5_USE_FILE_LOCKING": setting} if setting else {})
    script = (
        "import sys, pathlib; sys.path[:0] = ['tests']; from data.samples import open_shards;"
        "print(open_shards(pathlib.Path(sys.argv[1])).read(0, 4).inputs.sum())"
    )
    project = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, env=environment, cwd=project
    )
    assert told.stdout == "28.0\n", told.stderr


def test_the_shim_does_what_it_says(tmp_path, lockless):
    """Without our settings h5py fails under it: otherwise the test above would prove nothing."""
    rows = np.ones((4, 2))
    path = write_shard(tmp_path / "a.h5", rows, rows)
    script = "import sys, h5py; h5py.File(sys.argv[1], 'r', locking=True)"
    environment = {**os.environ, "LD_PRELOAD": str(lockless)}
    told = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, env=environment)
    assert "unable to lock file" in told.stderr


def test_user_data_is_not_written_to(files, tmp_path):
    before = {name: os.stat(name).st_mtime_ns for name in files}
    present = sorted(os.listdir(tmp_path))
    open_shards(tmp_path).read(0, 12)
    assert {name: os.stat(name).st_mtime_ns for name in files} == before
    assert sorted(os.listdir(tmp_path)) == present


def test_interrupt_while_a_child_works(files, misbehave, monkeypatch):
    """An exception in the parent, such as the one of Ctrl-C, leaves no child behind."""
    misbehave("import time; time.sleep(60)")

    def ring(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        with pytest.raises(KeyboardInterrupt):
            inspect_files(files, DATASETS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_errors_name_a_class_of_ours():
    with pytest.raises(DataError):
        open_shards(Path("/nowhere"))
