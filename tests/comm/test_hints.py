"""What the environment of each launcher says; the environments are those seen on real systems, cut short."""

from __future__ import annotations

import os

import pytest

from distmlp.comm.hints import Launch, how_to_launch, is_terminal, local_rank_hint, read_launch

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_SRUN_COMM_PORT": "4711", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
PRTE = {"PMIX_RANK": "2", "PMIX_SERVER_URI41": "prterun-a@0.0;tcp4://127.0.0.1:5", "PMIX_NAMESPACE": "prterun-a@1"}


def read(environ: dict[str, str]) -> tuple[str, int | None, int, str, bool] | None:
    launch = read_launch(environ)
    return launch and (launch.launcher, launch.size, launch.rank, launch.variable, launch.live)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="alone"),
        pytest.param(BATCH, None, id="batch shell of Slurm, which is no task"),
        pytest.param(
            {**PRTE, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
            ("mpirun of Open MPI", 4, 2, "OMPI_COMM_WORLD_SIZE", True),
            id="mpirun of Open MPI 5",
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:5"},
            ("mpirun of Open MPI", 4, 2, "OMPI_COMM_WORLD_SIZE", True),
            id="mpirun of Open MPI 4",
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
            ("mpirun of Open MPI", 4, 2, "OMPI_COMM_WORLD_SIZE", False),
            id="Open MPI's variables without its launcher",
        ),
        pytest.param(
            {"PMI_SIZE": "3", "PMI_RANK": "1", "PMI_FD": "0", "MPI_LOCALNRANKS": "3"},
            ("mpiexec of MPICH or Intel MPI (hydra)", 3, 1, "PMI_SIZE", True),
            id="hydra",
        ),
        pytest.param(
            {"PMI_SIZE": "4", "PMI_RANK": "1"},
            ("a PMI launcher (mpiexec of MPICH, Intel MPI, …)", 4, 1, "PMI_SIZE", False),
            id="PMI variables left over from another shell",
        ),
        pytest.param(
            {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "99999"},
            ("a PMI launcher (mpiexec of MPICH, Intel MPI, …)", 4, 1, "PMI_SIZE", False),
            id="PMI wire that is closed",
        ),
        pytest.param(
            {**BATCH, **STEP, "SLURM_PROCID": "5"},
            ("srun (Slurm)", 8, 5, "SLURM_NTASKS", True),
            id="srun without PMI",
        ),
        pytest.param(
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
            ("srun (Slurm)", 2, 1, "SLURM_NTASKS", False),
            id="Slurm's variables without Slurm",
        ),
        pytest.param(
            {**BATCH, **STEP, "SLURM_STEP_NUM_TASKS": "1"},
            ("srun (Slurm)", 1, 0, "SLURM_STEP_NUM_TASKS", True),
            id="interactive step: one task in an allocation of 8",
        ),
        pytest.param(
            {**BATCH, **STEP, "SLURM_PROCID": "3", "PMI_SIZE": "8", "PMI_RANK": "3", "PMI_FD": "0"},
            ("srun (Slurm, PMI)", 8, 3, "PMI_SIZE", True),
            id="srun --mpi=pmi2",
        ),
        pytest.param(
            {**BATCH, **STEP, **PRTE, "SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5"},
            ("mpirun of Open MPI", 6, 5, "OMPI_COMM_WORLD_SIZE", True),
            id="mpirun in Slurm: the step is of its daemons",
        ),
        pytest.param(
            {
                **BATCH,
                **STEP,
                "SLURM_NTASKS": "2",
                "PMI_SIZE": "6",
                "PMI_RANK": "4",
                "PMI_FD": "0",
                "HYDI_CONTROL_FD": "7",
            },
            ("mpiexec of MPICH or Intel MPI (hydra)", 6, 4, "PMI_SIZE", True),
            id="hydra in Slurm: the step is of its proxies",
        ),
        pytest.param(
            {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1", "FLUX_KVS_NAMESPACE": "x", "PMI_SIZE": "4", "PMI_RANK": "1"},
            ("flux run", 4, 1, "PMI_SIZE", False),
            id="flux",
        ),
        pytest.param(
            {"PALS_RANKID": "3", "PALS_APID": "x"},
            ("mpiexec of PALS (Cray)", None, 3, "PALS_RANKID", True),
            id="PALS",
        ),
        pytest.param(PRTE, ("prterun or another PMIx launcher", None, 2, "PMIX_RANK", True), id="prterun"),
        pytest.param(
            {"PMIX_RANK": "1"}, ("prterun or another PMIx launcher", None, 1, "PMIX_RANK", False), id="PMIX_RANK alone"
        ),
        pytest.param({"PMI_SIZE": "many", "PMI_RANK": ""}, None, id="not numbers"),
    ],
)
def test_launch_of_environment(environ, expected):
    os.fstat(0)  # the tables above take descriptor 0 for an open wire
    assert read(environ) == expected


@pytest.mark.parametrize(
    ("launcher", "make", "advice"),
    [
        ("srun (Slurm)", "Open MPI", "srun --mpi=pmix"),
        ("srun (Slurm)", "MPICH", "srun --mpi=pmi2"),
        ("mpirun of Open MPI", "MPICH", "`mpirun` (mpiexec.hydra) of this MPICH"),
        ("mpiexec of MPICH or Intel MPI (hydra)", "Open MPI", "`mpirun` of this Open MPI"),
    ],
)
def test_advice_names_the_right_launcher(launcher, make, advice):
    assert advice in how_to_launch(Launch(launcher, 4, 0, "X", True), make)


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, 1),
        ({"SLURM_STEP_ID": "0", "PMI_SIZE": "4", "PMI_RANK": "2", "SLURM_LOCALID": "0"}, 0),
        ({"PMIX_RANK": "3", "SLURM_LOCALID": "0"}, 3),
    ],
)
def test_local_rank(environ, local):
    launch = read_launch(environ)
    assert launch is not None
    assert local_rank_hint(launch, environ) == local


@pytest.mark.parametrize(
    ("environ", "launchers_output", "expected"),
    [
        ({}, "", True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "/dev/pts/3", True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "/tmp/log.txt", False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "pipe:[42]", False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "", False),
    ],
)
def test_pseudo_terminal_of_open_mpi_is_looked_through(monkeypatch, environ, launchers_output, expected):
    def readlink(path: str) -> str:
        if not launchers_output:
            raise PermissionError
        return launchers_output

    monkeypatch.setattr(os, "readlink", readlink)
    _, slave = os.openpty()
    with open(slave, "w") as terminal, open(os.devnull, "w") as nothing:
        assert is_terminal(terminal, environ) == expected
        assert not is_terminal(nothing, environ)
