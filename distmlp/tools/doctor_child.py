"""What `distmlp doctor` finds out in child processes, where a broken library may crash: prints one JSON object.

Run as `python -m distmlp.tools.doctor_child gpu|library|ranks`; the last under a launcher.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distmlp.comm.binding import Gpu, list_gpus
from distmlp.errors import SystemUnfitError

PLAIN_TRIAL = 'extern "C" __global__ void trial(float* x) { x[threadIdx.x] += 1.0f; }'
HEADER_TRIAL = f"#include <cooperative_groups.h>\n#include <cuda_bf16.h>\n{PLAIN_TRIAL}"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def describe_gpu() -> dict[str, Any]:
    """Driver, devices and peers through the driver library; CuPy, NVRTC and NCCL where they are installed."""
    from distmlp.engine.device import find_obstacle

    facts: dict[str, Any] = {"driver": None, "devices": [], "peers": [], "cupy": _package("cupy-cuda")}
    with suppress(OSError):
        facts |= describe_driver(ctypes.CDLL("libcuda.so.1"), list_gpus())
    if facts["cupy"]:
        facts["nvrtc"] = _nvrtc([device["capability"] for device in facts["devices"]])
        facts["nccl"] = _nccl()
    facts["obstacle"] = find_obstacle()
    return facts


def describe_driver(cuda: ctypes.CDLL, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """`driver devices peers` by calls of the driver API; `code` is its error, 0 for none."""
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    facts: dict[str, Any] = {"driver": {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "code": code}}
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        facts["driver"]["version"] = next(word for word in text.split() if word[0].isdigit() and "." in word)
    handles = [ctypes.c_int() for _ in gpus]
    for ordinal, handle in enumerate(handles):
        cuda.cuDeviceGet(ctypes.byref(handle), ordinal)
    facts["devices"] = [
        {"ordinal": ordinal, "name": gpu.name, "uuid": gpu.uuid} | _abilities(cuda, handle)
        for ordinal, (gpu, handle) in enumerate(zip(gpus, handles, strict=True))
    ]
    facts["peers"] = [[a is b or _can_access(cuda, a, b) for b in handles] for a in handles]
    return facts


def _abilities(cuda: ctypes.CDLL, handle: ctypes.c_int) -> dict[str, int]:
    memory, major, minor = ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, handle)
    return {"capability": 10 * major.value + minor.value, "memory_bytes": memory.value}


def _can_access(cuda: ctypes.CDLL, first: ctypes.c_int, second: ctypes.c_int) -> bool:
    answer = ctypes.c_int()
    return cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), first, second) == 0 and bool(answer.value)


def _nvrtc(capabilities: list[int]) -> dict[str, Any]:
    """Version and targets of NVRTC, which GPUs it does not know, and whether it compiles: `error` if not.

    `headers`: whether a kernel that includes CUDA's headers compiles too ("" if it does): ours need none.
    """
    from distmlp.engine import compile as compiler

    facts: dict[str, Any] = {"unfit": [], "includes": include_folders()}
    try:
        facts |= {"version": compiler.version(), "targets": list(compiler.supported())}
        options = ["-std=c++17"]
        for capability in sorted(set(capabilities)):
            try:
                options = ["-std=c++17", f"-arch={compiler.architecture(capability)}"]
            except SystemUnfitError as error:
                facts["unfit"].append(str(error))
        facts["error"] = _trial(PLAIN_TRIAL, options)
        facts["headers"] = _trial(HEADER_TRIAL, [*options, *(f"-I{folder}" for folder in facts["includes"])])
    except SystemUnfitError as error:
        facts["error"] = str(error)
    return facts


def _trial(source: str, options: list[str]) -> str:
    """The first line of NVRTC's complaint about `source`; empty where it compiles."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "trial.cu", (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        return ""
    except nvrtc.NVRTCError as error:
        return (nvrtc.getProgramLog(program).strip().splitlines() or [str(error)])[0]
    finally:
        nvrtc.destroyProgram(program)


def include_folders() -> list[str]:
    """Folders with the CUDA headers: those of PyPI's packages, or of a toolkit."""
    roots = [Path(entry) / "nvidia" for entry in sys.path if entry]
    candidates = [folder for root in roots for folder in sorted(root.glob("*/include"))]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ]
    candidates.append(Path("/usr/local/cuda/include"))
    found = [folder for folder in candidates if (folder / "cuda_bf16.h").exists()]
    return [str(path) for folder in found for path in (folder, folder / "cccl") if path.is_dir()]


def _nccl() -> str | None:
    with suppress(Exception):
        from cupy.cuda import nccl

        version = nccl.get_version()
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return None


def _package(prefix: str) -> str | None:
    """`name version` of the installed distribution whose name begins with `prefix`."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(prefix):
            return f"{name} {distribution.version}"
    return None


def describe_library() -> dict[str, Any]:
    """The MPI library that mpi4py loads by itself."""
    from distmlp.comm.startup import library_make, start_mpi

    library = start_mpi(None)[1]
    return {"library": library, "make": library_make(library)}


def describe_ranks() -> dict[str, Any]:
    """What several ranks see of each other, on rank 0; nothing elsewhere."""
    from distmlp.comm.world import open_world

    world = open_world()
    return {"size": world.size, "library": world.mpi_version, "hosts": list(world.hosts)} if world.rank == 0 else {}


SUBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpu": describe_gpu,
    "library": describe_library,
    "ranks": describe_ranks,
}


def main() -> int:
    """Print the facts of the subject named on the command line."""
    facts = SUBJECTS[sys.argv[1]]()
    if facts:
        print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    from distmlp.comm.policy import guarded

    guarded(main)
