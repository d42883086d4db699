"""A loaded cubin: its constants, and launches of its kernels."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import driver
from numpy.typing import NDArray

from distmlp.engine.device_memory import Ledger
from distmlp.errors import SystemUnfitError

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: what the kernel declares itself
_REGISTERS, _LOCAL = 4, 3


class Kernel:
    """A kernel with a fixed launch shape. Arguments are NumPy scalars; addresses go as uint64.

    A cooperative launch needs all blocks on the device at once, so the grid is checked against it here, once.
    """

    def __init__(
        self,
        function: Any,
        name: str,
        ledger: Ledger,
        blocks: int,
        threads: int,
        shared: int = 0,
        grid_wide: bool = False,
    ) -> None:
        self._function, self._ledger, self._grid_wide = function, ledger, grid_wide
        self._shape = ((blocks, 1, 1), (threads, 1, 1))
        self._shared = shared
        if shared:
            driver.funcSetAttribute(function.ptr, _DYNAMIC_SHARED, shared)
        if grid_wide:
            each = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, shared)
            room = each * cupy.cuda.Device().attributes["MultiProcessorCount"]
            if blocks > room:
                raise SystemUnfitError(
                    f"{name}: {blocks} blocks of {threads} threads with {shared:,} bytes of shared memory must run at "
                    f"once, and this GPU has room for {room}; another program may be using it"
                )

    def __call__(self, *arguments: Any) -> None:
        self._function(*self._shape, arguments, self._shared, self._ledger.stream, self._grid_wide)
        self._ledger.kernel_launches += 1

    def figures(self) -> dict[str, int]:
        """Registers a thread, bytes of local memory a thread (spills), bytes of shared memory a block."""
        get = driver.funcGetAttribute
        return {
            "registers": get(_REGISTERS, self._function.ptr),
            "local_bytes": get(_LOCAL, self._function.ptr),
            "shared_bytes": get(_SHARED, self._function.ptr) + self._shared,
        }


class Module:
    """One loaded copy of a cubin, with constants of its own."""

    def __init__(self, code: bytes, ledger: Ledger) -> None:
        self._ledger = ledger
        self._module = cupy.cuda.function.Module()
        self._module.load(code)

    def kernel(self, name: str, blocks: int, threads: int, shared: int = 0, grid_wide: bool = False) -> Kernel:
        function = self._module.get_function(name)
        return Kernel(function, name, self._ledger, blocks, threads, shared, grid_wide)

    def read_constant(self, name: str, count: int) -> NDArray:
        values = np.empty(count, np.int32)
        self._ledger.download(int(self._module.get_global_var(name)), values)
        return values

    def write_constant(self, name: str, value: NDArray) -> None:
        self._ledger.upload(int(self._module.get_global_var(name)), value)
