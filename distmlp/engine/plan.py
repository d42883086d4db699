"""How a network is laid out on a device: regime, tiles, grid, shared memory, buffers. Pure.

A plan asks for no more shared memory, blocks or device memory than `Device` says there is. The constants that
kernels/tile.cuh computes again are compared when a module is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from distmlp.engine.plan_bulk import plan_bulk
from distmlp.engine.plan_chain import plan_chain
from distmlp.engine.plan_narrow import plan_narrow
from distmlp.engine.plan_passes import plan_passes
from distmlp.engine.plan_resident import plan_resident
from distmlp.engine.plan_strips import plan_strips
from distmlp.engine.plan_sweep import plan_sweep
from distmlp.engine.plan_task import Buffer, Device, SpecialPlan, Task, aligned
from distmlp.engine.plan_tiles import (
    STATIC_BYTES,
    Head,
    TileShape,
    choose_gradient_tile,
    choose_head,
    choose_tile,
    shapes_for,
)
from distmlp.engine.tally import TALLY
from distmlp.errors import SystemUnfitError

THREADS = 256
LOSS_ROWS = 32  # rows of a softmax task, as in wide.cu
EVALUATION_ROWS = 1024  # rows that prediction and evaluation take at a time
SLOT_BUFFERS = {"momentum": "first_slot", "first_moment": "first_slot", "second_moment": "second_slot"}
GENERAL = "wide"  # the kernel that takes any network
# In the order of asking.
PLANNERS: dict[str, Callable[[Task, Device], SpecialPlan | None]] = {
    "narrow": plan_narrow,
    "passes": plan_passes,
    "sweep": plan_sweep,
    "strips": plan_strips,
    "chain": plan_chain,
    "resident": plan_resident,
    "bulk": plan_bulk,
}
MAX_STEPS = 1024  # of one call: entries of the step table and the loss ring


@dataclass(frozen=True)
class LayerPlan:
    """Sizes of one layer; all buffers have rows of `ld` elements."""

    ld_in: int
    ld_out: int
    tiles: int  # of the weight gradient
    tiles_n: int  # of them across
    splits: int  # of the batch
    first_task: int  # in the lists of all layers' tasks and tiles
    first_tile: int


@dataclass(frozen=True)
class Plan:
    """The layout. `str(plan)` is what `inspect`-like tools print."""

    task: Task
    device: Device
    product: str  # FMA TF32X3 TF32 BF16
    tile: TileShape  # hidden layers forward and backward
    output_tile: TileShape
    gradient_tile: TileShape
    shared_bytes: int
    blocks: int
    rows: int  # that the buffers hold
    layers: tuple[LayerPlan, ...]
    special: SpecialPlan | None = None  # instead of the general kernel
    joined: SpecialPlan | None = None  # in its place once ranks sum inside the kernel, where that is another one
    head: Head | None = None  # instead of tiles of the output layer
    buffers: tuple[Buffer, ...] = field(default=(), repr=False)

    @property
    def regime(self) -> str:
        """ "narrow" or "wide", as benchmark records have it."""
        return self.special.path if self.special else "wide"

    @property
    def kernel(self) -> str:
        """Name of the training kernel."""
        return self.special.name if self.special else GENERAL

    @property
    def element_bytes(self) -> int:
        return 2 if self.product == "BF16" else 4

    @property
    def gradient_tasks(self) -> int:
        last = self.layers[-1]
        return last.first_task + last.tiles * last.splits

    @property
    def gradient_tiles(self) -> int:
        return self.layers[-1].first_tile + self.layers[-1].tiles

    @cached_property
    def memory_bytes(self) -> int:
        return sum(aligned(buffer.size_bytes, 256) for buffer in self.buffers)

    def __str__(self) -> str:
        widths = "-".join(map(str, self.task.network.widths))
        lines = [
            f"{widths} batch {self.task.rows} {self.task.precision} on {self.device.name}: {self.kernel}",
            f"  {self.product} tiles {self.tile}, output {self.output_tile}, gradients {self.gradient_tile}",
            f"  {self.blocks} blocks of {THREADS} threads, "
            f"{self.shared_bytes:,} of {self.device.shared_bytes:,} shared bytes",
            f"  {self.gradient_tiles} weight-gradient tiles, the batch in {self.layers[0].splits} splits",
            f"  device memory {self.memory_bytes:,} bytes of {self.device.memory_bytes:,}",
        ]
        if special := self.special:
            clusters = f" in clusters of {special.cluster}" if special.cluster > 1 else ""
            lines.insert(1, f"  {special.name} kernel: {special.blocks} blocks of {special.threads} threads{clusters}, "
                            f"{special.shared_bytes:,} shared bytes")  # fmt: skip
        return "\n".join(lines)


def make_plan(task: Task, device: Device, kernel: str = "auto") -> Plan:
    """The layout of `task` on `device`. Raises SystemUnfitError where the device's memory does not suffice.

    `kernel` "auto" takes the first special kernel that fits, GENERAL none, a special one's name that one if it fits.
    """
    product = choose_product(task.precision, device)
    network, rows = task.network, max(1, task.rows)
    special, joined = choose_special(task, device, kernel), None
    if getattr(special, "peers_only", False):
        special, joined = None, special
    pairs = [(layer.fan_in, layer.fan_out) for layer in network.layers]
    shapes = shapes_for(product, device.capability, device.shared_bytes, rows)
    multiprocessors = device.multiprocessors
    products = [(rows, n, k) for k, n in pairs[:-1]] + [(rows, k, n) for k, n in pairs[1:]]
    tile = choose_tile(shapes, product, products or [(rows, *pairs[0])], multiprocessors)
    last = (rows, pairs[-1][1], pairs[-1][0])
    wide_enough = [shape for shape in shapes if shape.n <= 128 or last[2] >= 2048]  # the loss is dear in wide tiles
    output_tile = choose_tile(wide_enough, product, [last], multiprocessors)
    gradient_tile, splits = choose_gradient_tile(shapes, product, pairs, rows, multiprocessors)
    tiles = (tile, output_tile, gradient_tile)
    shared = max(shape.shared_bytes(product) for shape in tiles)
    each = blocks_each(tiles, shared, device)
    plan = Plan(
        task, device, product, *tiles, shared, each * multiprocessors,
        max(special.batch_rows if special else rows, EVALUATION_ROWS), tuple(_layers(pairs, gradient_tile, splits)),
        special, joined, choose_head(pairs, rows, each * multiprocessors, shared),
    )  # fmt: skip
    plan = replace(plan, buffers=tuple(_buffers(plan)))
    if plan.memory_bytes > device.memory_bytes:
        largest = sorted(plan.buffers, key=lambda buffer: -buffer.size_bytes)[:3]
        raise SystemUnfitError(
            f"a network {'-'.join(map(str, network.widths))} with {rows} rows a batch needs "
            f"{plan.memory_bytes:,} bytes on GPU {device.name}, {device.memory_bytes:,} are free (largest: "
            f"{', '.join(f'{b.name} {b.size_bytes:,}' for b in largest)}); use a smaller data.batch, more ranks, "
            "or a smaller network"
        )
    return plan


def choose_product(precision: str, device: Device) -> str:
    """What multiplies matrices in the general kernel, see kernels/codes.cuh."""
    if not device.has_tensor_cores:
        return "FMA"
    return "TF32X3" if precision == "fp32" else precision.upper()


def choose_special(task: Task, device: Device, kernel: str = "auto") -> SpecialPlan | None:
    """The special kernel's plan for `task`, see `make_plan`."""
    if task.lane_rows:
        return None
    for name, planner in PLANNERS.items():
        if (
            kernel in ("auto", name)
            and (special := planner(task, device)) is not None
            and (special.pays or kernel == name)
        ):
            return special
    return None


def blocks_each(tiles: Sequence[TileShape], shared: int, device: Device) -> int:
    """Blocks a multiprocessor: two where they fit, so that one computes while the other starts or finishes a tile."""
    small = max(shape.m * shape.n for shape in tiles) <= 64 * 64
    return 2 if small and 2 * (shared + STATIC_BYTES) <= device.shared_bytes else 1


def _layers(pairs: list[tuple[int, int]], tile: TileShape, splits: int) -> list[LayerPlan]:
    plans: list[LayerPlan] = []
    first = 0
    for fan_in, fan_out in pairs:
        across = -(-fan_out // tile.n)
        tiles = -(-fan_in // tile.m) * across
        plans.append(LayerPlan(aligned(fan_in, 8), aligned(fan_out, 8), tiles, across, splits, first * splits, first))
        first += tiles
    return plans


def _buffers(plan: Plan) -> list[Buffer]:
    """Every piece of device memory but the training rows."""
    task, element = plan.task, plan.element_bytes
    flat = task.network.size * 4
    outputs = task.network.outputs
    softmax = task.loss == "softmax_cross_entropy"
    row_tiles = -(-plan.rows // plan.tile.m)
    output_tiles = -(-plan.rows // plan.output_tile.m)
    head_parts = min(plan.blocks, -(-plan.rows // plan.head.block_rows)) if plan.head else 0
    loss_parts = plan.output_tile.n // 128 if plan.output_tile.n > 144 else 1  # of a tile: Tile::PARTS
    tensors = 2 * len(plan.layers)
    buffers = [
        Buffer("control", 2048, zeroed=True),
        Buffer("parameters", flat, zeroed=True),
        *(Buffer(SLOT_BUFFERS[name], flat, zeroed=True) for name in task.slots),
        *([Buffer("ema", flat, zeroed=True)] if task.ema else []),
        Buffer("gradient", flat + TALLY * 4, zeroed=True),
        Buffer("steps", MAX_STEPS * 16),
        Buffer("results", MAX_STEPS * 16),
        Buffer("tile_arrivals", plan.gradient_tiles * 4, zeroed=True),
        Buffer(
            "loss_partials",
            8
            * max(
                output_tiles * -(-outputs // plan.output_tile.n) * loss_parts, -(-plan.rows // LOSS_ROWS), head_parts
            ),
        ),
        Buffer("norm_partials", 8 * plan.blocks * (1 + 2 * tensors)),
        Buffer("columns", 4 * 3 * task.network.inputs),
        Buffer("predictions", plan.rows * outputs * 4),
        Buffer("raw_rows", EVALUATION_ROWS * task.network.inputs * 4),
    ]
    if plan.layers[0].splits > 1:
        buffers.append(Buffer("partial_tiles", plan.gradient_tasks * plan.gradient_tile.m * plan.gradient_tile.n * 4))
    if softmax:
        buffers.append(Buffer("logits", plan.rows * outputs * 4))
    if task.lane_rows:
        buffers.append(Buffer("lane_sums", task.lane_rows * (flat + TALLY * 4) + TALLY * 4, zeroed=True))
        buffers.append(Buffer("lanes", (MAX_STEPS + task.lane_rows) * 16))
    for special in (plan.special, plan.joined):
        buffers += special.buffers() if special else ()
    for parity in range(2):
        buffers.append(Buffer(f"inputs{parity}", plan.rows * plan.layers[0].ld_in * element))
        if task.labels:
            buffers.append(Buffer(f"labels{parity}", plan.rows * 4))
        if task.weights:
            buffers.append(Buffer(f"weights{parity}", plan.rows * 4))
    for index, layer in enumerate(plan.layers):
        last = index == len(plan.layers) - 1
        buffers.append(Buffer(f"weight{index}", task.network.widths[index] * layer.ld_out * element, zeroed=True))
        if not last:
            buffers.append(Buffer(f"output{index}", plan.rows * layer.ld_out * element))
        buffers.append(Buffer(f"error{index}", plan.rows * layer.ld_out * element))
        parts = max(output_tiles, -(-plan.rows // LOSS_ROWS), head_parts) if last else max(row_tiles, head_parts)
        buffers.append(Buffer(f"column_sums{index}", parts * layer.ld_out * 4))
    return buffers
