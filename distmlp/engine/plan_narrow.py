"""The narrow regime: whether a network fits one, and how its work is shared inside a block. Pure.

A block keeps all weights, and activations and errors of a tile of rows, in shared memory, and the weight gradients of
all its tiles in registers. The constants that kernels/narrow_shape.cuh computes again are checked there when it is
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distmlp.engine.plan_task import Buffer, Device, Task
from distmlp.engine.tally import TALLY

MAX_WIDTH = 128
BLOCK_BYTES = 128  # 8 x 8 bfloat16
CHUNK = 128  # parameters that a block updates at a time
GROUP_THREADS = 128
IMAGES = 3  # copies of the weights on their way to all blocks

# Registers a thread may spend on weight gradients, by the widest layer: what is left beside a layer's sums and
# operands before the compiler spills (256 threads of 255 registers; measured with ptxas for sm_80 and sm_90a).
_SUM_LIMITS = ((64, 112), (96, 88), (128, 88))


@dataclass(frozen=True)
class Item:
    """64 rows of one layer's weight gradient, summed by one warpgroup in its registers from `offset` on."""

    layer: int
    block: int
    out_major: bool  # rows are outputs and a column of ones gives the bias gradient; else rows are inputs
    group: int
    offset: int
    floats: int  # a thread

    @property
    def columns(self) -> int:
        """Blocks of eight columns that are weights."""
        return self.floats // 4 - self.out_major


@dataclass(frozen=True)
class NarrowPlan:
    """Launch shape of the narrow kernel."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    chains: int  # warpgroups that take rows through the network
    groups: int  # warpgroups of a block
    blocks: int
    items: tuple[Item, ...]
    shared_bytes: int
    image_bytes: int  # of all copies
    direct: bool  # sums, update and publication without the flat gradient
    joined: bool  # so also with ranks that sum inside the kernel

    name, path, source, entry = "narrow", "narrow", "narrow.cu", "narrow_steps"
    cluster, pays = 1, True
    batch_rows = 0

    def buffers(self) -> tuple[Buffer, ...]:
        return (
            Buffer("narrow_partials", self.partial_bytes, zeroed=True),
            Buffer("narrow_image", self.image_bytes, zeroed=True),
        )

    @property
    def threads(self) -> int:
        return self.groups * GROUP_THREADS

    @property
    def peer_words(self) -> int:
        """Floats that a rank sends each other one in a step: parameters in the order of their chunks, tallies."""
        return self.chunks * CHUNK + self.blocks * TALLY

    def peer_macros(self) -> dict[str, str] | None:
        """For a kernel that sums with the ranks of its host in a way of its own; None where it has none."""
        return {**self.macros(), "NARROW_DIRECT": "1", "NARROW_PEERS": "1"} if self.joined else None

    @property
    def tile_rows(self) -> int:
        return 64 * self.chains

    @property
    def sums(self) -> int:
        """Floats a thread keeps for weight gradients."""
        return max(item.offset + item.floats for item in self.items)

    @property
    def chunks(self) -> int:
        """Pieces of the parameters, padding included, that blocks add up and update: weights, then biases."""
        biases = sum(padded(width) for width in self.widths[1:])
        return 4 * sum(item.columns for item in self.items) + -(-biases // CHUNK)

    @property
    def partial_bytes(self) -> int:
        """Of the two buffers of partial sums and the tallies behind them."""
        return 2 * self.blocks * (self.chunks * CHUNK * 4 + 16)

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/narrow_shape.cuh."""
        items = ",".join(f"{{{i.layer},{i.block},{int(i.out_major)},{i.group},{i.offset}}}" for i in self.items)
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "NARROW_CHAINS": str(self.chains),
            "NARROW_GROUPS": str(self.groups),
            "NARROW_SUMS": str(self.sums),
            "NARROW_ITEMS": items,
            "NARROW_SHARED_BYTES": str(self.shared_bytes),
            "NARROW_DIRECT": str(int(self.direct)),
            **update_macros(self.direct, self.widths),
        }


def update_macros(direct: bool, widths: tuple[int, ...]) -> dict[str, str]:
    """LAMB keeps two numbers a layer in shared memory: for these layers, not for all that there might be."""
    return {} if direct else {"MAX_UPDATE_LAYERS": str(len(widths) - 1)}


def static_bytes(task: Task) -> int:
    """Of shared memory that the kernel declares itself, at most."""
    return 128 if task.updates_directly else max(512, 384 + 16 * (len(task.network.widths) - 1))


def plan_narrow(task: Task, device: Device) -> NarrowPlan | None:
    """The launch for `task`, or None where the network does not fit or the products are not bfloat16."""
    widths, activations = task.network.widths, task.network.activations
    rows, multiprocessors = max(1, task.rows), device.multiprocessors
    if task.precision != "bf16" or not device.has_tensor_cores or max(widths) > MAX_WIDTH:
        return None
    for chains in (2, 1) if rows > 64 * multiprocessors else (1, 2):  # a small batch spreads over more blocks
        shared = _shared_bytes(widths, chains, groups=2)
        items = share_items(widths, 2, range(len(widths) - 1))
        load = max(item.offset + item.floats for item in items)
        if shared <= device.shared_bytes - static_bytes(task) and load <= sums_limit(widths):
            tiles = -(-rows // (64 * chains))
            turns = -(-tiles // multiprocessors)
            plan = NarrowPlan(
                widths, activations, chains, 2, 0, items, shared, IMAGES * image_bytes(widths), task.updates_directly,
                task.ranks > 1 and not task.needs_norm,
            )  # fmt: skip
            return replace(plan, blocks=min(multiprocessors, max(-(-tiles // turns), plan.chunks)))
    return None


def padded(width: int) -> int:
    return -(-width // 16) * 16


def columns(width: int) -> int:
    return padded(width) // 8


def out_major(widths: Sequence[int], layer: int) -> bool:
    """A few outputs are cheaper as columns; only the last layer's bias can then be summed elsewhere."""
    return not (layer == len(widths) - 2 and padded(widths[-1]) <= 32)


def sums_limit(widths: Sequence[int]) -> int:
    """Floats that a thread may keep for weight gradients."""
    return next(limit for width, limit in _SUM_LIMITS if padded(max(widths)) <= width)


def share_items(widths: Sequence[int], groups: int, layers: Sequence[int]) -> tuple[Item, ...]:
    """Gradients of `layers` over warpgroups, the largest first to whoever has least."""
    parts = []
    for layer in layers:
        fan_in, fan_out = widths[layer : layer + 2]
        by_output = out_major(widths, layer)
        rows, floats = (fan_out, 4 * (columns(fan_in) + 1)) if by_output else (fan_in, 4 * columns(fan_out))
        parts += [(floats, layer, block, by_output) for block in range(-(-padded(rows) // 64))]
    load, items = [0] * groups, []
    for floats, layer, block, by_output in sorted(parts, key=lambda part: -part[0]):
        group = load.index(min(load))
        items.append(Item(layer, block, by_output, group, load[group], floats))
        load[group] += floats
    return tuple(items)


def image_bytes(widths: Sequence[int]) -> int:
    pairs = list(pairwise(widths))
    return sum(columns(i) * columns(o) * BLOCK_BYTES for i, o in pairs) + sum(4 * padded(o) for _, o in pairs)


def _shared_bytes(widths: Sequence[int], chains: int, groups: int) -> int:
    row_blocks, layers = 8 * chains, len(widths) - 1
    at = -(-image_bytes(widths) // 128) * 128
    at += sum(row_blocks * (columns(widths[i]) + out_major(widths, i)) * BLOCK_BYTES for i in range(layers))
    at += sum(row_blocks * columns(w) * BLOCK_BYTES for w in widths[1:])
    at += 8 * BLOCK_BYTES
    at += 4 * groups * (128 + 4 + padded(widths[-1])) * 4 + 64
    return at + 3 * (padded(widths[0]) + padded(widths[-1])) * 4
