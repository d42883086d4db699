"""Strips of rows: narrow networks in TF32 and float32. Pure.

A block keeps rows in shared memory, as many at a time as fit beside the weights of a layer, and takes them through the
whole network; see kernels/strips.cu. The constants that kernels/strips_shape.cuh computes again are checked there when
it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_narrow import CHUNK, MAX_WIDTH, static_bytes, update_macros
from distmlp.engine.plan_task import Buffer, Device, Task, aligned, raw_code

WARPS = 16  # of a block
KEEPING_ROWS = 128  # of it, at most, where activations stay in shared memory
SCRATCH_BYTES = 9216, 32768  # there, at least and at most
MAX_LAYERS = 12  # every layer has code of its own
MAX_ROWS = 512  # of a strip
MAX_STAGES = 6
STATIC_BYTES = 1024  # shared memory that the kernel declares itself beside what updates need
_KEEPS_SLOPE = {"gelu", "silu", "sine", "relu", "leaky_relu"}  # or the sign that tells it, see strips_layers.cuh


@dataclass(frozen=True)
class StripsPlan:
    """Launch shape of the strips kernel."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    blocks: int
    rows: int  # of a strip
    stage_rows: int
    stages: int
    weight_copies: int  # layers whose weights are in shared memory at a time
    shared_bytes: int
    scratch_bytes: int  # in the place of stages, where activations stay in shared memory
    warps: int
    raw_type: str
    direct: bool  # sums and update without the flat gradient

    name, path, source, entry = "strips", "narrow", "strips.cu", "strips_steps"
    cluster, pays = 1, True
    batch_rows = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def keeps(self) -> bool:
        """Activations stay in shared memory until they are met again."""
        return self.scratch_bytes > 0

    @property
    def tiles(self) -> int:
        """Of 16 rows that a warp takes through a layer at a time: two where all warps have them."""
        return 2 if self.rows * self._most_across >= 32 * self.warps else 1

    @property
    def across(self) -> int:
        """Warps that take the same rows through a layer, each 64 columns at most or, to have work for all, 32."""
        if self.tiles == 2:
            return self._most_across
        return min(_padded(max(self.widths)) // 32, 1 << max(0, (16 * self.warps // self.rows).bit_length() - 1))

    @property
    def _most_across(self) -> int:
        return 1 if _padded(max(self.widths)) <= 64 else 2

    @property
    def kept_copies(self) -> int:
        """Inputs of layers, and slopes."""
        return 2 if _KEEPS_SLOPE & set(self.activations[:-1]) else 1

    def buffers(self) -> tuple[Buffer, ...]:
        floats = _weight_floats(self.widths) + _bias_floats(self.widths)
        kept = self.rows * sum(_padded(width) for width in self.widths[:-1]) * self.kept_copies
        return (
            Buffer("strips_partials", self.blocks * (aligned(floats, CHUNK) * 4 + 16), zeroed=True),
            Buffer("strips_image", floats * 4, zeroed=True),
            Buffer("strips_kept", self.blocks * kept * 4),
        )

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/strips_shape.cuh."""
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "RAW_TYPE": raw_code(self.raw_type),
            "STRIP_WARPS": str(self.warps),
            "STRIP_TILES": str(self.tiles),
            "STRIP_BLOCKS": str(self.blocks),
            "STRIP_ROWS": str(self.rows),
            "STAGE_ROWS": str(self.stage_rows),
            "STRIP_STAGES": str(self.stages),
            "STRIP_KEEPS": str(int(self.keeps)),
            "STRIP_SCRATCH": str(self.scratch_bytes),
            "STRIP_ACROSS": str(self.across),
            "WEIGHT_COPIES": str(self.weight_copies),
            "KEPT_COPIES": str(self.kept_copies),
            "STRIP_SHARED_BYTES": str(self.shared_bytes),
            "STRIP_DIRECT": str(int(self.direct)),
            **update_macros(self.direct, self.widths),
        }


def plan_strips(task: Task, device: Device) -> StripsPlan | None:
    """The launch for `task`, or None where the network does not fit or the products are bfloat16."""
    widths, multiprocessors = task.network.widths, device.multiprocessors
    if task.precision == "bf16" or not device.has_tensor_cores or max(widths) > MAX_WIDTH:
        return None
    if len(widths) - 1 > MAX_LAYERS or task.ranks > 1:  # several ranks: never run
        return None
    if task.raw_type == "f2":  # its rows do not compile with half-precision inputs
        return None
    room = device.shared_bytes - STATIC_BYTES - static_bytes(task)
    tiles = -(-max(1, task.rows) // 16)
    if kept := _keeping(widths, 16 * -(-tiles // multiprocessors), room):
        rows, stage_rows, copies, scratch, shared = kept
        return StripsPlan(
            widths, task.network.activations, multiprocessors, rows, stage_rows, 0, copies, shared, scratch,
            8 if max(widths) <= 64 else WARPS, task.raw_type, task.updates_directly,
        )  # fmt: skip
    for strips in range(1, tiles + 1):
        rows = _strip_rows(-(-tiles // (multiprocessors * strips)) * 16)
        if rows > MAX_ROWS:
            continue
        for copies, stage_rows, stages in _arrangements(widths, rows):
            shared = _shared_bytes(widths, rows, copies, stage_rows, stages)
            if shared <= room:
                return StripsPlan(
                    widths, task.network.activations, multiprocessors, rows, stage_rows, stages, copies, shared,
                    0, WARPS, task.raw_type, task.updates_directly,
                )  # fmt: skip
        if rows == 16:
            return None
    return None


def _keeping(widths: Sequence[int], rows: int, room: int) -> tuple[int, int, int, int, int] | None:
    """Rows and those of a stage, weight copies, scratch memory and all of it, where activations fit.

    Only of all `rows` of a block: with several strips, sums of gradients that go out and in again cost more.
    """
    if rows > KEEPING_ROWS:
        return None
    stage_rows = 32 if rows % 32 == 0 else 16
    layers = len(widths) - 1
    for copies in (layers, min(2, layers)):
        used = 4 * (rows * sum(_padded(width) + 4 for width in widths) + _floats_of_weights(widths, copies)) + 8 * rows
        scratch = min(SCRATCH_BYTES[1], (room - used) // 128 * 128)
        if scratch >= SCRATCH_BYTES[0]:
            return rows, stage_rows, copies, scratch, used + scratch
    return None


def _floats_of_weights(widths: Sequence[int], copies: int) -> int:
    """In shared memory, with all biases."""
    largest = max(_padded(i) * _padded(o) for i, o in pairwise(widths))
    return (_weight_floats(widths) if copies >= len(widths) - 1 else copies * largest) + _bias_floats(widths)


def _strip_rows(rows: int) -> int:
    """Whole pieces of a warp and whole stages."""
    return aligned(rows, 32) if rows > 128 else rows


def _arrangements(widths: Sequence[int], rows: int) -> Iterator[tuple[int, int, int]]:
    """Weight copies, rows of a stage and stages, the best first."""
    layers = len(widths) - 1
    two = min(2, layers)
    best = (layers, 32, 4), (two, 32, 3), (layers, 16, 4), (two, 16, 4), (1, 32, 3), (1, 16, 3)
    for copies, stage_rows, least in best:
        if rows % stage_rows == 0:
            yield from ((copies, stage_rows, stages) for stages in range(MAX_STAGES, least - 1, -1))


def _padded(width: int) -> int:
    return aligned(width, 32)


def _row_floats(widths: Sequence[int]) -> int:
    return _padded(max(widths)) + 4


def _weight_floats(widths: Sequence[int]) -> int:
    return sum(_padded(i) * _padded(o) for i, o in pairwise(widths))


def _bias_floats(widths: Sequence[int]) -> int:
    return sum(map(_padded, widths[1:]))


def _shared_bytes(widths: Sequence[int], rows: int, copies: int, stage_rows: int, stages: int) -> int:
    return 4 * ((rows + stages * stage_rows) * _row_floats(widths) + _floats_of_weights(widths, copies)) + 8 * rows
