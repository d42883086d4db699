"""From what `doctor` saw to what it says: findings, each with what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distmlp.comm.transport import device_hint

OK, NOTE, WARNING, FAULT = "ok", "note", "warning", "fault"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `state`: ok; note (nothing is wrong); warning (slower, or something unusable);
    fault (what `auto` would choose cannot work). `advice` is empty where nothing is to be done."""

    subject: str
    state: str
    text: str
    advice: str = ""


def findings(facts: dict[str, Any]) -> list[Finding]:
    """All findings, in the order of the report."""
    return [
        Finding("system", NOTE, f"distmlp {facts['distmlp']}, Python {facts['python']}, host {facts['host']}, "
                f"{facts['cpus']} CPU cores"),
        *_gpu(facts["gpu"], facts["variables"].get("CUDA_VISIBLE_DEVICES")),
        *_mpi(facts["mpi"]),
        *_device_memory(facts["mpi"], bool(facts["gpu"].get("devices"))),
        *_hdf5(facts["hdf5"]),
        *_slurm(facts["slurm"]),
    ]  # fmt: skip


def _gpu(gpu: dict[str, Any], visible: str | None) -> Iterator[Finding]:
    if "error" in gpu:
        yield Finding("GPU", WARNING, f"looking for GPUs failed: {gpu['error']}",
                      "check the driver with nvidia-smi; training on the CPU works")  # fmt: skip
        return
    driver, devices = gpu["driver"], gpu["devices"]
    if driver is None:
        yield Finding("GPU", NOTE, "no NVIDIA driver (libcuda.so.1 is not found)",
                      "on a GPU machine install the driver; without one training runs on the CPU")  # fmt: skip
    elif not devices:
        shown = "is not set" if visible is None else f"= {visible!r}"
        yield Finding("GPU", WARNING, f"driver for CUDA {driver['cuda']}, but no device is visible (error code "
                      f"{driver['code']}; CUDA_VISIBLE_DEVICES {shown})",
                      "unset CUDA_VISIBLE_DEVICES or name a device; in Slurm ask for GPUs (--gres=gpu:1)")  # fmt: skip
    else:
        name = f"driver {driver.get('version', '')}".strip()
        yield Finding("GPU", OK, f"{name} for CUDA {driver['cuda']}, {_count(len(devices), 'device')}")
        for device in devices:
            yield _device(device)
        yield from _peers(gpu["peers"])
    yield from _cupy(gpu)


def _device(device: dict[str, Any]) -> Finding:
    capability = device["capability"]
    text = (
        f"{device['ordinal']}: {device['name']}, {device['uuid']}, compute capability {capability // 10}."
        f"{capability % 10}, {device['memory_bytes'] / 2**30:.0f} GiB"
    )
    return Finding("GPU", OK, text)


def _peers(peers: list[list[bool]]) -> Iterator[Finding]:
    hidden = [(a, b) for a, row in enumerate(peers) for b, reached in enumerate(row) if a < b and not reached]
    if hidden:
        pairs = ", ".join(f"{a}–{b}" for a, b in hidden[:6])
        yield Finding("GPU", WARNING, f"no peer access between GPUs {pairs}: the transport `peer` cannot join them",
                      "let all GPUs of a host be visible to all ranks, and do not split them by containers; "
                      "`nvidia-smi topo -p2p r` shows what the hardware offers")  # fmt: skip
    elif len(peers) > 1:
        yield Finding("GPU", OK, "every GPU reaches every other's memory")


def _cupy(gpu: dict[str, Any]) -> Iterator[Finding]:
    devices, driver = gpu["devices"], gpu["driver"]
    if gpu["cupy"] is None:
        if devices:
            major = 13 if int(driver["cuda"].split(".")[0]) >= 13 else 12
            yield Finding("CuPy", WARNING, "not installed: the GPUs here are not used",
                          f"pip install 'distmlp[cuda{major}]'")  # fmt: skip
        else:
            yield Finding("CuPy", NOTE, "not installed; only GPUs need it")
        return
    built = "12" if "cuda12x" in gpu["cupy"] else "13"
    if driver is not None and int(driver["cuda"].split(".")[0]) < int(built):
        yield Finding("CuPy", FAULT if devices else WARNING,
                      f"{gpu['cupy']} is for CUDA {built}, the driver supports CUDA {driver['cuda']} at most",
                      "pip uninstall it and `pip install 'distmlp[cuda12]'`, or update the driver")  # fmt: skip
    else:
        yield Finding("CuPy", OK, gpu["cupy"] + (f", NCCL {gpu['nccl']}" if gpu.get("nccl") else ", no NCCL"))
    yield from _nvrtc(gpu, built)


def _nvrtc(gpu: dict[str, Any], built: str) -> Iterator[Finding]:
    nvrtc = gpu["nvrtc"]
    brings = f"pip install 'distmlp[cuda{built}]' brings"
    broken = FAULT if gpu["devices"] else NOTE
    if "version" not in nvrtc:
        yield Finding("NVRTC", broken, nvrtc["error"], f"{brings} it, or set CUDA_PATH to a toolkit")
        return
    for unfit in nvrtc["unfit"]:
        yield Finding("NVRTC", FAULT, unfit, "or use another GPU; `--set run.engine=reference` trains on the CPU")
    targets = nvrtc["targets"]
    span = f"NVRTC {nvrtc['version']} compiles for capabilities {targets[0] / 10:.1f} to {targets[-1] / 10:.1f}"
    if nvrtc["error"]:
        yield Finding("NVRTC", broken, f"{span}, but a trial kernel fails: {nvrtc['error']}",
                      f"pip install --force-reinstall; {brings} a matching set")  # fmt: skip
        return
    yield Finding("NVRTC", OK, f"{span}; a trial kernel compiles")
    if nvrtc["headers"]:
        where = ", ".join(nvrtc["includes"]) or "no folder with cuda_bf16.h found"
        yield Finding("NVRTC", NOTE, f"CUDA's headers do not compile: {nvrtc['headers']} ({where}); distmlp's kernels "
                      "need none, other programs' do",
                      f"{brings} them (nvidia-cuda-runtime, nvidia-cuda-cccl, nvidia-cuda-crt)")  # fmt: skip
    else:
        yield Finding("NVRTC", OK, f"CUDA's headers are in {nvrtc['includes'][0]}")


def _mpi(mpi: dict[str, Any]) -> Iterator[Finding]:
    launcher = mpi["launcher"]
    wanted = "needed for several ranks only: load the cluster's MPI module, or `pip install 'distmlp[mpich]'`"
    if mpi["mpi4py"] is None:
        yield Finding("MPI", WARNING, "mpi4py is not installed", "pip install mpi4py")
        return
    library = mpi["library"]
    if "error" in library:
        yield Finding("MPI", NOTE, f"mpi4py {mpi['mpi4py']} loads no MPI library: {_first(library['error'])}", wanted)
        return
    yield Finding("MPI", OK, f"mpi4py {mpi['mpi4py']} with {library['library'].strip()}")
    if launcher is None:
        yield Finding("MPI", NOTE, "no mpirun beside this Python or on PATH", wanted + ", or use srun")
        return
    ranks = mpi["ranks"]
    named = f"{launcher['path']} ({launcher['make'] or 'unknown make'})"
    if ranks.get("size") == 2 and "answers" not in ranks:
        yield Finding("MPI", OK, f"{named} starts two ranks that know of each other")
    else:
        yield Finding("MPI", WARNING, f"{named} with {library['make']} does not start two ranks: "
                      f"{ranks.get('error', 'each thinks it is alone')}",
                      f"use the launcher of {library['make']}, or let mpi4py load the launcher's own library "
                      "(MPI4PY_LIBMPI=/path/to/libmpi.so)")  # fmt: skip


def _device_memory(mpi: dict[str, Any], gpus: bool) -> Iterator[Finding]:
    trial = mpi["device"]
    if trial is None or "error" in mpi["library"]:
        return
    make = mpi["library"]["make"]
    if trial["works"]:
        yield Finding("MPI", OK, f"{make} moves device memory: {trial['reason']}")
    else:
        yield Finding("MPI", WARNING if gpus else NOTE, f"{make} does not move device memory: {trial['reason']}",
                      f"only the transport `mpi` on GPUs needs it: {device_hint(make)}" if gpus else "")  # fmt: skip


def _hdf5(hdf5: dict[str, Any]) -> Iterator[Finding]:
    if "error" in hdf5:
        yield Finding("HDF5", FAULT, f"h5py does not load: {hdf5['error']}", "pip install --force-reinstall h5py")
    else:
        yield Finding("HDF5", OK, f"HDF5 {hdf5['hdf5']}, h5py {hdf5['h5py']}; filters {', '.join(hdf5['filters'])}")
        if "zstd" not in hdf5["filters"]:
            yield Finding("HDF5", NOTE, "no plugins for blosc, lz4, zstd, bitshuffle",
                          "needed for shards compressed with them: pip install hdf5plugin")  # fmt: skip
    locking = hdf5["locking"]
    value = "is not set" if locking["variable"] is None else f"= {locking['variable']}"
    works = f"does not grant locks ({locking['works_here']})" if locking["works_here"] else "grants locks"
    yield Finding("HDF5", OK, f"file locking: distmlp takes no HDF5 locks, whatever the setting; HDF5_USE_FILE_LOCKING "
                  f"{value}; the file system of the working directory {works}",
                  "for other programs here: export HDF5_USE_FILE_LOCKING=FALSE before Python starts"
                  if locking["works_here"] else "")  # fmt: skip


def _slurm(slurm: dict[str, Any] | None) -> Iterator[Finding]:
    if slurm is None:
        yield Finding("Slurm", NOTE, "no srun here")
    elif "error" in slurm:
        yield Finding("Slurm", NOTE, f"srun does not work here: {slurm['error']}", "ask for the site's Slurm module")
    else:
        wirings = ", ".join(slurm["wirings"]) or "none that MPI can use"
        yield Finding("Slurm", OK, f"Slurm {slurm['version']}; srun --mpi offers {wirings}")


def _first(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
