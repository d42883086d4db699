"""Launchers that do not fit the MPI library are refused at once, by every process, with one clear message."""

from __future__ import annotations

import sys
import time

import pytest
from launching import finish, run_mpi, run_python, start_mpi

from distmlp.comm.hints import Launch
from distmlp.comm.startup import crowded, library_make, mismatch, unwired

OPEN_WORLD = """
from distmlp.comm.policy import guarded
def main():
    from distmlp.comm.world import open_world
    print("size", open_world().size)
guarded(main)
"""
HINTS = [
    pytest.param({"PMI_SIZE": "4", "PMI_RANK": "1"}, "PMI_SIZE", "4 processes", id="PMI"),
    pytest.param({"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "77"}, "PMI_SIZE", "4 processes", id="closed PMI wire"),
    pytest.param(
        {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_PORT": "localhost:9"}, "PMI_SIZE", "4 processes", id="no port"
    ),
    pytest.param(
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE", "4 processes", id="Open MPI"
    ),
    pytest.param(
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS", "2 processes", id="Slurm"
    ),
    pytest.param({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK", "rank 1 of several", id="PMIx"),
]


@pytest.mark.parametrize(("hints", "variable", "claim"), HINTS)
def test_hints_without_a_launcher_are_refused(hints, variable, claim):
    start = time.monotonic()
    done = run_python(0, OPEN_WORLD, env=hints, timeout=20)
    assert time.monotonic() - start < 10
    assert (done.returncode, done.stdout) == (4, "")
    assert f"{variable} says {claim}" in done.stderr
    assert "(MPI size 1)" in done.stderr
    assert "MPI library: " in done.stderr
    assert "launch with" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_process_of_a_broken_launch_speaks():
    """Two copies that cannot know of each other: neither may be silent (both may be numbered 1)."""
    jobs = [start_mpi(0, [sys.executable, "-c", OPEN_WORLD], env={"PMI_SIZE": "4", "PMI_RANK": "1"}) for _ in range(2)]
    for job in jobs:
        done = finish(job, 20)
        assert done.returncode == 4
        assert "PMI_SIZE says 4 processes" in done.stderr


def test_batch_shell_of_slurm_is_one_process():
    done = run_python(0, OPEN_WORLD, env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    assert (done.returncode, done.stdout) == (0, "size 1\n")


def test_mpirun_of_one_process_needs_no_mpi_library():
    script = OPEN_WORLD.replace("    print", "    import sys; print('mpi4py' in sys.modules);print")
    done = run_python(1, script)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "size", "1"])


def test_missing_library_is_named_once(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "raise ImportError('libmpi.so.12: cannot open shared object file')"
    )
    done = run_python(2, OPEN_WORLD, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 4
    assert done.stderr.count("no MPI library can be loaded: libmpi.so.12") == 1


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("MPICH Version: 5.0.2 MPICH Release date", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI", "Open MPI"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", "Intel MPI"),
        ("MPI VERSION : CRAY MPICH version 8.1.29.25", "Cray MPICH"),
        ("MVAPICH2 Version : 2.3.7", "MVAPICH"),
    ],
)
def test_make_of_library(text, make):
    assert library_make(text) == make


@pytest.mark.parametrize(
    ("variable", "live", "refused"),
    [("PMIX_RANK", False, True), ("PMIX_RANK", True, False), ("PMI_SIZE", False, False)],
)
def test_only_a_pmix_rank_without_server_is_refused_untried(variable, live, refused):
    assert bool(unwired(Launch("x", None, 1, variable, live), "Open MPI")) == refused


@pytest.mark.parametrize(
    ("environ", "cores", "expected"),
    [({"MPI_LOCALNRANKS": "3"}, 2, True), ({"MPI_LOCALNRANKS": "2"}, 2, False), ({"MPI_LOCALNRANKS": "2"}, 1.5, True),
     ({}, 1, False), ({"MPI_LOCALNRANKS": "all"}, 1, False)],
)  # fmt: skip
def test_more_ranks_than_cores_are_noticed(environ, cores, expected):
    assert crowded(environ, cores) == expected


def test_mismatch_names_both_sizes_library_and_launcher():
    error = mismatch(Launch("srun (Slurm)", 8, 3, "SLURM_NTASKS", True), "MPI says 0 of 2", "MPICH 5", "MPICH", 2)
    for part in ("SLURM_NTASKS says 8 processes", "srun (Slurm)", "(MPI size 2)", "MPICH 5", "--mpi=pmi2"):
        assert part in str(error)


def test_good_run_is_silent():
    done = run_mpi(3, [sys.executable, "-c", OPEN_WORLD])
    assert (done.returncode, done.stdout, done.stderr) == (0, "size 3\n", "")
