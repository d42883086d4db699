"""slurm/train.sbatch on a real Slurm: it trains, goes on after a signal, and leaves failed jobs alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm.cluster import Cluster, wait_for
from slurm.site import TRAIN, Site

LONG = ("--set", "run.steps=1000")

# `distmlp`, but the first run of a job takes a while: Slurm looks at time limits every 30 s only. The first lines are
# for the shell, where the path of Python may have spaces, and a string for Python.
_SLOW = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
'''
import os, time
from distmlp.__main__ import main
from distmlp.comm.world import World

swift = World.all_reduce

def slow(self, buffer):
    time.sleep(0.06)
    swift(self, buffer)

if "SLURM_RESTART_COUNT" not in os.environ:
    World.all_reduce = slow
main()
"""


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, str]:
    """A job that will reach its time limit, submitted first so that the other tests run while it does."""
    site = Site.make(slurm, tmp_path_factory.mktemp("limited"))
    path = site.program(_SLOW.format(python=sys.executable))
    # A limit of one minute, to be warned of 15 s before: Slurm does it 15 to 45 s after the start.
    options = ("--time=1", "--signal=B:USR1@15")
    return site, site.submit("run.toml", *LONG, options=options, DISTMLP_VENV="none", PATH=path)


@pytest.mark.parametrize("launcher", ["pmi2", "mpirun"])
def test_two_tasks_train_as_one_job(site: Site, launcher: str) -> None:
    job = site.train(launcher=launcher)
    assert (job.state, job.restarts) == ("COMPLETED", 0), site.log()
    summary = site.summary()
    assert (summary["status"], summary["ranks"], summary["steps"]) == ("finished", 2, 60)
    assert not list(site.folder.glob(".distmlp-*"))


@pytest.mark.parametrize("launcher", ["pmi2", "mpirun"])
def test_two_nodes(site: Site, launcher: str) -> None:
    job = site.train(launcher=launcher, options=("--nodes=2", "--ntasks-per-node=1"))
    assert (job.state, job.nodes) == ("COMPLETED", "n[1-2]"), site.log()
    assert site.summary()["ranks"] == 2


def test_every_task_of_an_array_goes_its_own_way(site: Site) -> None:
    job = site.submit("run.toml", *LONG, "--set", "run.seed=%a", "--output", "seed-%a", options=("--array=1-2",))
    site.wait_for_steps(10, "seed-1")
    site.wait_for_steps(10, "seed-2")
    site.cluster.run(["scancel", "--batch", "--signal=USR1", f"{job}_1"])
    restarts = [site.cluster.wait(f"{job}_{index}", 90).restarts for index in (1, 2)]
    assert restarts == [1, 0], site.log()
    first, second = site.summary("seed-1"), site.summary("seed-2")
    assert first["steps"] == second["steps"] == 1000
    assert first["weights_sha256"] != second["weights_sha256"]


@pytest.mark.parametrize(
    ("launcher", "to"), [("mpirun", "--batch"), ("pmi2", "")], ids=["batch-shell-mpirun", "tasks-srun"]
)
def test_signal_saves_and_requeues(site: Site, launcher: str, to: str) -> None:
    job = site.submit("run.toml", *LONG, launcher=launcher)
    site.wait_for_steps(10)
    site.cluster.run(["scancel", *filter(None, [to]), "--signal=USR1", job])
    ended = site.cluster.wait(job, 90)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), site.log()
    assert site.summary()["steps"] == 1000


def test_killed_rank_ends_the_job_without_requeue(site: Site) -> None:
    job = site.submit("run.toml", *LONG, "--set", "run.steps=100000")
    site.wait_for_steps(10)
    os.kill(_ranks(site.folder)[1], signal.SIGKILL)
    ended = site.cluster.wait(job, 15)
    assert (ended.state, ended.restarts) == ("FAILED", 0), site.log()
    assert ended.exit_code == 128 + signal.SIGKILL
    assert not _ranks(site.folder)


def test_preempted_job_saves_and_goes_on_when_its_node_is_free(site: Site) -> None:
    job = site.submit("run.toml", *LONG, options=("--nodelist=n2", "--exclusive"))
    site.wait_for_steps(10)
    options = ("--partition=urgent", "--nodelist=n2", "--exclusive", f"--output={site.folder}/urgent.log")
    urgent = site.cluster.submit(*options, "--wrap=sleep 1")
    assert site.cluster.wait(urgent, 60).state == "COMPLETED"
    ended = site.cluster.wait(job, 90)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), site.log()
    assert re.search(r"resumed from \S*step-0*[1-9]", site.log()), site.log()  # it had been given the time to save
    assert site.summary()["steps"] == 1000


def test_job_goes_on_after_its_node_was_lost(site: Site) -> None:
    words = ("--set", "run.checkpoint_every='5 steps'")
    job = site.submit("run.toml", *LONG, *words, options=("--nodelist=n2", "--exclusive"))
    site.wait_for_steps(20)
    site.cluster.lose_node("n2", job)
    wait_for(lambda: site.cluster.job(job).restarts == 1, 20, "requeue", lambda: str(site.cluster.job(job)))
    site.cluster.start_node("n2")
    ended = site.cluster.wait(job, 120)
    assert (ended.state, ended.nodes, ended.restarts) == ("COMPLETED", "n2", 1), site.log()
    assert "resumed from" in site.log()
    assert site.summary()["steps"] == 1000


def test_cancelled_job_saves_and_stays_down(site: Site) -> None:
    job = site.submit("run.toml", "--set", "run.steps=100000")
    site.wait_for_steps(10)
    site.cluster.run(["scancel", job])
    ended = site.cluster.wait(job, 15)
    assert (ended.state, ended.restarts) == ("CANCELLED", 0), site.log()
    assert list((site.folder / "out" / "checkpoints").glob("step-*.h5"))


def test_restarts_are_bounded(site: Site) -> None:
    job = site.submit("run.toml", "--set", "run.steps=100000", DISTMLP_MAX_RESTARTS="0")
    site.wait_for_steps(10)
    site.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    ended = site.cluster.wait(job, 15)
    assert (ended.state, ended.exit_code, ended.restarts) == ("FAILED", 75, 0), site.log()
    assert "submit again to continue" in site.log()


def test_wrong_configuration_is_told_once_and_not_tried_again(site: Site) -> None:
    job = site.train("--set", "data.batsch=4")
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), site.log()
    assert site.log().count("data.batsch") == 1


@pytest.mark.parametrize(
    ("options", "visible"),
    [(("--gpus-per-node=2",), ["0,1", "0,1"]), (("--gpus-per-node=0", "--gpus-per-task=1"), ["0", "1"])],
    ids=["all-tasks-see-all", "one-each"],
)
def test_what_every_task_is_given(site: Site, options: tuple[str, ...], visible: list[str]) -> None:
    path = site.program('#!/bin/sh\necho "GPUS=$CUDA_VISIBLE_DEVICES THREADS=$OMP_NUM_THREADS ARGUMENTS=$*"\n')
    job = site.submit("run.toml", options=(*options, "--cpus-per-task=2"), DISTMLP_VENV="none", PATH=path)
    assert site.cluster.wait(job).state == "COMPLETED", site.log()
    lines = sorted(line for line in site.log().splitlines() if line.startswith("GPUS="))
    assert lines == [f"GPUS={gpus} THREADS=2 ARGUMENTS=train run.toml --resume" for gpus in visible]


def test_usage_is_told_without_arguments(site: Site) -> None:
    job = site.submit()
    assert site.cluster.wait(job).exit_code == 2
    assert "usage: sbatch" in site.log()


def test_signal_before_the_program_is_ready_starts_it_again(site: Site) -> None:
    # Stands for a start-up that takes longer than the time to the signal: the first run dies of it.
    path = site.program('#!/bin/sh\n[ "$SLURM_RESTART_COUNT" ] || { echo waiting; exec sleep 30; }\n')
    job = site.submit("run.toml", DISTMLP_VENV="none", PATH=path)
    wait_for(lambda: "waiting" in site.log(), 20, "start", site.log)
    site.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    ended = site.cluster.wait(job)
    assert (ended.state, ended.restarts) == ("COMPLETED", 1), site.log()


@pytest.mark.skipif("DISTMLP_OPENMPI_VENV" not in os.environ, reason="needs a second environment, with Open MPI")
@pytest.mark.parametrize("launcher", ["pmix", "mpirun"])
def test_open_mpi_trains_as_one_job(site: Site, launcher: str) -> None:
    environment = {"DISTMLP_VENV": os.environ["DISTMLP_OPENMPI_VENV"], "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    job = site.train(launcher=launcher, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **environment)
    assert job.state == "COMPLETED", site.log()
    assert site.summary()["ranks"] == 2
    assert "Open MPI" in site.summary()["versions"]["mpi"]


def test_an_environment_that_is_not_there_is_not_replaced_by_another(site: Site) -> None:
    job = site.train(DISTMLP_VENV=str(site.folder / "gone"))
    assert (job.state, job.exit_code) == ("FAILED", 2), site.log()
    assert "gone: no virtual environment there" in site.log()


def test_time_limit_saves_requeues_and_ends_as_if_never_stopped(limited: tuple[Site, str]) -> None:
    site, job = limited
    ended = site.cluster.wait(job, 120)
    assert ended.state == "COMPLETED", site.log()
    assert ended.restarts >= 1  # on a slow machine the continued run may reach its limit too
    assert "resumed from" in site.log()

    straight = site.train(*LONG, "--output", "straight")
    assert (straight.state, straight.restarts) == ("COMPLETED", 0), site.log()
    assert site.summary()["weights_sha256"] == site.summary("straight")["weights_sha256"]
    assert site.summary()["steps"] == 1000


def test_scripts_are_valid_bash() -> None:
    for script in sorted(TRAIN.parent.glob("*.sbatch")):
        subprocess.run(["bash", "-n", script], check=True)


def _ranks(folder: Path) -> list[int]:
    """Process ids of the Python ranks that run in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.readlink(process / "cwd") == str(folder)
                and b"python" in (process / "cmdline").read_bytes().split(b"\0")[0]
            ):
                found.append(int(process.name))
        except OSError:  # ended meanwhile
            continue
    return sorted(found)
