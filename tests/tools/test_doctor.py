"""`distmlp doctor`: what it says of machines that are not here, and of this one with much taken away."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import clean_environment, run_mpi

from distmlp.comm.binding import Gpu
from distmlp.tools import doctor_child
from distmlp.tools.doctor import diagnose, text
from distmlp.tools.doctor_findings import FAULT, NOTE, WARNING, findings

H200 = {"ordinal": 0, "name": "NVIDIA H200", "uuid": "GPU-a", "capability": 90, "memory_bytes": 150 << 30}
GOOD = {
    "distmlp": "0.1.0", "python": "3.12.3", "host": "node1", "cpus": 16,
    "variables": {"CUDA_VISIBLE_DEVICES": "0,1"},
    "gpu": {
        "driver": {"cuda": "13.0", "code": 0, "version": "580.159.04"},
        "devices": [H200, {**H200, "ordinal": 1, "uuid": "GPU-b"}],
        "peers": [[True, True], [True, True]],
        "cupy": "cupy-cuda13x 14.2.0",
        "nvrtc": {
            "version": "13.0", "targets": [75, 80, 90, 120], "unfit": [], "includes": ["/v/nvidia/cu13/include"],
            "error": "", "headers": "",
        },
        "nccl": "2.28.3",
        "obstacle": "",
    },
    "mpi": {
        "mpi4py": "4.1.2",
        "launcher": {"path": "/usr/bin/mpirun", "make": "Open MPI"},
        "launched_by": None,
        "library": {"library": "Open MPI v5.0.11", "make": "Open MPI"},
        "ranks": {"size": 2, "library": "Open MPI v5.0.11", "hosts": ["node1"]},
        "device": {"works": True, "reason": "device all-reduce gave the right values"},
    },
    "hdf5": {
        "h5py": "3.16.0", "hdf5": "2.0.0", "filters": ["gzip", "zstd"], "plugin_path": None,
        "locking": {"variable": None, "works_here": ""},
    },
    "slurm": {"version": "22.05.8", "wirings": ["pmi2", "pmix"]},
}  # fmt: skip


def changed(**changes):
    """`GOOD` with the values at dotted paths replaced."""
    facts = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = facts
        for parent in parents:
            node = node[parent]
        node[last] = value
    return facts


def test_a_good_machine_has_nothing_to_complain_of():
    report = diagnose(GOOD)
    assert report["works"]
    auto = report["auto"]
    assert (auto["engine"], auto["transport"], auto["transport_between_hosts"]) == ("fused", "peer", "mpi")
    assert {item["state"] for item in report["findings"]} == {"ok", "note"}
    words = text(report)
    for fact in ("NVIDIA H200", "GPU-b", "580.159.04", "NCCL 2.28.3", "Open MPI v5.0.11", "pmi2, pmix", "HDF5 2.0.0"):
        assert fact in words


@pytest.mark.parametrize(
    ("changes", "state", "text_part", "advice_part"),
    [
        ({"gpu__cupy": None}, WARNING, "GPUs here are not used", "distmlp[cuda13]"),
        ({"gpu__driver__cuda": "12.4", "gpu__cupy": None}, WARNING, "not used", "distmlp[cuda12]"),
        ({"gpu__driver__cuda": "12.4"}, FAULT, "supports CUDA 12.4 at most", "distmlp[cuda12]"),
        ({"gpu__devices": [], "gpu__peers": []}, WARNING, "CUDA_VISIBLE_DEVICES = '0,1'", "unset CUDA_VISIBLE_DEVICES"),
        ({"gpu__peers": [[True, False], [False, True]]}, WARNING, "no peer access between GPUs 0–1", "visible"),
        ({"gpu__nvrtc": {"error": "cannot be loaded (libnvrtc.so.13)"}}, FAULT, "libnvrtc.so.13", "distmlp[cuda13]"),
        ({"gpu__nvrtc__unfit": ["compute capability 5.2"]}, FAULT, "compute capability 5.2", "engine=reference"),
        ({"gpu__nvrtc__error": "invalid value for --gpu-architecture"}, FAULT, "invalid value", "distmlp[cuda13]"),
        (
            {"gpu__nvrtc__headers": "trial.cu(1): cannot open source file", "gpu__nvrtc__includes": []},
            NOTE, "no folder with cuda_bf16.h found", "nvidia-cuda-cccl",
        ),
        ({"gpu": {"error": "ended by signal 11"}}, WARNING, "ended by signal 11", "nvidia-smi"),
        ({"mpi__ranks": {"size": 1, "answers": 2}}, WARNING, "each thinks it is alone", "launcher of Open MPI"),
        ({"mpi__ranks": {"error": "mpirun has detected an attempt to run as root."}}, WARNING, "as root", "launcher"),
        ({"mpi__mpi4py": None}, WARNING, "mpi4py is not installed", "pip install mpi4py"),
        ({"hdf5": {"error": "ImportError: no", "locking": GOOD["hdf5"]["locking"]}}, FAULT, "does not load", "h5py"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_to_do(changes, state, text_part, advice_part):
    facts = changed(**changes)
    matching = [f for f in findings(facts) if text_part in f.text]
    assert [f.state for f in matching] == [state]
    assert advice_part in matching[0].advice
    assert diagnose(facts)["works"] == (state != FAULT)


@pytest.mark.parametrize(
    ("changes", "here", "between"),
    [
        ({"mpi__device": {"works": False, "reason": "crashed with signal 11"}}, "peer", "nccl"),
        ({"mpi__device": {"works": False, "reason": "no"}, "gpu__nccl": None}, "peer", "peer"),
        ({"gpu__peers": [[True, False], [False, True]]}, "mpi", "mpi"),
        ({"gpu__obstacle": "no GPU"}, "mpi", "mpi"),
        ({"mpi__ranks": {"error": "x"}}, "none", "none"),
    ],
)
def test_the_transports_that_auto_takes(changes, here, between):
    auto = diagnose(changed(**changes))["auto"]
    assert (auto["transport"], auto["transport_between_hosts"]) == (here, between)
    assert auto["transport_reason"]


def test_an_mpi_that_cannot_move_device_memory_is_hinted_at_by_name():
    facts = changed(mpi__device={"works": False, "reason": "the trial's broadcast crashed with signal 11"})
    (finding,) = [f for f in findings(facts) if "device memory" in f.text]
    assert finding.state == WARNING
    assert "signal 11" in finding.text
    assert "UCX_TLS" in finding.advice


def test_without_a_gpu_broken_compilers_are_no_fault():
    facts = changed(
        gpu__driver=None, gpu__devices=[], gpu__peers=[], gpu__nvrtc={"error": "no compiler"}, gpu__obstacle="no GPU"
    )
    report = diagnose(facts)
    assert report["works"]
    assert report["auto"]["engine"] == "reference"
    assert "no GPU" in report["auto"]["engine_reason"]


def test_the_value_of_file_locking_in_force_is_shown():
    facts = changed(hdf5__locking={"variable": "FALSE", "works_here": "ENOLCK"})
    (finding,) = [f for f in findings(facts) if "locking" in f.text]
    assert "HDF5_USE_FILE_LOCKING = FALSE" in finding.text
    assert "does not grant locks (ENOLCK)" in finding.text
    assert "HDF5_USE_FILE_LOCKING=FALSE" in finding.advice


BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "mpi4py"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.metadata as metadata
found = metadata.version
def version(name):
    if name.startswith(("cupy", "mpi4py")):
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
all_of_them = metadata.distributions
metadata.distributions = lambda **more: [
    d for d in all_of_them(**more) if not (d.metadata["Name"] or "").startswith(("cupy", "mpi4py"))]
"""


def run_doctor(env=None, ranks=0):
    return run_mpi(ranks, [sys.executable, "-m", "distmlp", "doctor", "--json"], env=env)


@pytest.fixture
def bare(tmp_path):
    """An environment without MPI and CuPy, as far as Python and PATH can tell."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    (tmp_path / "bin").mkdir()
    return {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path / "bin")}


def test_a_machine_with_nothing_installed_gets_its_answer_fast(bare):
    started = time.monotonic()
    done = run_doctor(bare)
    assert time.monotonic() - started < 10  # 1 s on an idle machine
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["works"]
    assert report["auto"]["engine"] == "reference"
    said = {(item["subject"], item["state"]): item for item in report["findings"]}
    assert "not installed" in said["MPI", "warning"]["text"]
    assert report["facts"]["gpu"]["cupy"] is None
    assert done.stderr == ""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_this_machine_under_mpirun():
    """Rank 0 alone speaks, and its children start ranks of their own in spite of the launcher around them."""
    done = run_doctor(ranks=2)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["facts"]["mpi"]["ranks"]["size"] == 2
    assert report["auto"] == report["auto"] | {"engine": "reference", "transport": "mpi"}
    assert "libcuda.so.1" in report["auto"]["engine_reason"]


def test_a_launcher_of_another_make_is_noticed(tmp_path, monkeypatch):
    """One that starts two processes which know nothing of each other, as a foreign mpirun does."""
    (tmp_path / "mpirun").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.6" && exit\nshift 2\n"$@" & "$@"; wait\n'
    )
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr("distmlp.tools.doctor_facts.find_mpirun", lambda: str(tmp_path / "mpirun"))
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    from distmlp.tools.doctor_facts import gather

    report = diagnose(gather())
    (finding,) = [item for item in report["findings"] if "does not start two ranks" in item["text"]]
    assert finding["state"] == "warning"
    assert "mpirun (Open MPI) with" in finding["text"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_devices_are_read_through_the_driver_library(tmp_path):
    """A stand-in for libcuda: the calls, their order and the width of their arguments."""
    source = Path(__file__).parent / "libcuda_stub.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    gpus = [Gpu("A", "GPU-a"), Gpu("B", "GPU-b")]
    facts = doctor_child.describe_driver(ctypes.CDLL(str(tmp_path / "libcuda.so.1")), gpus)
    assert facts["driver"]["cuda"] == "12.4"
    assert facts["driver"]["code"] == 0
    assert facts["devices"] == [
        {"ordinal": 0, "name": "A", "uuid": "GPU-a", "capability": 80, "memory_bytes": 40 << 30},
        {"ordinal": 1, "name": "B", "uuid": "GPU-b", "capability": 81, "memory_bytes": 41 << 30},
    ]
    assert facts["peers"] == [[True, False], [False, True]]


@pytest.mark.parametrize(("machine", "aware", "between"), [("intel-mpi", True, "mpi"), ("open-mpi", False, "nccl")])
def test_two_h200s(machine, aware, between):
    """`doctor --json` of one machine with two H200s, under Intel MPI from PyPI and under Ubuntu's Open MPI."""
    recorded = json.loads((Path(__file__).parent / "data" / f"doctor-{machine}.json").read_text())
    assert recorded["facts"]["mpi"]["device"]["works"] == aware
    report = diagnose(recorded["facts"])
    assert report["works"]
    auto = report["auto"]
    assert (auto["engine"], auto["transport"], auto["transport_between_hosts"]) == ("fused", "peer", between)
    advice = " ".join(item["advice"] for item in report["findings"] if item["state"] == "warning")
    assert ("UCX_TLS" in advice) == (not aware)
