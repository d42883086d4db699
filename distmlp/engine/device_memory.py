"""Device memory of the fused engine: one allocation, named pieces, and the ledger of what crosses the bus."""

from __future__ import annotations

from collections.abc import Iterable

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.engine.plan_task import Buffer, aligned
from distmlp.errors import SystemUnfitError

_runtime = cupy.cuda.runtime
_FROM_HOST, _TO_HOST = _runtime.memcpyHostToDevice, _runtime.memcpyDeviceToHost


class Ledger:
    """Counts bytes and launches where they happen; every copy and launch of the engine goes through it."""

    def __init__(self, stream: cupy.cuda.Stream) -> None:
        self.stream = stream
        self.host_to_device_bytes = 0
        self.device_to_host_bytes = 0
        self.kernel_launches = 0
        self.steps = 0

    def upload(self, address: int, array: NDArray, stream: cupy.cuda.Stream | None = None) -> None:
        """Copy `array` (contiguous) to `address` in the order of `stream` (default: the engine's).

        A pageable array may be changed when this returns; a pinned one not before the stream has passed it.
        """
        assert array.flags.c_contiguous
        if array.nbytes:
            _runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, _FROM_HOST, (stream or self.stream).ptr)
        self.host_to_device_bytes += array.nbytes

    def download(self, address: int, array: NDArray) -> None:
        """Copy from `address` into `array` (contiguous), after all work queued so far; it is there on return."""
        self.start_download(address, array)
        self.stream.synchronize()

    def start_download(self, address: int, array: NDArray) -> None:
        """As `download`, but only queued: `array` should be pinned, and is there once the stream has passed this."""
        assert array.flags.c_contiguous
        if array.nbytes:
            _runtime.memcpyAsync(array.ctypes.data, address, array.nbytes, _TO_HOST, self.stream.ptr)
        self.device_to_host_bytes += array.nbytes

    def as_dict(self) -> dict[str, int]:
        names = ("host_to_device_bytes", "device_to_host_bytes", "kernel_launches", "steps")
        return {name: getattr(self, name) for name in names}


def allocate(size_bytes: int, what: str) -> cupy.cuda.MemoryPointer:
    """Device memory outside CuPy's pool. Raises SystemUnfitError with the bytes needed and free."""
    try:
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, size_bytes)), 0)
    except cupy.cuda.runtime.CUDARuntimeError:
        free, total = _runtime.memGetInfo()
        raise SystemUnfitError(
            f"GPU out of memory: {size_bytes:,} bytes for {what}, {free:,} of {total:,} are free; use a smaller "
            "data.batch, set data.residence = stream, or end other programs on this GPU"
        ) from None


class Arena:
    """The pieces of `buffers` in one allocation, each at a multiple of 256 bytes.

    `poison`: a byte that fills whatever need not be zero, for tests; None leaves it as it is.
    """

    def __init__(self, buffers: Iterable[Buffer], stream: cupy.cuda.Stream, poison: int | None = None) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        size, zeroed = 0, []
        for buffer in buffers:
            self._places[buffer.name] = (size, buffer.size_bytes)
            if buffer.zeroed:
                zeroed.append(buffer.name)
            size += aligned(buffer.size_bytes, 256)
        self._memory = allocate(size, "the network and its batch")
        if poison is not None:
            self._memory.memset_async(poison, size, stream)
        for name in zeroed:
            self.zero(name, stream)

    def address(self, name: str) -> int:
        """Where piece `name` begins; 0, a null pointer, where the plan has none."""
        place = self._places.get(name)
        return 0 if place is None else self._memory.ptr + place[0]

    def zero(self, name: str, stream: cupy.cuda.Stream) -> None:
        offset, size = self._places[name]
        (self._memory + offset).memset_async(0, size, stream)

    def has(self, name: str) -> bool:
        return name in self._places

    def free(self) -> None:
        """Give the memory back; nothing may be asked of it afterwards."""
        self._memory, self._places = None, {}


def pinned(size_bytes: int) -> NDArray:
    """Page-locked host memory as bytes (size_bytes,)."""
    memory = cupy.cuda.alloc_pinned_memory(max(1, size_bytes))
    return np.frombuffer(memory, np.uint8, max(1, size_bytes))
