"""Does this MPI library move device memory? Tried in a child process, since a library that cannot may crash.

The child is `python -m distmlp.comm.device_probe`: it prints one JSON line as it comes to each stage, so that a
crash tells where. Start it before MPI_Init in this process: starting processes is unsafe afterwards.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from distmlp.comm.hints import Launch, local_rank_hint
from distmlp.comm.transport import Probe

SECONDS = 60.0
_LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_WORLD",
    "OMPI_UNIVERSE",
    "OMPI_MCA_orte",  # version 4 passes its wiring on as settings
    "OMPI_MCA_ess",
    "HYDRA_BSTRAP",
    "PRTE_",
    "HYDI_",
    "MPI_LOCAL",
    "SLURM_",
    "FLUX_",
    "PALS_",
)


class DeviceProbe:
    """The child, started at once and read later. `command` stands in for it in tests."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", __spec__.name)) -> None:
        self._found: Probe | None = None
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=_alone(os.environ),
            process_group=0,  # a signal to all of the job asks it to stop; it must not cost the trial its answer
        )  # fmt: skip

    def result(self, seconds: float = SECONDS) -> Probe:
        """Wait for the child and read what it found, the first time; a child that hangs is killed."""
        if self._found is None:
            code = None
            try:
                output, _ = self._child.communicate(timeout=seconds)
                code = self._child.returncode
            except subprocess.TimeoutExpired:
                self._child.kill()
                output, _ = self._child.communicate()
            self._found = judge(output.decode(errors="replace"), code)
        return self._found

    def cancel(self) -> None:
        """End a trial whose outcome nobody has asked for: it would outlive the job, on its GPU."""
        if self._found is None:
            self._child.kill()
            self._child.communicate()
            self._found = Probe(False, "the trial was given up at the end of the job")


def begin(launch: Launch | None) -> DeviceProbe | None:
    """The trial for the rank that makes it on its host, where there is a GPU and CuPy; None elsewhere.

    To be called before MPI_Init.
    """
    if launch is None or local_rank_hint(launch) != 0 or find_spec("cupy") is None:
        return None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return DeviceProbe()


def judge(output: str, code: int | None) -> Probe:
    """What the child's lines and exit code (None: it hung) mean. Pure."""
    stages: list[dict[str, Any]] = []
    for line in output.splitlines():
        with suppress(ValueError):
            stages.append(json.loads(line))
    if not stages:
        return Probe(
            False, f"the trial ended with code {code} before it began" if code is not None else "the trial hung"
        )
    last = stages[-1]
    if "obstacle" in last:
        return Probe(False, last["obstacle"])
    if last.get("stage") == "done" and code == 0:
        return Probe(True, "device all-reduce, broadcast and exchange gave the right values in a trial")
    how = "hung" if code is None else f"crashed with signal {-code}" if code < 0 else f"ended with code {code}"
    return Probe(False, f"the trial's {last.get('stage', 'start')} {how}")


def _alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launcher's wiring: the child is a job of its own."""
    return {key: value for key, value in environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}


def build_claims(library: ctypes.CDLL) -> bool | None:
    """What the library says of itself, by MPIX_Query_cuda_support or MPIX_GPU_query_support; None without both."""
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int()
        cuda = 0  # MPIX_GPU_SUPPORT_CUDA
        return library.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer.value)
    return None


def try_device(say: Callable[[dict[str, Any]], None]) -> None:
    """Announce and try each stage on the first GPU. May crash."""
    from distmlp.comm.startup import library_file, start_mpi

    say({"stage": "MPI_Init"})
    mpi, library = start_mpi(None)
    if build_claims(ctypes.CDLL(library_file())) is False:
        say({"obstacle": "the library itself says that it has no CUDA support"})
        return
    say({"stage": "CUDA", "library": library})
    import cupy

    one, world = cupy.arange(1, 5, dtype=cupy.float32), mpi.COMM_WORLD
    for stage, action in (
        ("all-reduce", lambda out: world.Allreduce(one, out)),
        ("exchange", lambda out: world.Sendrecv(one, 0, 0, out, 0, 0)),
        ("broadcast", lambda out: (cupy.copyto(out, one), world.Bcast(out, 0))),
        ("all-reduce in place", lambda out: (cupy.copyto(out, one), world.Allreduce(mpi.IN_PLACE, out))),
    ):
        say({"stage": stage})
        out = cupy.zeros_like(one)
        cupy.cuda.get_current_stream().synchronize()
        action(out)
        if not bool((out == one * (1 if "reduce" not in stage else world.size)).all()):
            say({"obstacle": f"the trial's {stage} of device memory gave wrong values"})
            return
    mpi.Finalize()
    say({"stage": "done"})


if __name__ == "__main__":
    try:
        try_device(lambda stage: print(json.dumps(stage), flush=True))
    except Exception as error:
        print(json.dumps({"obstacle": f"{type(error).__name__}: {error}"}), flush=True)
