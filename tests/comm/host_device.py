"""Host memory in the place of a GPU: what is queued happens as late as it may, so that a missing wait shows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class HostDevice:
    """`comm.device_sums.Device`. `log`: what happened to host copies, in order."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.uploads: list[Callable[[], None]] = []
        self.kept: list[NDArray] = []
        self.log: list[str] = []
        self._downloads = self._waits = self._starts = 0

    def buffer(self, values: NDArray) -> int:
        """Address of a copy of `values`, on the "device"."""
        self.kept.append(np.array(values, np.float32))
        return self.kept[-1].ctypes.data

    def allocate(self, count: int) -> int:
        return self.buffer(np.full(count, np.nan))

    def copy(self, target: int, source: int, count: int) -> None:
        self.queue.append(lambda: np.copyto(view(target, count), view(source, count)))

    def add(self, out: int, first: int, second: int, count: int) -> None:
        self.queue.append(lambda: np.copyto(view(out, count), view(first, count) + view(second, count)))

    def synchronize(self) -> None:
        _run(self.queue)

    def start_download(self, address: int, host: NDArray) -> tuple[int, list]:
        self.log.append(f"down {self._downloads}")
        self._downloads += 1
        self.queue.append(lambda: np.copyto(host, view(address, host.size)))
        return self._downloads - 1, self.queue[:]

    def wait(self, token: tuple[int, list]) -> None:
        number, queued = token
        self.log.append(f"wait {number}")
        done = [each for each in queued if each in self.queue]
        self.queue = [each for each in self.queue if each not in done]
        _run(done)

    def start_upload(self, address: int, host: NDArray) -> None:
        self.log.append(f"up {self._starts}")
        self._starts += 1
        self.uploads.append(lambda: np.copyto(view(address, host.size), host))

    def join_uploads(self) -> None:
        self.queue += self.uploads
        self.uploads = []

    def download(self, address: int, host: NDArray) -> None:
        self.synchronize()
        np.copyto(host, view(address, host.size))

    def upload(self, address: int, host: NDArray) -> None:
        values = host.copy()
        self.queue.append(lambda: np.copyto(view(address, values.size), values))

    def release(self) -> None:
        self.synchronize()
        assert not self.uploads


def view(address: int, count: int) -> NDArray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _run(queue: list[Callable[[], None]]) -> None:
    while queue:
        queue.pop(0)()
