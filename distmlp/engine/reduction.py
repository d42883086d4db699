"""The sum of the gradients over the ranks, between two launches, through page-locked host memory."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from distmlp.engine import tally as slot
from distmlp.engine.device_memory import pinned
from distmlp.engine.tally import TALLY

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.engine.fused_state import DeviceState


class StagedReduction:
    """Device → pinned buffer → `World.all_reduce` → device: works with any MPI library.

    `tally` holds the sums of the last call, see tally.py; `seconds` what the collectives took.
    """

    name = "staged"

    def __init__(self, state: DeviceState, world: World) -> None:
        self._state, self._world = state, world
        self._size = state.network.size
        self._buffer = pinned((self._size + TALLY) * 4).view(np.float32)[: self._size + TALLY]
        self.tally = self._buffer[self._size :]
        self.seconds = 0.0

    def reduce(self, stop: bool, failed: bool) -> None:
        """Replace the device's gradient and tally by their sums over all ranks. Collective.

        `stop`: this rank asks to stop. `failed`: it could not compute its part and adds nothing.
        """
        address = self._state.arena.address("gradient")
        if failed:
            self._buffer[:] = 0
            self.tally[slot.FAILED] = 1
        else:
            self._state.ledger.download(address, self._buffer)
        self.tally[slot.STOP] = stop
        started = perf_counter()
        self._world.all_reduce(self._buffer)
        self.seconds += perf_counter() - started
        self._state.ledger.upload(address, self._buffer)
