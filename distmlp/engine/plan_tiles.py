"""Tile shapes of the wide regime, and which one suits a set of matrix products. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distmlp.engine.plan_task import aligned

PRODUCTS = ("FMA", "TF32X3", "TF32", "BF16")


@dataclass(frozen=True)
class TileShape:
    """An output tile of a block: `m` × `n`, stages `k` deep, `warps` over (m, n, depth). See kernels/tile.cuh."""

    m: int
    n: int
    k: int
    warps: tuple[int, int, int]
    stages: int
    warpgroups: bool = False  # Hopper's products, see kernels/tile_wgmma.cuh
    # Of weights only: 56 of 128 × 144 (160) cover 1000 × 1000, 126 of 96 × 64 those of mnist-1024: one round of tiles.
    for_gradients: bool = False

    def __str__(self) -> str:
        warps = "warpgroups" if self.warpgroups else f"{'x'.join(map(str, self.warps))} warps"
        return f"{self.m}x{self.n}x{self.k} ({warps}, {self.stages} stages)"

    def shared_bytes(self, product: str) -> int:
        """What a block needs for the worst of the three products (forward, backward, weight gradient)."""
        element = 2 if product == "BF16" else 4
        part = self.n // (self.n // 128) if self.n > 144 else self.n  # columns finished at a time
        results = max(self.m * (part + 8), self.m * self.n * (self.warps[2] - 1)) * 4
        if self.warpgroups and product == "BF16":
            pipe = self.stages * (self.m + aligned(self.n, 64)) * self.k * element + 1024
            return pipe + results if self.n <= 128 else max(pipe, results)
        deep, flat = 16 // element, 8 if product.startswith("TF32") else 16 // element

        def stage(a_rows_m: bool, b_rows_k: bool) -> int:
            a = self.m * (self.k + deep) if a_rows_m else self.k * (self.m + flat)
            b = self.k * (self.n + flat) if b_rows_k else self.n * (self.k + deep)
            return (a + b) * element

        pipe = self.stages * max(stage(True, True), stage(True, False), stage(False, True))
        if not self.warpgroups:
            return pipe + results
        return pipe + results + 4 * self.n * self.k * element  # what it is split to

    def fitted(self, product: str, limit: int) -> TileShape | None:
        """The same with as many stages as `limit` bytes of shared memory allow; None where too few fit."""
        for stages in range(self.stages, 2 if self.warpgroups else 1, -1):
            shape = replace(self, stages=stages)
            if shape.shared_bytes(product) <= limit - STATIC_BYTES:
                return shape
        return None

    def macros(self, prefix: str) -> dict[str, str]:
        return {
            f"{prefix}_M": str(self.m), f"{prefix}_N": str(self.n), f"{prefix}_K": str(self.k),
            f"{prefix}_WARPS": ",".join(map(str, self.warps)), f"{prefix}_STAGES": str(self.stages),
            f"{prefix}_WARPGROUPS": str(int(self.warpgroups)),
        }  # fmt: skip


STATIC_BYTES = 10240  # shared memory that kernels declare themselves, rounded up

SHAPES = {
    "FMA": (
        TileShape(128, 128, 16, (4, 2, 1), 3),
        TileShape(64, 64, 32, (4, 2, 1), 3),
        TileShape(32, 32, 32, (2, 2, 2), 4),
        TileShape(32, 16, 64, (1, 1, 8), 4),
        TileShape(16, 32, 64, (1, 1, 8), 4),
    ),
    "TF32": (
        TileShape(128, 128, 32, (2, 4, 1), 4),
        TileShape(128, 64, 64, (4, 2, 1), 4),
        TileShape(128, 64, 32, (4, 2, 1), 4),
        TileShape(64, 64, 32, (2, 2, 2), 4),
        TileShape(32, 32, 64, (1, 1, 8), 8),
        TileShape(32, 16, 64, (1, 1, 8), 8),
        TileShape(16, 32, 64, (1, 1, 8), 8),
        TileShape(128, 160, 32, (4, 2, 1), 4, for_gradients=True),
        TileShape(96, 64, 64, (2, 2, 2), 4, for_gradients=True),
    ),
    "BF16": (
        TileShape(128, 128, 64, (2, 4, 1), 4),
        TileShape(64, 64, 64, (2, 2, 2), 4),
        TileShape(32, 32, 128, (1, 1, 8), 8),
        TileShape(32, 16, 128, (1, 1, 8), 8),
        TileShape(16, 32, 128, (1, 1, 8), 8),
    ),
}
SHAPES["TF32X3"] = SHAPES["TF32"]

# Beside them on Hopper. The first three measured on an H200 for 8192 × 4096 × 4096: 672, 495 and 433 TFLOP/s, where the
# best of the above reaches 217.
WARPGROUP_SHAPES = {
    "BF16": (
        *(TileShape(128, n, 64, (8, 1, 1), stages, warpgroups=True) for n, stages in ((256, 4), (128, 6), (64, 8))),
        *(TileShape(64, n, 64, (4, 1, 2), 8, warpgroups=True) for n in (128, 64)),
        TileShape(128, 144, 64, (8, 1, 1), 5, warpgroups=True, for_gradients=True),
    ),
    "TF32X3": (
        TileShape(128, 64, 32, (8, 1, 1), 5, warpgroups=True),
        TileShape(64, 64, 32, (4, 1, 2), 6, warpgroups=True),
    ),
}

SPLIT_ROWS = 4096  # up to which these are faster in TF32X3; with 8192 and 16384 they were 4 and 8 % slower


def shapes_for(product: str, capability: int, shared_bytes: int, rows: int = 1) -> list[TileShape]:
    """What can be used for `product` on a device of this compute capability (× 10) and shared memory a block, for a
    batch of `rows`."""
    shapes = [*SHAPES[product]]
    if capability == 90 and (product != "TF32X3" or rows <= SPLIT_ROWS):
        shapes += WARPGROUP_SHAPES.get(product, ())
    fitted = (shape.fitted(product, shared_bytes) for shape in shapes)
    return [shape for shape in fitted if shape is not None]


HEAD_OUTPUTS = 16  # a warp's lanes hold sums for so many at most


@dataclass(frozen=True)
class Head:
    """The output layer computed by warps that take whole rows, see kernels/wide_head.cuh."""

    outputs: int
    rows: int  # of a warp at a time

    @property
    def block_rows(self) -> int:
        return 8 * self.rows

    def macros(self) -> dict[str, str]:
        return {"HEAD_OUTPUTS": str(self.outputs), "HEAD_ROWS": str(self.rows)}


def choose_head(layers: Sequence[tuple[int, int]], rows: int, blocks: int, shared_bytes: int) -> Head | None:
    """For a few outputs above a hidden layer whose weights fit `shared_bytes` beside eight warps' sums; else None."""
    fan_in, outputs = layers[-1]
    if len(layers) < 2 or outputs > HEAD_OUTPUTS or (outputs + 8) * aligned(fan_in, 128) * 4 > shared_bytes:
        return None
    each = next((n for n in (1, 2, 4) if rows <= 8 * n * blocks), 0)  # more rows are left to tensor cores
    return Head(outputs, each) if each else None


# Clocks of a multiprocessor, fitted to an H200: multiply-adds a clock of the main loops, what a stage costs besides,
# bytes a clock that come in from L2, beginning a phase, a tile, finishing a result; for a tile of weight gradients
# beginning, a stage that comes from beyond L2, updating, and handing a result over to another block.
_MULTIPLIES = {"FMA": 95.0, "TF32X3": 140.0, "TF32": 300.0, "BF16": 450.0}
_WARPGROUP_MULTIPLIES = {"BF16": 2000.0, "TF32X3": 400.0}
_STAGE, _BYTES, _PHASE, _TILE, _FINISH = 400.0, 60.0, 1500.0, 500.0, 0.25
_GRADIENT_TILE, _FAR_STAGE, _UPDATE, _HAND_OVER = 6000.0, 200.0, 0.85, 3.0


def stage_clocks(shape: TileShape, product: str) -> float:
    """Estimated time of one stage of the main loop, in clocks."""
    rate = _WARPGROUP_MULTIPLIES[product] if shape.warpgroups else _MULTIPLIES[product]
    move = (shape.m + shape.n) * shape.k * (2 if product == "BF16" else 4) / _BYTES
    return _STAGE + max(shape.m * shape.n * shape.k / rate, move)


def product_clocks(shape: TileShape, product: str, m: int, n: int, k: int, blocks: int) -> float:
    """Estimated time of C (m, n) = A (m, k) B (k, n) over the grid: full rounds of tiles."""
    tiles = -(-m // shape.m) * -(-n // shape.n)
    a_tile = _TILE + -(-k // shape.k) * stage_clocks(shape, product) + _FINISH * shape.m * shape.n
    return _PHASE + -(-tiles // blocks) * a_tile


def choose_tile(
    shapes: Sequence[TileShape], product: str, products: Sequence[tuple[int, int, int]], blocks: int
) -> TileShape:
    """The shape with the least estimated time over all matrix products (m, n, k) of some layers."""
    usable = [shape for shape in shapes if not shape.for_gradients]
    return min(usable, key=lambda shape: sum(product_clocks(shape, product, *sizes, blocks) for sizes in products))


def choose_gradient_tile(
    shapes: Sequence[TileShape], product: str, layers: Sequence[tuple[int, int]], rows: int, blocks: int
) -> tuple[TileShape, int]:
    """Shape and splits of the batch for the weight gradients of all `layers` (fan_in, fan_out) in one phase."""

    def clocks(shape: TileShape, splits: int) -> float:
        tiles = sum(-(-fan_in // shape.m) * -(-fan_out // shape.n) for fan_in, fan_out in layers)
        stages = -(-rows // shape.k)
        results = shape.m * shape.n
        a_stage = stage_clocks(shape, product) + _FAR_STAGE
        task = _GRADIENT_TILE + -(-stages // splits) * a_stage + _UPDATE * results
        return -(-tiles * splits // blocks) * (task + (_HAND_OVER * results if splits > 1 else 0.0))

    # Results of more than 128 columns spill when they are updated, which slows the other phases down too (mid1024-8k:
    # 700 µs a step, 667 without), and would not stay in registers while splits are added up.
    deep = rows >= 4096 and all(min(layer) >= 2048 for layer in layers)
    candidates = [
        (shape, splits)
        for shape in shapes
        for splits in range(1, 33)
        if (splits == 1 or rows >= splits * 2 * shape.k)
        and (shape.n <= 128 or (splits == 1 and (deep or shape.for_gradients)))
    ]
    return min(candidates, key=lambda candidate: clocks(*candidate))
