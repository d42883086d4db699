"""The GPU as the all-reduces of comm/device_sums.py see it, and the one that NCCL does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.comm.device_sums import ITEM_BYTES
from distmlp.engine.device_memory import Ledger, allocate
from distmlp.errors import SystemUnfitError

if TYPE_CHECKING:
    from distmlp.comm.world import World

T = TypeVar("T")
_runtime = cupy.cuda.runtime


class Gpu:
    """`comm.device_sums.Device` in the order of the ledger's stream; its second stream carries uploads alone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._stream = ledger, ledger.stream
        self._uploads = cupy.cuda.Stream(non_blocking=True)
        self._memory: list[cupy.cuda.MemoryPointer] = []

    def allocate(self, count: int) -> int:
        self._memory.append(allocate(count * ITEM_BYTES, "the sums over the ranks"))
        return self._memory[-1].ptr

    def copy(self, target: int, source: int, count: int) -> None:
        _runtime.memcpyAsync(
            target, source, count * ITEM_BYTES, _runtime.memcpyDeviceToDevice, self._stream.ptr
        )  # fmt: skip

    def add(self, out: int, first: int, second: int, count: int) -> None:
        with self._stream:
            cupy.add(_array(first, count), _array(second, count), out=_array(out, count))

    def synchronize(self) -> None:
        self._stream.synchronize()

    def start_download(self, address: int, host: NDArray) -> Any:
        self._ledger.start_download(address, host)
        return self._stream.record()

    def wait(self, token: Any) -> None:
        token.synchronize()

    def start_upload(self, address: int, host: NDArray) -> None:
        self._ledger.upload(address, host, self._uploads)

    def join_uploads(self) -> None:
        self._stream.wait_event(self._uploads.record())

    def download(self, address: int, host: NDArray) -> None:
        self._ledger.download(address, host)

    def upload(self, address: int, host: NDArray) -> None:
        self._ledger.upload(address, host)

    def release(self) -> None:
        self._stream.synchronize()
        self._uploads.synchronize()
        self._memory.clear()


def _array(address: int, count: int) -> cupy.ndarray:
    memory = cupy.cuda.UnownedMemory(address, count * ITEM_BYTES, None)
    return cupy.ndarray(count, np.float32, cupy.cuda.MemoryPointer(memory, 0))


class NcclSum:
    """NCCL's all-reduce on the engine's stream, behind the kernel that made the gradient; MPI only introduces the
    ranks. Every rank holds the bits of the one that did the addition, in an order that the topology fixes."""

    name = "nccl"

    def __init__(self, gpu: Gpu, world: World, ledger: Ledger) -> None:
        """Collective. Raises AgreedError where NCCL does not start."""
        from cupy.cuda import nccl

        self._gpu, self._world, self._stream = gpu, world, ledger.stream
        self._type, self._sum = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
        self.seconds = 0.0
        identity = world.agree(lambda: _explained(nccl.get_unique_id) if world.rank == 0 else None)
        identity = world.all_gather(identity)[0]
        self._communicator = world.agree(
            lambda: _explained(lambda: nccl.NcclCommunicator(world.size, identity, world.rank)), "NCCL"
        )
        self._began, self._ended = cupy.cuda.Event(), cupy.cuda.Event()

    def run(self, address: int, count: int) -> None:
        self._began.record(self._stream)
        self._communicator.allReduce(address, address, count, self._type, self._sum, self._stream.ptr)
        self._ended.record(self._stream)

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        with self._world.inside("all_reduce"):  # the wait for the other ranks is here
            self._gpu.download(address + (count - tail.size) * ITEM_BYTES, tail)
        self.seconds += cupy.cuda.get_elapsed_time(self._began, self._ended) / 1e3

    def close(self) -> None:
        """Every rank is done with the communicator, or the job is failing: aborting waits for nobody."""
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator = None
        self._gpu.release()


def _explained(function: Callable[[], T]) -> T:
    """`function()`, with NCCL's errors as SystemUnfitError."""
    try:
        return function()
    except Exception as error:  # NcclError, and whatever CuPy makes of a library that does not fit
        raise SystemUnfitError(
            f"NCCL does not start: {type(error).__name__}: {error}; NCCL_DEBUG=WARN says more, "
            "and --set run.transport=staged works without it"
        ) from None


def nccl_obstacle() -> str:
    """Why NCCL cannot be used by this process, "" if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's own words on a library that it does not find
        from cupy.cuda import nccl
    return "" if nccl.available else "NCCL is not installed (pip install nvidia-nccl-cu13, or -cu12)"
