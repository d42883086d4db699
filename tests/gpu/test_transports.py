"""Two ranks, each transport: the same training as one rank, the same bits on both ranks and in every run.

Four where the transport has other ways for them.

On two GPUs, and on one that the ranks share where the transport can do that. What MPI is on PATH decides whether
`mpi` can be tried: with Intel MPI, source launch/env/intel-mpi.sh first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gpu.cases import LIMITS, Case
from launching import finish, mpirun_path, run_mpi, start_mpi

from distmlp.comm.binding import list_gpus

RANKED = Case(
    optimizer="adam", widths=(20, 60, 50, 4), batch=100, batches=10, extra=1, weights=True,
    run={"stall_timeout": "20 seconds"},
)  # fmt: skip
AVERAGED = {**RANKED.run, "ema_decay": 0.9}
NARROW = RANKED.but(
    precision="bf16", kernel="narrow", widths=(32, 64, 64, 16), batch=600, batches=3, activation="gelu", run=AVERAGED
)  # fmt: skip
SWEEP = NARROW.but(kernel="sweep", widths=(32, 128, 128, 16), batch=18_000, batches=2, run=RANKED.run)
BULK = NARROW.but(kernel="bulk", widths=(70, 300, 200, 16), batch=1500, run=RANKED.run)
ROUNDS = BULK.but(widths=(688, 688, 688, 688, 690), batch=600)  # blocks have two tiles of weight gradients
PASSES = SWEEP.but(kernel="passes", run=AVERAGED)
CHAIN = NARROW.but(kernel="chain", widths=(70, 200, 130, 16), batch=2000)  # of the last row one rank has none
RESIDENT = RANKED.but(precision="bf16", kernel="resident", run=AVERAGED)
CASES = [RANKED, RANKED.but(precision="bf16"), NARROW, SWEEP, BULK, ROUNDS, PASSES, CHAIN, RESIDENT]
LARGE = RANKED.but(widths=(64, 512, 512, 16))  # four ranks add it up by parts
FOUR_CASES = [
    RANKED, LARGE, LARGE.but(precision="bf16", kernel="bulk", batch=3000, batches=3), NARROW, CHAIN.but(batch=4000),
    RESIDENT,
]  # fmt: skip
CASES_OF_RANKS = [*((case, 2) for case in CASES), *((case, 4) for case in FOUR_CASES)]
GPUS = len(list_gpus())
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
WAYS = [
    *(pytest.param((name, "share"), id=f"{name}-shared") for name in ("staged", "mpi", "peer")),
    *(pytest.param((name, ""), id=name, marks=TWO_GPUS) for name in ("staged", "nccl", "mpi", "peer")),
]
# `launching` takes a launcher's settings out of the environment; these are the machine's
SETTINGS = {key: value for key, value in os.environ.items() if key.startswith("I_MPI_")}

pytestmark = [
    pytest.mark.skipif(mpirun_path() is None, reason="no mpirun on PATH"),
    pytest.mark.timeout(300),  # many processes on a GPU wait for each other whenever one opens or closes it
]


# A rank of Intel MPI opens every GPU that it may offload from, and the driver opens and closes one at a time.
NO_OFFLOAD = {"I_MPI_OFFLOAD": "0"}
WITHOUT_DEVICE_MPI = {start + way for start in ("", "run.transport=") for way in ("staged", "nccl", "peer")}


def ranks(*argv: str, gpus: str | None = None, count: int = 2, **options: Any) -> Any:
    offload = {} if WITHOUT_DEVICE_MPI.isdisjoint(argv) else NO_OFFLOAD
    env = {**SETTINGS, **offload, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
    return run_mpi(count, [sys.executable, *argv], env=env, timeout=120, **options)


@pytest.fixture(scope="module", params=WAYS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transport_ranks.py found."""
    transport, share = request.param
    found = run_ranks(tmp_path_factory, transport, *filter(None, [share]), gpus="0" if share else None)
    assert (found["transport"], found["gpus"]) == (transport, 1 if share else 2)
    return found


def run_ranks(
    folders: pytest.TempPathFactory, transport: str, *how: str, count: int = 2, gpus: str | None = None
) -> dict[str, Any]:
    path = folders.mktemp("ranks") / "report.json"
    script = str(Path(__file__).with_name("transport_ranks.py"))
    done = ranks(script, transport, str(path), *how, gpus=gpus, count=count)
    if transport == "mpi" and done.returncode == 4 and "not CUDA-aware" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[0][:200])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    if "TRANSPORT_REPORTS" in os.environ:  # kept for a look
        name = "-".join([transport, str(count), *how]) + ".json"
        Path(os.environ["TRANSPORT_REPORTS"], name).write_text(json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize(
    "number",
    range(len(CASES)),
    ids=["fp32", "bf16", "narrow", "sweep", "bulk", "rounds", "passes", "chain", "resident"],
)
def test_trains_like_one_rank_with_the_same_bits_on_both(report, number):
    check_training(report["training"][number], LIMITS[CASES[number].precision])


@pytest.fixture(scope="module", params=["peer", "peer-hosts"])
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks on the GPUs there are; "hosts": as if they were on two hosts."""
    how = ["share", *(["hosts"] if request.param == "peer-hosts" else [])]
    return run_ranks(tmp_path_factory, "peer", *how, count=4) | {"several": request.param == "peer-hosts"}


@pytest.mark.parametrize(
    "number", range(len(FOUR_CASES)), ids=["small", "large", "bulk", "narrow", "chain", "resident"]
)
def test_four_ranks_train_like_one(four, number):
    check_training(four["training"][number], LIMITS[FOUR_CASES[number].precision])


def test_four_ranks_stop_fail_and_diverge_together(four):
    check_faults(four["faults"], 3 if four["several"] else 8)


def check_training(found: dict[str, Any], limit: float) -> None:
    assert found["steps_with_differing_ranks"] == []
    assert found["repeats"]
    assert found["loss_error"] < limit
    assert found["weight_error"] < limit
    assert found["average_error"] < limit
    assert found["communication_seconds"] > 0


def test_ranks_stop_fail_and_diverge_together(report):
    check_faults(report["faults"], 8 if report["transport"] == "peer" else 3)


def check_faults(found: dict[str, Any], steps: int) -> None:
    """`steps`: taken before a rank that asks to stop is heard; inside a kernel nobody asks between two steps."""
    assert found["stopped"] == [True, steps]
    assert "rows 4 to 5 of part.h5 are damaged" in found["told"]
    assert found["nonfinite"] == 3


def test_sums_wait_for_the_kernel_that_writes(report):
    assert report["wrong_sums"] == []


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(0)
    inputs = random.standard_normal((4400, 20)).astype("f4")
    with h5py.File(folder / "part.h5", "w") as file:
        file["inputs"], file["targets"] = inputs, np.sin(inputs[:, :4])
    path = folder / "run.toml"
    path.write_text(
        '[model]\nlayers = [20, 60, 50, 4]\nloss = "mse"\nactivation = "tanh"\n[data]\ntrain = "part.h5"\nbatch = 100\n'
        '[run]\nepochs = 2\nengine = "fused"\noutput = "out"\n'
    )
    return path


def train(run_toml: Path, name: str, *settings: str, **options: Any) -> tuple[Any, dict]:
    output = run_toml.parent / name
    chosen = [word for setting in settings for word in ("--set", setting)]
    done = ranks("-m", "distmlp", "train", str(run_toml), "--output", str(output), *chosen, **options)
    summary = output / "summary.json"
    return done, json.loads(summary.read_text()) if summary.exists() else {}


SCRIPT = """
import sys
from distmlp import RunConfig, train
config = RunConfig.load(sys.argv[1], ["run.transport=" + sys.argv[3], *sys.argv[4:]], sys.argv[2])
kept = [train(config, overwrite=True) for _ in range(2)]
import cupy
kept.append(cupy.ones(10))
"""


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        *(pytest.param(name, [], id=name, marks=TWO_GPUS) for name in ("nccl", "mpi", "staged", "peer", "auto")),
        *(pytest.param(name, ["run.share_gpu=true"], id=f"{name}-shared") for name in ("staged", "mpi", "peer")),
    ],
)
def test_runs_end_well(run_toml, transport, settings):
    """Through the command and by a script that keeps arrays: exit code 0 and nothing on standard error."""
    gpus = "0" if settings else None
    done, summary = train(run_toml, transport + str(len(settings)), f"run.transport={transport}", *settings, gpus=gpus)
    if transport == "mpi" and done.returncode == 4 and "not CUDA-aware" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[0][:200])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert summary["transport"] == transport or transport == "auto"
    assert f"transport {summary['transport']} (" in done.stdout
    by_exit = transport == "auto" or (transport == "staged" and settings)
    for end in ("", "import sys; sys.exit(0)") if by_exit else ("",):
        folder = str(run_toml.parent / f"{transport}{len(settings)}-script")
        again = ranks("-c", SCRIPT + end, str(run_toml), folder, transport, *settings, gpus=gpus)
        assert (again.returncode, again.stderr) == (0, ""), again.stderr


FOR_RESIDENT = ["run.precision=bf16", "model.layers=[20,200,4]"]
FOR_CHAIN = [*FOR_RESIDENT, "data.batch=4400"]
FOR_NARROW = ["run.precision=bf16", "data.batch=4400"]
ENDLESS = """
import os, sys
from pathlib import Path
from distmlp import RunConfig, train
from distmlp.comm.world import open_world
world = open_world(try_devices=True)
Path(sys.argv[2] + f".pid{world.rank}").write_text(str(os.getpid()))
settings = ["run.transport=" + sys.argv[3], "run.epochs=1000000", *sys.argv[4:]]
train(RunConfig.load(sys.argv[1], settings, sys.argv[2]), world=world)
"""


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        *(pytest.param(name, [], id=name, marks=TWO_GPUS) for name in ("nccl", "mpi", "staged", "peer", "auto")),
        *(pytest.param(name, ["run.share_gpu=true"], id=f"{name}-shared") for name in ("staged", "mpi", "peer")),
        *(
            pytest.param("peer", [*how, "run.share_gpu=true"], id=f"peer-shared-{name}")
            for name, how in (("narrow", FOR_NARROW), ("resident", FOR_RESIDENT), ("chain", FOR_CHAIN))
        ),
        pytest.param("peer", FOR_RESIDENT, id="peer-resident", marks=TWO_GPUS),
        pytest.param("peer", FOR_CHAIN, id="peer-chain", marks=TWO_GPUS),
    ],
)
def test_death_of_a_rank_ends_the_job(run_toml, tmp_path, transport, settings):
    output = tmp_path / "killed"
    argv = [sys.executable, "-c", ENDLESS, str(run_toml), str(output), transport, *settings]
    offload = {} if WITHOUT_DEVICE_MPI.isdisjoint(argv) else NO_OFFLOAD
    visible = {"CUDA_VISIBLE_DEVICES": "0"} if "run.share_gpu=true" in settings else {}
    job = start_mpi(2, argv, env=SETTINGS | offload | visible)
    deadline = time.monotonic() + 60
    while not ((metrics := output / "metrics.jsonl").exists() and metrics.stat().st_size):
        if job.poll() is not None:
            ended = finish(job)
            if transport == "mpi" and ended.returncode == 4 and "not CUDA-aware" in ended.stderr:
                pytest.skip(ended.stderr.strip().splitlines()[0][:200])
            pytest.fail(ended.stdout + ended.stderr)
        assert time.monotonic() < deadline, finish(job, 1)
        time.sleep(0.1)
    os.kill(int(Path(f"{output}.pid1").read_text()), signal.SIGKILL)
    ended = finish(job, timeout=15)
    assert ended.returncode != 0
    assert "rank 1" in ended.stderr.lower() + ended.stdout.lower()  # by the launcher or by us, who comes first


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["run.transport=nccl", "run.share_gpu=true"], ["ranks share a GPU, which NCCL refuses"]),
    ],
)
def test_what_cannot_work_is_refused(run_toml, settings, words):
    done, _ = train(run_toml, "refused", *settings, gpus="0" if "run.share_gpu=true" in settings or GPUS < 2 else None)
    if GPUS < 2 and "run.share_gpu=true" not in settings:
        assert "run.share_gpu" in done.stderr
    else:
        assert all(word in done.stderr for word in words), done.stderr
    assert done.returncode == 4
