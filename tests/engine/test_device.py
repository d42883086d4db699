"""Whether a GPU can be used, and what is said when it cannot; the driver and CuPy are stubs."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from distmlp.engine import compile as compiler
from distmlp.engine import device
from distmlp.errors import SystemUnfitError


class Broken(Exception):
    pass


def stub_cupy(monkeypatch: pytest.MonkeyPatch, capability: str = "90", count: int = 1, fault: Any = None) -> None:
    """A driver, a CuPy with `count` devices, and an NVRTC for 7.5 to 12.1."""

    def get_count() -> int:
        if fault is not None:
            raise fault
        return count

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=get_count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "_first_gpu", lambda: ("Stub 9000", int(capability)))
    monkeypatch.setattr(compiler, "supported", lambda: (75, 80, 90, 100, 120, 121))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")


def test_a_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cupy(monkeypatch)
    assert device.find_obstacle() == ""


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_devices(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    stub_cupy(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert f"no CUDA device is visible (CUDA_VISIBLE_DEVICES={value!r})" in device.find_obstacle()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cupy(monkeypatch)

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    assert "no NVIDIA driver here (libcuda.so.1 not found)" in device.find_obstacle()


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cupy(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "distmlp[cuda13]"' in device.find_obstacle()


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ("52", r"GPU Stub 9000 has compute capability 5\.2; 7\.5 or newer is needed"),
        ("130", r"GPU Stub 9000: .*capability 13\.0, and NVRTC 13\.0 compiles for 7\.5 to 12\.1; install CuPy"),
    ],
)
def test_too_old_and_too_new(monkeypatch: pytest.MonkeyPatch, capability: str, said: str) -> None:
    stub_cupy(monkeypatch, capability)
    assert re.search(said, device.find_obstacle())


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cupy(monkeypatch)

    def missing() -> tuple[int, ...]:
        raise SystemUnfitError('the CUDA run-time compiler NVRTC cannot be loaded; run `pip install "distmlp[cuda13]"`')

    monkeypatch.setattr(compiler, "supported", missing)
    assert "GPU Stub 9000: the CUDA run-time compiler NVRTC cannot be loaded" in device.find_obstacle()


@pytest.mark.parametrize("fault", [Broken("cudaErrorNoDevice: no CUDA-capable device\nmore"), ImportError()])
def test_cupy_that_fails(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    stub_cupy(monkeypatch, fault=fault)
    obstacle = device.find_obstacle()
    assert obstacle.startswith(f"no CUDA device can be used: {type(fault).__name__}")
    assert "\n" not in obstacle


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cupy(monkeypatch, count=0)
    assert "no CUDA device is visible" in device.find_obstacle()
