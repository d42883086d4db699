"""The transport that `auto` takes, what forced ones say where they cannot work, and the trial of device memory."""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import run_python

from distmlp.comm import device_probe
from distmlp.comm.device_probe import DeviceProbe, build_claims, judge
from distmlp.comm.hints import Launch
from distmlp.comm.transport import AVAILABLE, MOST_PEERS, Facts, Probe, choose_transport, device_hint
from distmlp.errors import SystemUnfitError

AWARE = Probe(True, "right in a trial")
UNAWARE = Probe(False, "the trial's all-reduce crashed with signal 11")
ALL = frozenset({"mpi", "staged", "nccl", "peer"})
TWO = Facts("fused", 2, 1, "Open MPI v5.0.11", "Open MPI", UNAWARE, peer="", nccl="", offered=ALL)


@pytest.mark.parametrize(
    ("facts", "transport", "reason"),
    [
        (replace(TWO, size=1), "none", "nothing to reduce"),
        (replace(TWO, engine="reference"), "mpi", "host memory"),
        (TWO, "peer", "one host"),
        (replace(TWO, peer="GPUs 0 and 1 have no peer access", device_mpi=AWARE), "mpi", "no peer access"),
        (replace(TWO, peer="no peer access"), "nccl", "not CUDA-aware"),
        (replace(TWO, peer="no peer access", nccl="not installed"), "staged", "NCCL".lower()),
        (replace(TWO, hosts=2, device_mpi=AWARE), "mpi", "the ranks are on 2 hosts"),
        (replace(TWO, hosts=2), "nccl", "signal 11"),
        (replace(TWO, hosts=2, nccl="not installed"), "staged", "not installed"),
        (replace(TWO, size=4, hosts=2), "nccl", "nccl moves GPU memory between them"),
        (replace(TWO, size=4, hosts=2, device_mpi=AWARE), "mpi", "mpi moves GPU memory between them"),
        (replace(TWO, size=4, hosts=2, nccl="not installed"), "peer", "up to 2 ranks of a host"),
        (replace(TWO, size=12, hosts=2, nccl="not installed", fullest=8), "peer", "nccl: not installed"),
        (replace(TWO, size=12, hosts=2, nccl="not installed", fullest=9), "staged", "9 ranks on a host"),
        (replace(TWO, shared_gpu=True), "staged", "share a GPU"),
        (replace(TWO, shared_gpu=True, device_mpi=AWARE), "mpi", "share a GPU"),
        (replace(TWO, offered=frozenset({"staged"})), "staged", "not available yet"),
        (replace(TWO, size=MOST_PEERS + 1, device_mpi=AWARE), "mpi", "joins up to 8"),
    ],
)
def test_auto(facts, transport, reason):
    choice = choose_transport("auto", facts)
    assert choice.transport == transport
    assert reason in choice.reason


def test_auto_always_finds_one():
    for peer, nccl, probe, shared, hosts, engine in itertools.product(
        ("", "no"), ("", "no"), (AWARE, UNAWARE), (False, True), (1, 2), ("fused", "reference")
    ):
        facts = Facts(engine, 4, hosts, device_mpi=probe, peer=peer, nccl=nccl, shared_gpu=shared)
        choice = choose_transport("auto", facts)
        assert choose_transport(choice.transport, facts).transport == choice.transport


@pytest.mark.parametrize(
    ("wanted", "facts", "words"),
    [
        ("mpi", TWO, ("not CUDA-aware", "Open MPI v5.0.11", "signal 11", "UCX_TLS")),
        ("peer", replace(TWO, peer="GPUs 0 and 1 have no peer access"), ("GPUs 0 and 1",)),
        ("peer", replace(TWO, hosts=2), ("2 hosts",)),
        ("nccl", replace(TWO, nccl="NCCL is not installed"), ("NCCL is not installed",)),
        ("nccl", replace(TWO, shared_gpu=True), ("NCCL refuses",)),
        ("nccl", replace(TWO, engine="reference"), ("fused engine", "transport=auto")),
        ("peer", replace(TWO, offered=AVAILABLE - {"peer"}), ("peer", "not available yet in this version")),
    ],
)
def test_forced_transport_that_cannot_work_is_refused(wanted, facts, words):
    with pytest.raises(SystemUnfitError) as caught:
        choose_transport(wanted, facts)
    for word in words:
        assert word in str(caught.value)


def test_forced_transport_that_works_is_taken():
    for wanted in ("peer", "nccl", "staged"):
        assert choose_transport(wanted, TWO).transport == wanted
    assert choose_transport("peer", replace(TWO, shared_gpu=True)).transport == "peer"


@pytest.mark.parametrize(
    ("make", "variable"),
    [
        ("Open MPI", "UCX_TLS"),
        ("MPICH", "MPIR_CVAR_ENABLE_GPU=1"),
        ("Intel MPI", "I_MPI_OFFLOAD=1"),
        ("Cray MPICH", "MPICH_GPU_SUPPORT_ENABLED=1"),
        ("MVAPICH", "MV2_USE_CUDA=1"),
    ],
)
def test_hint_names_the_variable_of_each_make(make, variable):
    assert variable in device_hint(make)


@pytest.mark.parametrize(
    ("output", "code", "works", "reason"),
    [
        ('{"stage": "MPI_Init"}\n{"stage": "done"}\n', 0, True, "right values"),
        ('{"stage": "MPI_Init"}\n{"stage": "broadcast"}\n', -11, False, "broadcast crashed with signal 11"),
        ('{"stage": "MPI_Init"}\n', None, False, "MPI_Init hung"),
        ('{"stage": "all-reduce"}\n', 134, False, "all-reduce ended with code 134"),
        ('{"stage": "done"}\n', -11, False, "done crashed with signal 11"),
        ('{"stage": "MPI_Init"}\n{"obstacle": "no CUDA support"}\n', 0, False, "no CUDA support"),
        ("noise of the library\n", 1, False, "code 1 before it began"),
        ("", None, False, "hung"),
    ],
)
def test_judgement_of_the_trial(output, code, works, reason):
    probe = judge(output, code)
    assert probe.works == works
    assert reason in probe.reason


@pytest.mark.parametrize(
    ("script", "seconds", "works", "reason"),
    [
        ('print(\'{"stage": "done"}\')', 20, True, "right values"),
        ('import os; print(\'{"stage": "all-reduce"}\', flush=True); os.kill(os.getpid(), 11)', 20, False, "signal 11"),
        ('import time; print(\'{"stage": "exchange"}\', flush=True); time.sleep(60)', 1, False, "exchange hung"),
    ],
)
def test_child_that_crashes_or_hangs_takes_nobody_with_it(script, seconds, works, reason):
    child = DeviceProbe([sys.executable, "-c", script])
    probe = child.result(seconds)
    assert probe.works == works
    assert reason in probe.reason
    assert child.result() is probe  # a second run of the same process asks again


def test_child_that_nobody_asked_does_not_outlive_the_job():
    script = (
        "import sys\nfrom distmlp.comm.device_probe import DeviceProbe\nfrom distmlp.comm.policy import guarded\n"
        "from distmlp.comm.world import open_world\n"
        "def main():\n"
        "    world = open_world()\n"
        "    world.device_probe = DeviceProbe([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    print(world.device_probe._child.pid)\n"
        "guarded(main)"
    )
    done = run_python(2, script, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()  # of rank 0, which alone prints


def test_cancelling_keeps_what_was_found():
    child = DeviceProbe([sys.executable, "-c", 'print(\'{"obstacle": "none here"}\')'])
    found = child.result(20)
    child.cancel()
    assert child.result() is found


def test_child_does_not_inherit_the_launchers_wiring(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMIX_RANK", "1")
    script = "import os, json; print(json.dumps({'obstacle': str([k for k in os.environ if k.startswith('PMI')])}))"
    assert DeviceProbe([sys.executable, "-c", script]).result(20).reason == "[]"


def test_claims_of_a_library_without_either_query():
    assert build_claims(ctypes.CDLL(None)) is None


def test_trial_of_this_machine_without_a_gpu_ends_with_a_reason():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        probe = DeviceProbe().result(30)
        assert not probe.works
        assert probe.reason


@pytest.mark.parametrize(
    ("launch", "cupy", "driver", "begun"),
    [
        (Launch("mpirun", 2, 0, "OMPI_COMM_WORLD_SIZE", True), True, True, True),
        (Launch("mpirun", 2, 1, "OMPI_COMM_WORLD_SIZE", True), True, True, False),  # one a host is enough
        (Launch("mpirun", 2, 0, "OMPI_COMM_WORLD_SIZE", True), False, True, False),
        (Launch("mpirun", 2, 0, "OMPI_COMM_WORLD_SIZE", True), True, False, False),
        (None, True, True, False),
    ],
)
def test_trial_begins_where_a_gpu_may_train(launch, cupy, driver, begun, monkeypatch):
    def load(name):
        if not driver:
            raise OSError(name)

    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    monkeypatch.setattr(device_probe, "find_spec", lambda name: cupy or None)
    monkeypatch.setattr(device_probe.ctypes, "CDLL", load)
    monkeypatch.setattr(device_probe, "DeviceProbe", lambda: "child")
    assert device_probe.begin(launch) == ("child" if begun else None)
