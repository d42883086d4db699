"""The sweep over layers: networks of narrow layers whose weight gradients do not fit one block's registers. Pure.

A block keeps its rows in shared memory for the whole step and takes them through one layer after the other; see
kernels/sweep.cu. The constants that kernels/sweep_layers.cuh computes again are checked there when it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_narrow import BLOCK_BYTES, CHUNK, MAX_WIDTH
from distmlp.engine.plan_task import Buffer, Device, Task, aligned

GROUPS = 4  # warpgroups of a block
TILE_ROWS = 64
COLUMN_BYTES = TILE_ROWS * 16  # eight columns of a tile
STAGES = 3  # tiles of inputs on their way to the weight gradients
MAX_TILES = 8
MIN_TILES = 2  # of 64 rows a block, below which the general kernel is as fast
STATIC_BYTES = 960  # shared memory that the kernel declares itself, at most


@dataclass(frozen=True)
class SweepPlan:
    """Launch shape of the sweep."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    blocks: int
    tiles: int  # of 64 rows that a block holds
    shared_bytes: int
    direct: bool  # sums and update without the flat gradient

    name, path, source, entry = "sweep", "narrow", "sweep.cu", "sweep_steps"
    pays = True  # where it fits: see MIN_TILES
    threads = 128 * GROUPS
    cluster = 1
    batch_rows = 0

    @property
    def chunks(self) -> int:
        """Pieces of the parameters, padding included, that blocks add up and update: weights, then biases."""
        pieces = sum(4 * -(-_padded(o) // TILE_ROWS) * _columns(i) for i, o in pairwise(self.widths))
        return pieces + -(-sum(map(_padded, self.widths[1:])) // CHUNK)

    def buffers(self) -> tuple[Buffer, ...]:
        kept = 2 * (len(self.widths) - 1) * self.tiles * _columns(max(self.widths)) * COLUMN_BYTES
        return (
            Buffer("sweep_partials", 2 * self.blocks * (self.chunks * CHUNK * 4 + 16), zeroed=True),
            Buffer("sweep_image", _weight_bytes(self.widths) + _bias_bytes(self.widths), zeroed=True),
            Buffer("sweep_kept", self.blocks * kept),
        )

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/narrow_shape.cuh and kernels/sweep_layers.cuh."""
        items = [(layer, b) for layer, o in enumerate(self.widths[1:]) for b in range(-(-_padded(o) // TILE_ROWS))]
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "NARROW_CHAINS": "1",
            "NARROW_GROUPS": str(GROUPS),
            "NARROW_SUMS": "1",
            "NARROW_ITEMS": ",".join(f"{{{layer},{b},1,0,0}}" for layer, b in items),
            "NARROW_SHARED_BYTES": str(self.shared_bytes),
            "NARROW_DIRECT": str(int(self.direct)),
            "SWEEP_TILES": str(self.tiles),
        }


def plan_sweep(task: Task, device: Device) -> SweepPlan | None:
    """The launch for `task`, or None where the network or the batch does not fit or the GPU is no Hopper."""
    widths, multiprocessors = task.network.widths, device.multiprocessors
    tiles_in_all = -(-max(1, task.rows) // TILE_ROWS)
    tiles = -(-tiles_in_all // multiprocessors)
    if task.precision != "bf16" or device.capability != 90 or max(widths) > MAX_WIDTH:
        return None
    if not MIN_TILES <= tiles <= MAX_TILES:
        return None
    shared = _shared_bytes(widths, tiles)
    if shared > device.shared_bytes - STATIC_BYTES:
        return None
    return SweepPlan(widths, task.network.activations, multiprocessors, tiles, shared, task.updates_directly)


def _padded(width: int) -> int:
    return aligned(width, 16)


def _columns(width: int) -> int:
    return _padded(width) // 8


def _weight_bytes(widths: tuple[int, ...]) -> int:
    return sum(_columns(i) * _columns(o) * BLOCK_BYTES for i, o in pairwise(widths))


def _bias_bytes(widths: tuple[int, ...]) -> int:
    return sum(4 * _padded(o) for o in widths[1:])


def _shared_bytes(widths: tuple[int, ...], tiles: int) -> int:
    slot = _columns(max(widths)) * COLUMN_BYTES
    weights = max(_columns(i) * _columns(o) * BLOCK_BYTES for i, o in pairwise(widths))
    exchange = 4 * GROUPS * (CHUNK + 4 + _padded(widths[-1])) * 4 + 64
    at = tiles * slot + weights + max(STAGES * (slot + COLUMN_BYTES), weights, exchange)
    return at + _bias_bytes(widths) + 3 * (_padded(widths[0]) + _padded(widths[-1])) * 4
