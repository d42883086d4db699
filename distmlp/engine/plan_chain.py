"""The chain: networks of middle width whose blocks take a few rows each through all layers. Pure.

See kernels/chain.cu. The constants that kernels/chain_shape.cuh computes again are checked there when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_task import Buffer, Device, Task, raw_code
from distmlp.engine.tally import TALLY

PANEL = 64  # columns
PIECE_BYTES = PANEL * 128
GROUPS = 4  # warpgroups that multiply
WARPS = 4 * GROUPS + 4
STAGE_BYTES = GROUPS * PIECE_BYTES
MIN_STAGES, MAX_STAGES = 3, 6
STATIC_BYTES = 1024  # that the kernel declares itself; LAMB's needs as much again
PART_BYTES = 56  # of the table of layers
MIN_WIDTH, MAX_WIDTH = 129, 1024  # of the widest layer
MIN_ROWS = 1000
MAX_SOFTMAX = PANEL * GROUPS


@dataclass(frozen=True)
class ChainPlan:
    """Launch shape of the chain kernel."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    blocks: int
    rows: int  # of a block
    depth: int  # steps of 64 rows of a batch
    stages: int
    splits: int  # of the batch, for the weight gradients
    shared_bytes: int
    raw_type: str
    mean: bool  # the average of the parameters is kept
    keeps_pairs: bool  # what slopes are told from takes 16 bits an output, not one
    ranks: int

    name, path, source, entry = "chain", "wide", "chain.cu", "chain_steps"
    threads = 32 * WARPS
    cluster = 2  # blocks that share the weights they read
    batch_rows = 0

    @property
    def pays(self) -> bool:
        """Whether it was seen to be faster than the general kernel with networks and batches like these."""
        return self.rows > 16 and max(self.widths) <= 256

    @property
    def tiles(self) -> int:
        return _tiles(self.widths)

    def buffers(self) -> tuple[Buffer, ...]:
        panels = [_panels(width) for width in self.widths]
        pieces = sum((i * o) + self.depth * (i + o) for i, o in pairwise(panels)) + self.depth * panels[0]
        layers = len(self.widths) - 1
        words = self.rows // 4 if self.keeps_pairs else 1
        quarters = self.tiles * 2 * GROUPS
        return (
            Buffer("chain_pieces", pieces * PIECE_BYTES, zeroed=True),
            Buffer("chain_kept", self.blocks * layers * -(-max(panels) // GROUPS) * words * 512 * GROUPS),
            Buffer("chain_column_sums", sum(panels[1:]) * PANEL * self.blocks * 4),
            Buffer("chain_records", self.blocks * 16),
            Buffer("chain_partials", quarters * self.splits * 1024 * 16),
            Buffer("chain_arrivals", (quarters + layers * (self.splits + 1) + 2) * 4),
        )

    @property
    def peer_words(self) -> int:
        """Floats that a rank sends each other one in a step: see kernels/chain_ranks.cuh."""
        biases = sum(map(_panels, self.widths[1:])) * PANEL
        return self.tiles * 2 * GROUPS * PANEL * PANEL + biases + self.blocks * TALLY

    def peer_macros(self) -> dict[str, str] | None:
        """For a kernel that sums with the ranks of its host in a way of its own; None where there are none."""
        return {"CHAIN_PEERS": "1", "CHAIN_BLOCKS": str(self.blocks)} if self.ranks > 1 else None

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/chain_shape.cuh."""
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "RAW_TYPE": raw_code(self.raw_type),
            "CHAIN_ROWS": str(self.rows),
            "CHAIN_STAGES": str(self.stages),
            "CHAIN_TILES": str(self.tiles),
            "CHAIN_SPLITS": str(self.splits),
            "CHAIN_DEPTH": str(self.depth),
            "CHAIN_MEAN": str(int(self.mean)),
            "CHAIN_SHARED_BYTES": str(self.shared_bytes),
        }


def plan_chain(task: Task, device: Device) -> ChainPlan | None:
    """The launch for `task`, or None where the network or the batch does not fit or the GPU is no Hopper."""
    widths, rows = task.network.widths, max(1, task.rows)
    blocks = device.multiprocessors // 2 * 2
    each = rows_of_block(rows, blocks)
    if (
        task.precision != "bf16"
        or device.capability != 90
        or rows < MIN_ROWS
        or each is None
        or not MIN_WIDTH <= max(widths) <= MAX_WIDTH
        or (task.loss == "softmax_cross_entropy" and widths[-1] > MAX_SOFTMAX)
    ):
        return None
    room = device.shared_bytes - STATIC_BYTES * (1 + task.needs_norm)
    stages = next(
        (n for n in range(MAX_STAGES, MIN_STAGES - 1, -1) if _shared_bytes(widths, each, n) <= room), None
    )  # fmt: skip
    if stages is None:
        return None
    depth = -(-rows // PANEL)
    depth += depth % 2 if each == PANEL else 0
    splits = max(1, min(blocks // 2 // _tiles(widths), -(-rows // PANEL)))
    hidden = set(task.network.activations[:-1])
    return ChainPlan(
        widths, task.network.activations, blocks, each, depth, stages, splits, _shared_bytes(widths, each, stages),
        task.raw_type, task.ema, len(hidden) != 1 or not hidden <= {"relu", "leaky_relu"},
        task.ranks,
    )  # fmt: skip


def rows_of_block(rows: int, blocks: int) -> int | None:
    """The fewest rows a block with which `blocks` take the batch."""
    return next((each for each in (16, 32, 64) if -(-rows // PANEL) * (PANEL // each) <= blocks), None)


def _panels(width: int) -> int:
    return -(-width // PANEL)


def _tiles(widths: Sequence[int]) -> int:
    """Gradient tiles of four by two panels, or the other way round."""
    panels = [_panels(width) for width in widths]
    return sum(min(-(-i // 4) * -(-o // 2), -(-i // 2) * -(-o // 4)) for i, o in pairwise(panels))


def _shared_bytes(widths: Sequence[int], rows: int, stages: int) -> int:
    buffers = 2 * max(map(_panels, widths)) * rows * 128
    return stages * (STAGE_BYTES + 16) + 16 + buffers + 2 * rows * 12 + WARPS * 16 + (len(widths) - 1) * PART_BYTES
