"""The GPU of this process: whether there is one that the fused engine can use, and what it can do."""

from __future__ import annotations

import ctypes
import importlib.util
import os

from distmlp.comm.binding import list_gpus
from distmlp.engine import compile as compiler
from distmlp.errors import SystemUnfitError

OLDEST = 75  # compute capability × 10
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute


def find_obstacle() -> str:
    """Why no GPU can be used by this process, in words that say what to install or set; empty if one can.

    Cheap and free of side effects: imports CuPy only where the driver library is there.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"no CUDA device is visible (CUDA_VISIBLE_DEVICES={visible!r}); unset it or name a device"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here (libcuda.so.1 not found); it needs a GPU machine with the driver installed"
    if importlib.util.find_spec("cupy") is None:
        return 'CuPy is not installed; run `pip install "distmlp[cuda13]"` (or `[cuda12]` for a CUDA 12 driver)'
    return _obstacle_with_driver(visible)


def _obstacle_with_driver(visible: str | None) -> str:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own classes, and ImportError for missing libraries
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        first_line = (str(error).splitlines() or [""])[0]
        return f"no CUDA device can be used{seen}: {type(error).__name__}: {first_line}"
    if not count:
        return f"no CUDA device is visible (CUDA_VISIBLE_DEVICES={visible!r})"
    name, capability = _first_gpu()
    if obstacle := unfit_capability(capability, name):
        return obstacle
    try:
        compiler.architecture(capability)
    except SystemUnfitError as error:
        return f"GPU {name}: {error}"
    return ""


def _first_gpu() -> tuple[str, int]:
    """Name and compute capability × 10, by calls of the driver, which open no GPU: this one may be another rank's."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return list_gpus()[0].name, 10 * major.value + minor.value


def unfit_capability(capability: int, name: str) -> str:
    """Why a GPU of this compute capability (× 10) cannot be used, empty if it can."""
    if capability < OLDEST:
        return (
            f"GPU {name} has compute capability {capability // 10}.{capability % 10}; "
            f"{OLDEST // 10}.{OLDEST % 10} or newer is needed"
        )
    return ""
