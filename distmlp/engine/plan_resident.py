"""The resident kernel: which networks keep their state in the shared memory of all multiprocessors together, and who
computes and owns what there. Pure.

Rows of a batch are dealt out to groups of 16 or 32, the columns of every hidden layer to the blocks of a group, the
weights of every layer in patches to all blocks. The sums here are computed again in kernels/resident_shape.cuh and
compared when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_task import Buffer, Device, Task, raw_code

WARPS = 8
MAX_ROWS = 128
MAX_OUTPUTS = 16
MAX_OPERANDS = {2: 160, 4: 192}  # registers of a thread for both operands of a product, by the bytes of an element
SUMS_BYTES = 512  # 16 x 8 float32
STATE_BYTES = 1024  # 16 x 16 float32
STATIC_BYTES = 1024  # that the kernel declares itself
RING = 3
SLOTS = 8  # parts of what other ranks send
MAX_ALL_TILES = 16  # of 16 rows, in the batches of all ranks together


@dataclass(frozen=True)
class Sharing:
    """Who computes what."""

    groups: int  # of rows
    group_tiles: int  # of 16 rows in a group
    column_blocks: int  # of 16 columns of every hidden layer that a block computes for its group
    blocks: int  # of the grid that compute

    @property
    def tiles(self) -> int:
        return self.groups * self.group_tiles


@dataclass(frozen=True)
class ResidentPlan:
    """Launch shape of the resident kernel."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    sharing: Sharing
    patches: tuple[tuple[int, int], ...]  # of a layer's weights: blocks of 16 inputs, of 16 outputs
    raw_type: str
    mean: bool  # the average of the parameters is kept
    blocks: int
    shared_bytes: int
    exchange_bytes: int
    ranks: int

    name, path, source, entry = "resident", "wide", "resident.cu", "resident_steps"
    cluster = 1
    batch_rows = 0
    pays = True  # wherever it fits
    threads = 32 * WARPS

    @property
    def peers_only(self) -> bool:
        """Ranks can only be joined inside the kernel, see kernels/resident_ranks.cuh."""
        return self.ranks > 1

    @property
    def sent_bytes(self) -> int:
        """To each other rank in a step: activations, errors and their sums by 16 rows, doubts of blocks."""
        depths = [_depth(width) for width in self.widths]
        return self.sharing.tiles * (_tile_bytes(2) * (sum(depths[:-1]) + sum(depths[1:])) + 64 * sum(depths[1:])) + (
            8 * ((self.blocks + 3) // 2 * 2)
        )

    @property
    def peer_words(self) -> int:
        """Floats of one of the two inboxes."""
        return SLOTS // 2 * self.sent_bytes // 4

    def peer_macros(self) -> dict[str, str] | None:
        """For a kernel that sums with the ranks of its host in a way of its own; None where there are none."""
        if self.ranks == 1:
            return None
        return {"RESIDENT_RANKS": str(self.ranks), "RESIDENT_SENT_BYTES": str(self.sent_bytes)}

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/resident_shape.cuh."""
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "RAW_TYPE": raw_code(self.raw_type),
            "RESIDENT_BLOCKS": str(self.blocks),
            "RESIDENT_WARPS": str(WARPS),
            "RESIDENT_GROUPS": str(self.sharing.groups),
            "RESIDENT_GROUP_TILES": str(self.sharing.group_tiles),
            "RESIDENT_COLUMN_BLOCKS": str(self.sharing.column_blocks),
            "RESIDENT_PATCH_IN": ",".join(str(size) for size, _ in self.patches),
            "RESIDENT_PATCH_OUT": ",".join(str(size) for _, size in self.patches),
            "RESIDENT_MEAN": str(int(self.mean)),
            "RESIDENT_SHARED_BYTES": str(self.shared_bytes),
            "RESIDENT_EXCHANGE_BYTES": str(self.exchange_bytes),
        }

    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("resident_exchange", self.exchange_bytes, zeroed=True),)


def plan_resident(task: Task, device: Device) -> ResidentPlan | None:
    """The launch for `task`, or None where the network does not fit or the update needs more than its own gradient."""
    widths, rows = task.network.widths, max(1, task.rows)
    element = 2 if task.precision == "bf16" else 4
    if (
        not device.has_tensor_cores
        or (element > 2 and task.ranks > 1)  # they exchange bfloat16
        or task.needs_norm
        or rows > MAX_ROWS
        or widths[-1] > MAX_OUTPUTS
        or len(widths) < 3
    ):
        return None
    sharing = share_out(widths, rows, device.multiprocessors, element)
    if sharing is None:
        return None
    patches = tuple(choose_patch(_depth(i), _depth(o), device.multiprocessors) for i, o in pairwise(widths))
    needed = [-(-_depth(i) // p) * -(-_depth(o) // q) for (i, o), (p, q) in zip(pairwise(widths), patches, strict=True)]
    blocks = max(sharing.blocks, *needed)
    shared = _shared_bytes(widths, sharing, patches, 1 + len(task.slots) + task.ema, task.ranks, element)
    if (
        (task.ranks > 1 and sharing.tiles * task.ranks > MAX_ALL_TILES)
        or shared + STATIC_BYTES > device.shared_bytes
        or _depth(widths[0]) * sharing.tiles > blocks * WARPS  # a warp takes one tile of the next batch
    ):
        return None
    return ResidentPlan(
        widths, task.network.activations, sharing, patches, task.raw_type, task.ema, blocks, shared,
        _exchange_bytes(widths, sharing, element), task.ranks,
    )  # fmt: skip


def share_out(widths: Sequence[int], rows: int, multiprocessors: int, element: int = 2) -> Sharing | None:
    """The sharing with the fewest bytes on the way of a step: activations of a group, first weights of a block."""
    tiles, widest = -(-rows // 16), _depth(max(widths[1:-1]))
    longest = -(-max(map(_depth, widths[:-1])) // WARPS)
    best: tuple[int, Sharing] | None = None
    for group_tiles in (1, 2):
        for column_blocks in (1, 2, 4):
            groups = -(-tiles // group_tiles)
            blocks = groups * -(-widest // column_blocks)
            registers = 2 * element * longest * (group_tiles + column_blocks) + 8 * group_tiles * column_blocks
            biases = 16 * column_blocks * (len(widths) - 2) + widths[-1]
            if blocks > multiprocessors or registers > MAX_OPERANDS[element] or biases > 32 * WARPS:
                continue
            cost = group_tiles * sum(map(_depth, widths[1:-1])) + column_blocks * _depth(widths[0])
            if best is None or cost < best[0]:
                best = cost, Sharing(groups, group_tiles, column_blocks, blocks)
    return best[1] if best else None


def choose_patch(inputs: int, outputs: int, blocks: int) -> tuple[int, int]:
    """Size of the patches of a matrix of blocks of 16 so that no more than `blocks` cover it: with the fewest turns of
    a warp, then the least to read (what is waited for counts twice), then the smallest."""

    def cost(patch: tuple[int, int]) -> tuple[int, int, int]:
        across = WARPS if patch[0] > 4 else 4 if patch[0] > 2 else patch[0]
        down = WARPS // across
        return -(-patch[0] // across) * -(-patch[1] // down), patch[0] + 2 * patch[1], patch[0] * patch[1]

    sizes = [
        (i, o)
        for i in range(1, inputs + 1)
        for o in range(1, outputs + 1)
        if -(-inputs // i) * -(-outputs // o) <= blocks
    ]
    return min(sizes, key=cost)


def _depth(width: int) -> int:
    return -(-width // 16)


def _tile_bytes(element: int) -> int:
    return 16 * 16 * element


def _shared_bytes(
    widths: Sequence[int],
    sharing: Sharing,
    patches: Sequence[tuple[int, int]],
    states: int,
    ranks: int,
    element: int,
) -> int:
    hidden, outputs = len(widths) - 2, widths[-1]
    output_tiles, group_rows = -(-outputs // 8), 16 * sharing.group_tiles
    staged = [out * sharing.tiles * ranks * _tile_bytes(element) for _, out in patches]
    own = sharing.group_tiles * 2 * sharing.column_blocks
    shares = WARPS * max(own, sharing.group_tiles * output_tiles) * SUMS_BYTES
    first = min(hidden, 2)
    at = sum(i * o for i, o in patches) * states * STATE_BYTES + max(shares, sum(staged[:first]), sum(staged[first:]))
    at += (hidden - 1) * own * SUMS_BYTES
    at += group_rows * (8 * output_tiles + 2 + outputs + 1) * 4 + 16 * sharing.tiles * 4
    return at + states * (hidden * 16 * sharing.column_blocks + outputs) * 4


def _exchange_bytes(widths: Sequence[int], sharing: Sharing, element: int) -> int:
    hidden = len(widths) - 2
    matrix = [_depth(width) * sharing.tiles * _tile_bytes(element) for width in widths]
    weight = [_depth(i) * _depth(o) * _tile_bytes(element) for i, o in pairwise(widths)]
    at = RING * (sum(matrix[:-1]) + matrix[hidden] + sum(matrix[2:hidden]))  # activations, slopes, errors
    at += RING * matrix[0] + 2 * sum(matrix[1:-1]) + 2 * sum(matrix[1:])  # for gradients of weights
    at += 2 * sharing.tiles * 16 * sum(_depth(width) for width in widths[1:]) * 4  # sums of errors
    return at + weight[0] + sum(weight) + 2 * 8 * sharing.groups * WARPS + 4 * 128 + 16
