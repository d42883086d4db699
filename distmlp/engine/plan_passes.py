"""Several passes over the rows: narrow networks whose weight gradients do not fit one block's registers at once. Pure.

A block has all weights in shared memory and takes its rows through the network once for each group of layers whose
gradients do fit, see kernels/passes.cu. The constants that kernels/passes_shape.cuh computes again are checked there
when it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from distmlp.engine.plan_narrow import (
    BLOCK_BYTES,
    CHUNK,
    GROUP_THREADS,
    MAX_WIDTH,
    Item,
    columns,
    image_bytes,
    out_major,
    padded,
    share_items,
    static_bytes,
    sums_limit,
    update_macros,
)
from distmlp.engine.plan_task import Buffer, Device, Task, aligned, raw_code
from distmlp.engine.tally import TALLY

GROUPS = 2  # warpgroups of a block, each with 64 rows of a tile
TILE_ROWS = 64 * GROUPS
MAX_PASSES = 4
STATIC_BYTES = 512  # of shared memory beside what is counted here
MAX_AGAIN = 0.25  # of the products of a step, computed anew
# Products a row, for each of an input's columns, up to which computing it anew takes less than leaving it in device
# memory and fetching it again.
CHEAPER = 200
_STORES_SLOPE = {"elu", "gelu", "silu", "tanh", "sigmoid", "softplus", "sine"}

Pass = tuple[int, int]  # layers [low, high)


@dataclass(frozen=True)
class PassesPlan:
    """Launch shape of the kernel that goes through the network several times."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    blocks: int
    turns: int  # tiles of a block, at most
    passes: tuple[Pass, ...]  # the upmost first
    items: tuple[Item, ...]
    shared_bytes: int
    direct: bool  # sums and update without the flat gradient
    joined: bool  # so also with ranks that sum inside the kernel
    raw_type: str

    name, path, source, entry = "passes", "narrow", "passes.cu", "passes_steps"
    threads = GROUP_THREADS * GROUPS
    cluster, pays = 1, True
    batch_rows = 0

    @property
    def sums(self) -> int:
        """Floats a thread keeps for weight gradients."""
        return max(item.offset + item.floats for item in self.items)

    @property
    def chunks(self) -> int:
        """Pieces of the parameters, padding included, that blocks add up and update: weights, then biases."""
        biases = sum(padded(width) for width in self.widths[1:])
        return 4 * sum(item.columns for item in self.items) + -(-biases // CHUNK)

    def buffers(self) -> tuple[Buffer, ...]:
        vectors = max(self._vectors(direct) for direct in {self.direct, self.direct or self.joined})
        return (
            Buffer("passes_partials", 2 * self.blocks * (self.chunks * CHUNK * 4 + 16), zeroed=True),
            Buffer("passes_image", image_bytes(self.widths), zeroed=True),
            Buffer("passes_kept", self.blocks * self.turns * vectors * self.threads * 16),
        )

    @property
    def peer_words(self) -> int:
        """As a narrow plan's."""
        return self.chunks * CHUNK + self.blocks * TALLY

    def peer_macros(self) -> dict[str, str] | None:
        """As a narrow plan's."""
        return {**self.macros(), "NARROW_DIRECT": "1", "NARROW_PEERS": "1"} if self.joined else None

    def _vectors(self, direct: bool) -> int:
        """Vectors that a thread keeps of a tile from pass to pass."""
        begins = {self._begins_with(low, direct) for low, _ in self.passes[1:]}
        inputs = sum(columns(self.widths[i]) * (1 + self._keeps_slope(i)) for i in begins)
        return (inputs + max(columns(self.widths[low]) for low, _ in self.passes[:-1])) // 2

    def _begins_with(self, low: int, direct: bool) -> int:
        """The input that a pass begins with: that of layer `low`, or the network's where that is cheaper."""
        products = sum(padded(i) * padded(o) for i, o in pairwise(self.widths[: low + 1]))
        return 0 if direct and products < CHEAPER * padded(self.widths[low]) else low

    def _keeps_slope(self, low: int) -> bool:
        return low > 0 and self.activations[low - 1] in _STORES_SLOPE

    def macros(self) -> dict[str, str]:
        """Compile-time definitions, see kernels/narrow_shape.cuh and kernels/passes_shape.cuh."""
        items = ",".join(f"{{{i.layer},{i.block},{int(i.out_major)},{i.group},{i.offset}}}" for i in self.items)
        return {
            "WIDTHS": ",".join(map(str, self.widths)),
            "ACTIVATIONS": ",".join(self.activations).upper(),
            "NARROW_CHAINS": str(GROUPS),
            "NARROW_GROUPS": str(GROUPS),
            "NARROW_SUMS": str(self.sums),
            "NARROW_ITEMS": items,
            "NARROW_PASSES": ",".join(f"{{{low},{high}}}" for low, high in self.passes),
            "NARROW_TURNS": str(self.turns),
            "NARROW_SHARED_BYTES": str(self.shared_bytes),
            "NARROW_DIRECT": str(int(self.direct)),
            "RAW_TYPE": raw_code(self.raw_type),
            **update_macros(self.direct, self.widths),
        }


def plan_passes(task: Task, device: Device) -> PassesPlan | None:
    """The launch for `task`, or None where nothing fits, too much would be computed anew, or the GPU is no Hopper."""
    widths, activations, multiprocessors = task.network.widths, task.network.activations, device.multiprocessors
    rows = max(1, task.rows)
    if task.precision != "bf16" or device.capability != 90 or max(widths) > MAX_WIDTH:
        return None
    if rows <= GROUP_THREADS // 2 * multiprocessors:  # half of the tiles' rows would stay empty
        return None
    tiles = -(-rows // TILE_ROWS)
    blocks = min(tiles, multiprocessors)
    for passes in sorted(_divisions(len(widths) - 1), key=lambda passes: (len(passes), _again(widths, passes))):
        if _again(widths, passes) > MAX_AGAIN:
            continue
        shared = _shared_bytes(widths, activations, passes)
        shares = [share_items(widths, GROUPS, range(*each)) for each in passes]
        sums = max(_floats(items) for items in shares)
        if shared <= device.shared_bytes - max(STATIC_BYTES, static_bytes(task)) and sums <= sums_limit(widths):
            items = tuple(item for share in shares for item in share)
            return PassesPlan(
                widths, activations, blocks, -(-tiles // blocks), passes, items, shared, task.updates_directly,
                task.ranks > 1 and not task.needs_norm, task.raw_type,
            )  # fmt: skip
    return None


def _divisions(layers: int) -> Iterator[tuple[Pass, ...]]:
    for count in range(1, min(layers, MAX_PASSES)):
        for cuts in combinations(range(1, layers), count):
            yield tuple(reversed(list(pairwise((0, *cuts, layers)))))


def _floats(items: Sequence[Item]) -> int:
    return max(item.offset + item.floats for item in items)


def _again(widths: Sequence[int], passes: Sequence[Pass]) -> float:
    """Products on the way up that an earlier pass has had, as a share of all products of a step."""
    sizes = [padded(i) * padded(o) for i, o in pairwise(widths)]
    again = sum(sum(sizes[low : high - 1]) for low, high in passes[1:])
    return again / (3 * sum(sizes) - sizes[0])


def _shared_bytes(widths: Sequence[int], activations: Sequence[str], passes: Sequence[Pass]) -> int:
    row_blocks = TILE_ROWS // 8

    def matrix(width: int, ones: bool = False) -> int:
        return row_blocks * (columns(width) + ones) * BLOCK_BYTES

    def ones(layer: int) -> bool:
        return layer < len(widths) - 1 and out_major(widths, layer)

    base = aligned(image_bytes(widths), 128) + matrix(widths[0], ones(0))
    most = 4 * GROUPS * (CHUNK + 4 + padded(widths[-1])) * 4 + 64
    for low, high in passes:
        first = low if low > 0 and activations[low - 1] in _STORES_SLOPE else low + 1
        inputs = sum(matrix(widths[i], ones(i)) for i in range(max(low, 1), high))
        errors = sum(matrix(widths[i]) for i in range(first, high + 1))
        most = max(most, inputs + errors + 8 * BLOCK_BYTES)
    outputs = padded(widths[-1])
    return base + most + 3 * (padded(widths[0]) + outputs) * 4 + 4 * GROUPS * (4 + outputs) * 4 + TILE_ROWS * 16
