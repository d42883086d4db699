"""The bulk kernel: large networks on Hopper in bf16 or tf32, tiles filled by bulk copies. Pure.

The sums here are computed again in kernels/bulk_ring.cuh and bulk_store.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distmlp.engine.plan_task import Buffer, Device, Task, aligned, raw_code
from distmlp.engine.tally import TALLY

CAPABILITY = 90  # its machine code is for this alone
TILE_M = 128
WIDTHS_OF_TILES = (256, 128, 64)
MAX_LAYERS = 12
MAX_SPLITS = 16
MAX_WHOLE_ROUNDS = 4  # before shares: with 15, at 4096 columns, these cost more than they saved
THREADS, CONSUMER_WARPS = 384, 8
CLUSTER = 2  # blocks, with tiles one above the other
STATIC_BYTES = {"bf16": 2048, "tf32": 3072}  # that the kernel declares itself
STAGING_BYTES = {"bf16": CONSUMER_WARPS * 2 * 2048, "tf32": CONSUMER_WARPS * 2 * 1024}
NOTES_BYTES = 256  # barriers of places where results wait to be sent, notes about tiles, places in the ring
BLOCK_COLUMNS = {"bf16": 64, "tf32": 32}  # of a matrix: 128 bytes

# Clocks of a multiprocessor, of an H200: the product of a stage 64 columns wide, bytes a clock that come in from L2,
# what a tile and a block of columns of its results take besides, what a tile waits for those before it where all run
# at once.
_PRODUCT, _BYTES, _TILE, _RESULTS, _LATENCY = 256, 28, 600, 400, 2500


@dataclass(frozen=True)
class BulkPlan:
    """Launch shape of the bulk kernel."""

    widths: tuple[int, ...]
    rows: int  # that the matrices have
    precision: str
    raw_type: str
    blocks: int
    n: int  # columns of a tile, forward and backward
    gradient_n: int  # and of a weight gradient
    whole_rounds: int  # of all blocks: so many tiles of weight gradients are a block's for the whole batch
    splits: int  # of the batch in the others
    stages: int
    ranks: int
    parameters: int

    pays: bool  # at this size

    name, path, source, entry = "bulk", "wide", "bulk.cu", "bulk_steps"
    cluster = CLUSTER
    batch_rows = 0
    threads = THREADS

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * (stage_bytes(max(self.n, self.gradient_n)) + 16)
        return ring + NOTES_BYTES + STAGING_BYTES[self.precision]

    def macros(self) -> dict[str, str]:
        return {
            "RAW_TYPE": raw_code(self.raw_type),
            "BULK_N": str(self.n),
            "BULK_GRADIENT_N": str(self.gradient_n),
            "BULK_STAGES": str(self.stages),
            "BULK_WHOLE_ROUNDS": str(self.whole_rounds),
            "BULK_SPLITS": str(self.splits),
            "BULK_ROWS": str(self.rows),
        }

    def buffers(self) -> tuple[Buffer, ...]:
        pairs = list(pairwise(self.widths))
        row_blocks, phases = self.rows // TILE_M, 2 * len(pairs) - 1
        columns = BLOCK_COLUMNS[self.precision]
        outputs = sum(self._batch_bytes(fan_out) for _, fan_out in pairs)
        weights = sum(self._weight_bytes(fan_in, fan_out) for fan_in, fan_out in pairs)
        tiles = gradient_tiles(pairs, self.gradient_n)
        shares = self.blocks if self.whole_rounds or self.splits == 1 else 0
        if self.ranks > 1:
            shares *= 2  # a tile is finished behind the products of the next one
        if self.splits > 1:
            shares += (tiles - self.whole_rounds * self.blocks) * self.splits
        return (
            # Whole tiles of transposes are copied; of columns that no layer has nothing is ever written, or used.
            Buffer("bulk_rows", 2 * (self._batch_bytes(self.widths[0]) + outputs), zeroed=self.precision == "tf32"),
            Buffer("bulk_weights", weights),
            Buffer("bulk_sums", 4 * self.rows // 16 * sum(aligned(fan_out, columns) for _, fan_out in pairs)),
            Buffer("bulk_signs", row_blocks * sum(-(-o // self.n) for _, o in pairs) * TILE_M * self.n // 8),
            Buffer("bulk_losses", 8 * row_blocks * -(-self.widths[-1] // self.n) * CONSUMER_WARPS),
            Buffer("bulk_row_weights", 8 * 2 * (self.rows // 32)),
            Buffer("bulk_partials", shares * TILE_M * self.gradient_n * 4),
            Buffer("bulk_words", 4 * (8 + 2 * phases * row_blocks + tiles), zeroed=True),
        )

    @property
    def peer_words(self) -> int:
        """That a rank sends to another: the flat gradient or biases, tallies of blocks, tiles as blocks have them."""
        tiles = gradient_tiles(list(pairwise(self.widths)), self.gradient_n)
        return aligned(self.parameters + TALLY * (1 + self.blocks), 64) + tiles * TILE_M * self.gradient_n

    def _batch_bytes(self, columns: int) -> int:
        """Of inputs, outputs or errors; in tf32 a transpose."""
        if self.precision == "tf32":
            return self._blocked_bytes(aligned(columns, CLUSTER * TILE_M), self.rows)
        return self._blocked_bytes(self.rows, columns)

    def _weight_bytes(self, fan_in: int, fan_out: int) -> int:
        """Of the copy of a layer's weights and, in tf32, of their transpose."""
        transpose = self._blocked_bytes(aligned(fan_out, CLUSTER * TILE_M), fan_in) if self.precision == "tf32" else 0
        return self._blocked_bytes(aligned(fan_in, max(self.n, self.gradient_n)), fan_out) + transpose

    def _blocked_bytes(self, rows: int, columns: int) -> int:
        return rows * -(-columns // BLOCK_COLUMNS[self.precision]) * 128


def plan_bulk(task: Task, device: Device) -> BulkPlan | None:
    """The launch for `task`, or None where the device is another or a tile has not all classes."""
    widths, rows = task.network.widths, max(1, task.rows)
    pairs = list(pairwise(widths))
    if task.precision not in BLOCK_COLUMNS or device.capability != CAPABILITY or len(pairs) > MAX_LAYERS:
        return None
    blocks = device.multiprocessors // CLUSTER * CLUSTER
    least = aligned(widths[-1], 64) if task.loss == "softmax_cross_entropy" else 64  # whole rows of classes
    fitting = [n for n in WIDTHS_OF_TILES if n >= least]
    if not fitting:
        return None
    block = BLOCK_COLUMNS[task.precision]
    n = min(fitting, key=lambda n: chain_clocks(pairs, rows, n, blocks, block))
    gradient_n, splits, whole_rounds = min(
        (
            (n, splits, whole)
            for n in WIDTHS_OF_TILES
            for splits in range(1, MAX_SPLITS + 1)
            for whole in {0, gradient_tiles(pairs, n) // blocks if splits > 1 else 0}
            if whole <= MAX_WHOLE_ROUNDS
        ),
        key=lambda c: gradient_clocks(pairs, rows, c[0], c[1], c[2], blocks, block),
    )
    room = device.shared_bytes - STATIC_BYTES[task.precision] - NOTES_BYTES - STAGING_BYTES[task.precision]
    stages = min(8, room // (stage_bytes(max(n, gradient_n)) + 16))
    if stages < 3:
        return None
    return BulkPlan(
        widths,
        aligned(rows, CLUSTER * TILE_M),
        task.precision,
        task.raw_type,
        blocks,
        n,
        gradient_n,
        whole_rounds,
        splits,
        stages,
        task.ranks,
        task.network.size,
        pays(task.precision, widths, rows, blocks // CLUSTER),
    )


def pays(precision: str, widths: Sequence[int], rows: int, clusters: int) -> bool:
    """Whether the kernel is ahead of the general one, by the tiles that a layer has; as measured on an H200."""
    across = -(-rows // (CLUSTER * TILE_M))
    if precision == "tf32":  # in which the general kernel is slower: one cluster in six
        return 6 * across * max(widths[1:]) >= 256 * clusters
    return 4 * across * -(-max(widths) // 256) >= 3 * clusters


def stage_bytes(n: int) -> int:
    return (TILE_M + n) * 128


def stage_clocks(n: int) -> float:
    return max(_PRODUCT * n / 64, (TILE_M + n / CLUSTER) * 128 / _BYTES)


def chain_clocks(pairs: Sequence[tuple[int, int]], rows: int, n: int, blocks: int, block: int) -> float:
    """Estimated time of all forward and backward tiles with `n` columns."""
    row_blocks = CLUSTER * -(-rows // (CLUSTER * TILE_M))
    clocks = 0.0
    for depth, columns in [*pairs, *((fan_out, fan_in) for fan_in, fan_out in pairs[1:])]:
        tiles = row_blocks * -(-columns // n)
        a_tile = _TILE + -(-depth // block) * stage_clocks(n) + _RESULTS * n / block
        rounds = tiles / blocks
        clocks += a_tile * max(rounds, 1.0) + (_LATENCY if rounds < 2 else 0.0)
    return clocks


def gradient_tiles(pairs: Sequence[tuple[int, int]], n: int) -> int:
    """Tiles of `n` columns that all weight gradients have, with those that fill up clusters."""
    return CLUSTER * sum(-(-fan_in // (CLUSTER * TILE_M)) * -(-fan_out // n) for fan_in, fan_out in pairs)


def gradient_clocks(
    pairs: Sequence[tuple[int, int]], rows: int, n: int, splits: int, whole_rounds: int, blocks: int, block: int
) -> float:
    """Estimated time of all weight gradients: tiles of `n` columns, `whole_rounds` for each block, others in shares."""
    stages = -(-rows // block)

    def task(splits: int) -> float:
        products = -(-stages // splits) * stage_clocks(n) + _TILE + (TILE_M * n * 8 / _BYTES if splits > 1 else 0)
        return products + 8.0 * _RESULTS * n / 64 / splits

    left = gradient_tiles(pairs, n) - whole_rounds * blocks
    return whole_rounds * task(1) + -(-left * splits // blocks) * task(splits)
