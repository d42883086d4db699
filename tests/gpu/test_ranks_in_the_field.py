"""What users of other programs met with several ranks on GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu.test_transports import ENDLESS, NO_OFFLOAD, SETTINGS, TWO_GPUS, ranks, run_toml, train  # noqa: F401 - a fixture
from launching import finish, mpirun_make, mpirun_path, run_python, start_mpi

from distmlp.comm.binding import list_gpus

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun on PATH")

SHARE = "run.share_gpu=true"
UUID = re.compile(r"GPU-[0-9a-f-]{36}")
# What a scheduler that gives every task its own GPU does, from whatever the make of MPI calls the local rank.
ISOLATED = """
import os, runpy, sys
local = next(os.environ[name] for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") if name in os.environ)
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv.pop(1).split(";")[int(local)]
sys.argv[0] = "distmlp"
runpy.run_module("distmlp", run_name="__main__")
"""


def isolated(run_toml: Path, name: str, gpus: list[str], *settings: str):  # noqa: F811
    chosen = [word for setting in settings for word in ("--set", setting)]
    output = ["--output", str(run_toml.parent / name)]
    return ranks("-c", ISOLATED, ";".join(gpus), "train", str(run_toml), *output, *chosen)


def uuids(text: str) -> list[str]:
    """The UUIDs of the start-up table, a rank a line."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[-2:] == ["GPU", "UUID"])
    return [UUID.findall(line)[-1] for line in lines[head + 1 : head + 3]]


def test_more_ranks_than_gpus_are_refused_at_once(run_toml):  # noqa: F811
    """A04."""
    started = time.monotonic()
    done, _ = train(run_toml, "crowded", gpus="0")
    assert time.monotonic() - started < 40  # two interpreters come up in it, on GPUs that others use
    assert done.returncode == 4
    assert re.search(r"2 ranks on host \S+, 1 GPU \(GPU-", done.stderr)
    assert done.stderr.count(SHARE) == 1


def test_sharing_that_was_asked_for_is_warned_of_once(run_toml):  # noqa: F811
    """A04, B01: by default nothing but what the library can do; the same loss by host memory, and as one rank."""
    found = {}
    for name, settings in {"auto": [], "staged": ["run.transport=staged"]}.items():
        done, summary = train(run_toml, f"shared-{name}", SHARE, *settings, gpus="0")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert done.stdout.count("warning: GPUs are shared: 2 ranks on host") == 1
        assert len(set(uuids(done.stdout))) == 1
        found[name] = summary
    if mpirun_make() == "Open MPI":  # of the distribution: without CUDA
        assert found["auto"]["transport"] == "staged"
        assert found["auto"]["weights_sha256"] == found["staged"]["weights_sha256"]
        forced, _ = train(run_toml, "shared-forced", SHARE, "run.transport=mpi", gpus="0")
        assert forced.returncode == 4
        assert "not CUDA-aware" in forced.stderr
        assert "Open MPI v" in forced.stderr
    alone = subprocess.run(
        [sys.executable, "-m", "distmlp", "train", str(run_toml), "--output", str(run_toml.parent / "shared-alone")],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert alone.stderr == ""
    text = (run_toml.parent / "shared-alone" / "summary.json").read_text()
    loss = float(re.search(r'"loss": ([0-9.e-]+)', text).group(1))
    for summary in found.values():
        assert summary["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("transport", ["staged", "mpi", "peer"])
def test_blocking_launches_change_no_bit(run_toml, monkeypatch, transport):  # noqa: F811
    """B03: nothing hangs on work that happens to be done. The spinning kernel is in transport_ranks.py."""
    found = set()
    for blocking in ("0", "1"):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
        done, summary = train(
            run_toml, f"blocking-{transport}-{blocking}", SHARE, f"run.transport={transport}", gpus="0"
        )  # fmt: skip
        if transport == "mpi" and done.returncode == 4 and "not CUDA-aware" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[0][:200])
        assert done.returncode == 0, done.stderr
        if transport == "mpi":  # H02: what the ways there are manage is shown
            assert done.stdout.count("GB/s") >= 2
        found.add((summary["weights_sha256"], summary["loss"]))
    assert len(found) == 1


EARLY = """
import sys
from distmlp import RunConfig, train
import cupy
kept = cupy.ones(1000)
result = train(RunConfig.load(sys.argv[1], sys.argv[3:], sys.argv[2]))
assert 0 < result.epochs < 40, result
"""


def test_stopping_early_ends_well(run_toml):  # noqa: F811
    """B08, with arrays that outlive the training. The other ends are in test_transports.py."""
    validation = f"data.validation={run_toml.parent / 'part.h5'}"
    settings = [
        SHARE, "run.epochs=40", "run.early_stopping=1", "optimizer.learning_rate=0", validation,
    ]  # fmt: skip
    done = ranks("-c", EARLY, str(run_toml), str(run_toml.parent / "early"), *settings, gpus="0")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@TWO_GPUS
@pytest.mark.parametrize("visible", [None, "0,1", "1,0", "uuids"])
def test_every_rank_has_its_own_of_the_visible_gpus(run_toml, visible):  # noqa: F811
    """A03."""
    names = [gpu.uuid for gpu in list_gpus()[:2]]
    gpus = ",".join(names) if visible == "uuids" else visible
    done, _ = train(run_toml, f"visible-{visible}", *([] if visible is None else ["run.transport=staged"]), gpus=gpus)
    assert done.returncode == 0, done.stderr
    assert sorted(uuids(done.stdout)) == sorted(names)


@TWO_GPUS
@pytest.mark.parametrize("transport", ["auto", "staged", "nccl", "mpi", "peer"])
def test_ranks_that_see_one_gpu_each(run_toml, transport):  # noqa: F811
    """A03, B04: they train, or are told that it is about what they see."""
    names = [gpu.uuid for gpu in list_gpus()[:2]]
    done = isolated(run_toml, f"isolated-{transport}", names, f"run.transport={transport}")
    if done.returncode != 0 and transport != "auto":
        assert done.returncode == 4, done.stderr
        assert "CUDA_VISIBLE_DEVICES" in done.stderr or "not CUDA-aware" in done.stderr or "NCCL" in done.stderr
        assert "run.transport=" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert uuids(done.stdout) == names


LOOK = """
import ctypes
from distmlp.comm.binding import list_gpus
from distmlp.engine.device import find_obstacle
assert list_gpus() and find_obstacle() == ""
from distmlp.engine.gpu import nccl_obstacle
nccl_obstacle()
flags, opened = ctypes.c_uint(), ctypes.c_int(-1)
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(opened)) == 0
assert opened.value == 0, opened
"""


def test_looking_for_gpus_opens_none():
    """A06: or every rank would keep half a gigabyte of GPU 0 before it knows which GPU is its own."""
    done = run_python(0, LOOK)
    assert done.returncode == 0, done.stderr


@TWO_GPUS
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_every_process_is_on_one_gpu(run_toml, transport):  # noqa: F811
    """A06, as far as it is ours: what Intel MPI opens to offload from is left out."""
    output = run_toml.parent / f"one-{transport}"
    argv = [sys.executable, "-c", ENDLESS, str(run_toml), str(output), transport]
    job = start_mpi(2, argv, env=SETTINGS | NO_OFFLOAD)
    try:
        deadline = time.monotonic() + 60
        while not ((metrics := output / "metrics.jsonl").exists() and metrics.stat().st_size):
            assert job.poll() is None, finish(job)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ours = [Path(f"{output}.pid{rank}").read_text() for rank in range(2)]  # others may use the GPUs, too
        query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
        found = [line.split(", ") for line in lines if line.partition(",")[0] in ours]
        if not found:
            pytest.skip("nvidia-smi does not see processes here")
        assert len(found) == len({pid for pid, _ in found}) == len({gpu for _, gpu in found}) == 2, found
    finally:
        job.terminate()
        job.communicate(timeout=30)
