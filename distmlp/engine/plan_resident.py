"""The resident kernel: which networks keep their state in the shared memory of all multiprocessors together. Pure.

Block b owns outputs 8 b to 8 b + 7 of every hidden layer: their weights, optimizer slots and average. The sums here are
computed again in kernels/resident_shape.cuh and compared when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_task import Buffer, Device, Task

WARPS = 8
MAX_ROWS = 128
MAX_OUTPUTS = 16
TILE_BYTES = 512  # 16 x 16 bfloat16, or 32 lanes of four floats
STATIC_BYTES = 1024  # that the kernel declares itself


@dataclass(frozen=True)
class ResidentPlan:
    """Launch shape of the resident kernel."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    tiles: int  # of 16 rows
    raw_type: str
    mean: bool  # the average of the parameters is kept
    blocks: int
    shared_bytes: int
    exchange_bytes: int

    name, path, source, entry = "resident", "wide", "resident.cu", "resident_steps"
    cluster = 1
    batch_rows = 0
    pays = True  # wherever it fits
    threads = 32 * WARPS

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/resident_shape.cuh."""
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "RAW_TYPE": f"RAW_{self.raw_type[0].upper()}{8 * int(self.raw_type[1:])}",
            "RESIDENT_TILES": str(self.tiles),
            "RESIDENT_WARPS": str(WARPS),
            "RESIDENT_MEAN": str(int(self.mean)),
            "RESIDENT_SHARED_BYTES": str(self.shared_bytes),
            "RESIDENT_EXCHANGE_BYTES": str(self.exchange_bytes),
        }

    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("resident_exchange", self.exchange_bytes, zeroed=True),)


def plan_resident(task: Task, device: Device) -> ResidentPlan | None:
    """The launch for `task`, or None where the network does not fit or the update needs more than its own gradient."""
    widths, rows = task.network.widths, max(1, task.rows)
    tiles = row_tiles(rows)
    blocks = -(-max(widths[1:-1], default=0) // 8)
    if (
        task.precision != "bf16"
        or not device.has_tensor_cores
        or not task.updates_directly
        or rows > MAX_ROWS
        or widths[-1] > MAX_OUTPUTS
        or not 1 <= blocks <= device.multiprocessors
        or _depth(widths[0]) * tiles > blocks * WARPS  # a warp takes one tile of the next batch
    ):
        return None
    shared = _shared_bytes(widths, tiles, 1 + len(task.slots) + task.ema)
    if shared + STATIC_BYTES > device.shared_bytes:
        return None
    return ResidentPlan(
        widths, task.network.activations, tiles, task.raw_type, task.ema, blocks, shared,
        _exchange_bytes(widths, tiles),
    )  # fmt: skip


def row_tiles(rows: int) -> int:
    """Tiles of 16 rows: one, or an even number."""
    return 1 if rows <= 16 else 2 * -(-rows // 32)


def _depth(width: int) -> int:
    return -(-width // 16)


def _output_tiles(outputs: int) -> int:
    return -(-outputs // 8)


def _shared_bytes(widths: Sequence[int], tiles: int, states: int) -> int:
    hidden, outputs, rows = len(widths) - 2, widths[-1], 16 * tiles
    at = sum(_depth(width) for width in widths[:hidden]) * states * TILE_BYTES
    at += WARPS * tiles * _output_tiles(outputs) * TILE_BYTES  # shares of sums
    at += hidden * tiles * (256 + TILE_BYTES + 32)  # errors, slopes, column sums
    at += rows * (8 + 8 * _output_tiles(outputs) + 2 + outputs + 2) * 4
    return at + states * (8 * outputs + 8 * hidden + outputs) * 4


def _exchange_bytes(widths: Sequence[int], tiles: int) -> int:
    hidden = len(widths) - 2
    matrices = [_depth(width) * tiles * TILE_BYTES for width in widths[:-1]]
    at = 6 * matrices[0] + 4 * sum(matrices[1:])  # batches and activations
    at += 2 * matrices[-1] + sum(matrices[1:])  # slopes, errors
    at += sum(2 * 4 * _depth(i) * _depth(o) * 128 for i, o in pairwise(widths[1 : hidden + 1]))  # backward weights
    return at + 2 * _depth(widths[hidden]) * _output_tiles(widths[-1]) * 256 + 32
