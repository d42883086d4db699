"""The wrapper launch/mpirun and the environment files beside it, with the mpirun of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import PROJECT, clean_environment, finish, mpirun_path

WRAPPER = PROJECT / "launch" / "mpirun"
STOPPING = """
import time
from distmlp.comm.policy import guarded
def main():
    from distmlp.comm.signals import StopRequest
    from distmlp.comm.world import open_world
    world = open_world()
    with StopRequest() as stop:
        print("up", flush=True)
        deadline = time.monotonic() + 30
        while not any(world.all_gather(stop.requested)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return 75
guarded(main)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    found = mpirun_path()
    assert found is not None
    env = clean_environment()
    env["PATH"] = f"{Path(found).parent}{os.pathsep}{env['PATH']}"
    return subprocess.Popen(
        [str(WRAPPER), *arguments], env=env, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_stops_the_ranks_with_their_own_code(number):
    job = start("-n", "2", sys.executable, "-c", STOPPING)
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    time.sleep(0.3)
    job.send_signal(number)
    assert finish(job, 10).returncode == 75


def test_exit_code_and_output_pass_through():
    done = finish(start("-n", "2", sys.executable, "-c", "print('out'); raise SystemExit(3)"), 20)
    assert done.returncode == 3
    assert "out" in done.stdout


def test_wrapper_does_not_call_itself(tmp_path):
    (tmp_path / "mpirun").symlink_to(WRAPPER)
    for tool in ("bash", "readlink", "id"):  # and no other mpirun
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    env = {**clean_environment(), "PATH": str(tmp_path)}
    done = subprocess.run([str(WRAPPER), "-n", "1", "true"], env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, "no mpirun on PATH" in done.stderr) == (4, True)


@pytest.mark.parametrize("file", sorted((PROJECT / "launch" / "env").glob("*.sh")), ids=lambda path: path.stem)
def test_environment_files_can_be_sourced_anywhere(file):
    """Without the hardware they are for they may warn, but neither fail nor print to standard output."""
    script = f"set -eu; . {shlex.quote(str(file))}; env"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=20, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stderr
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    wanted = {
        "openmpi-ucx": "UCX_TLS",
        "mpich": "MPIR_CVAR_ENABLE_GPU",
        "intel-mpi": "I_MPI_FABRICS",
        "cray": "MPICH_GPU_SUPPORT_ENABLED",
    }
    assert wanted[file.stem] in names
    if not Path("/dev/nvidiactl").exists():
        assert "I_MPI_OFFLOAD" not in names  # a crash in MPI_Init without a GPU
