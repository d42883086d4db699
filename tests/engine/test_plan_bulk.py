"""The bulk kernel's plan: where it applies, and that what the kernel indexes is there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.plan import make_plan
from distmlp.engine.plan_bulk import CLUSTER, MAX_LAYERS, STATIC_BYTES, BulkPlan, gradient_clocks, plan_bulk
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
SLICE = Device("H200 1g", 90, 16, 232448, 1 << 34)
MID = (512,) * 6
SHAPES = [
    (MID, 16384), ((1024,) * 4, 16384), ((4096,) * 3, 8192), ((300, 65, 130), 5000), ((1, 1), 1),
    ((100,) * (MAX_LAYERS + 1), 257), ((784, 512, 512, 10), 1024), ((64, 256), 128), ((3000, 8, 1), 70_000),
]  # fmt: skip


def task(widths: tuple[int, ...], rows: int, **changes: object) -> Task:
    values = {
        "network": Network.build(widths, "relu", "identity"), "rows": rows, "precision": "bf16", "loss": "mse",
        "labels": False, "weights": False, "slots": (), "ema": False, "ranks": 1, **changes,
    }  # fmt: skip
    return Task(**values)  # type: ignore[arg-type]


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, **changes: object) -> BulkPlan | None:
    return plan_bulk(task(widths, rows, **changes), device)


def indexed(found: BulkPlan, precision: str) -> dict[str, int]:
    """Bytes from the start of every buffer to the end of what the kernels address in it."""
    block = {"bf16": 64, "tf32": 32}[precision]  # COLUMNS
    rows, n, gradient_n, pairs = found.rows, found.n, found.gradient_n, list(pairwise(found.widths))
    row_blocks, phases = rows // 128, 2 * len(pairs) - 1  # Memory::announced
    widest, warps, threads = max(n, gradient_n), 8, 256

    def blocked(rows: int, columns: int) -> int:  # blocked_bytes
        return rows * (-(-columns // block) * 128)

    def transpose(rows: int, columns: int) -> int:
        return blocked(across(columns, 256) * 256, rows)

    def batch(columns: int) -> int:  # batch_bytes
        return transpose(rows, columns) if precision == "tf32" else blocked(rows, columns)

    def weight(fan_in: int, fan_out: int) -> int:  # weight_rows
        both = transpose(fan_in, fan_out) if precision == "tf32" else 0
        return blocked(across(fan_in, widest) * widest, fan_out) + both

    def across(columns: int, n: int) -> int:
        return -(-columns // n)

    # Clusters take tiles in pairs one above the other: GradientTask, finish_share.
    tiles = sum(2 * across(fan_in, 256) * across(fan_out, gradient_n) for fan_in, fan_out in pairs)
    whole = found.blocks if found.whole_rounds or found.splits == 1 else 0
    whole *= 2 if found.ranks > 1 else 1  # LATER
    shares = (tiles - found.whole_rounds * found.blocks) * found.splits if found.splits > 1 else 0
    return {
        "bulk_rows": 2 * batch(found.widths[0]) + 2 * sum(batch(o) for _, o in pairs),
        "bulk_weights": sum(weight(i, o) for i, o in pairs),
        "bulk_sums": 4 * sum(rows // 16 * across(o, block) * block for _, o in pairs),
        "bulk_signs": 4 * sum(row_blocks * across(o, n) * (n // 64) * threads for _, o in pairs),
        "bulk_losses": 8 * row_blocks * across(found.widths[-1], n) * warps,
        "bulk_row_weights": 8 * 2 * (rows // 32),
        "bulk_partials": (whole + shares) * (gradient_n // 4) * threads * 8,
        "bulk_words": 4 * (8 + 2 * phases * row_blocks + tiles),
    }


@pytest.mark.parametrize("device", [H200, SLICE], ids=lambda device: device.name)
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize(("widths", "rows"), SHAPES, ids=str)
def test_buffers_hold_what_is_indexed(widths: tuple[int, ...], rows: int, precision: str, device: Device) -> None:
    found = plan(widths, rows, device, precision=precision)
    assert found is not None
    assert {buffer.name: buffer.size_bytes for buffer in found.buffers()} == indexed(found, precision)
    zeroed = [buffer.name for buffer in found.buffers() if buffer.zeroed]
    assert zeroed == (["bulk_rows", "bulk_words"] if precision == "tf32" else ["bulk_words"])
    assert rows <= found.rows < rows + 256
    assert found.rows % 256 == 0  # whole pairs of tiles


@pytest.mark.parametrize(("widths", "rows"), SHAPES, ids=str)
def test_ranks_have_places_for_what_they_send(widths: tuple[int, ...], rows: int) -> None:
    found = plan(widths, rows, ranks=2)
    assert found is not None
    assert {buffer.name: buffer.size_bytes for buffer in found.buffers()} == indexed(found, "bf16")
    size = Network.build(widths, "relu", "identity").size
    first = (size + 8 * (1 + found.blocks) + 63) // 64 * 64  # sent_place
    tiles = sum(2 * -(-i // 256) * -(-o // found.gradient_n) for i, o in pairwise(widths))
    assert found.peer_words == first + tiles * 2 * (found.gradient_n // 4) * 256


@pytest.mark.parametrize("device", [H200, SLICE], ids=lambda device: device.name)
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize(("widths", "rows"), SHAPES, ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int, precision: str, device: Device) -> None:
    found = plan(widths, rows, device, precision=precision)
    assert found is not None
    assert found.shared_bytes + STATIC_BYTES[precision] <= device.shared_bytes
    assert found.stages >= 3
    assert found.blocks <= device.multiprocessors
    assert found.blocks % CLUSTER == 0
    assert found.splits <= found.blocks // CLUSTER  # shares of a tile wait for each other


@pytest.mark.parametrize("multiprocessors", [14, 16, 26, 60, 78, 114, 132])
def test_shares_of_a_tile_are_computed_at_once(multiprocessors: int) -> None:
    device = Device("part", 90, multiprocessors, 232448, 1 << 36)
    for widths in ((64, 64), (256, 256), (100, 500, 10), (784, 512, 512, 10), (600, 200, 30)):
        for rows in (1, 64, 500, 1100, 4000, 16384, 250_000):
            found = plan(widths, rows, device)
            assert found is not None
            assert found.splits <= found.blocks // CLUSTER, (widths, rows)


@pytest.mark.parametrize(
    ("widths", "rows", "changes"),
    [
        (MID, 16384, {"precision": "fp32"}),
        ((512,) * (MAX_LAYERS + 2), 16384, {}),
        ((512, 512, 257), 16384, {"loss": "softmax_cross_entropy", "labels": True}),
        (MID, 16384, {"device": Device("A100", 80, 108, 166912, 1 << 36)}),
        (MID, 16384, {"device": Device("B200", 100, 148, 232448, 1 << 37)}),
    ],
    ids=str,
)  # fmt: skip
def test_leaves_the_rest_to_others(widths: tuple[int, ...], rows: int, changes: dict) -> None:
    assert plan(widths, rows, **changes) is None


def test_as_many_layers_as_the_kernel_has_places_for() -> None:
    assert plan((512,) * (MAX_LAYERS + 1), 16384) is not None


@pytest.mark.parametrize(("classes", "least"), [(2, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)])
def test_a_tile_has_all_classes(classes: int, least: int) -> None:
    found = plan((40, 30, classes), 500, loss="softmax_cross_entropy", labels=True)
    assert found is not None
    assert found.n >= least
    assert plan((40, 30, 257), 500) is not None  # other losses need no whole rows


@pytest.mark.parametrize(
    ("widths", "rows", "pays"),
    [
        (MID, 6144, False), (MID, 6145, True), (MID, 16384, True), ((1024,) * 4, 3072, False),
        ((1024,) * 4, 3073, True), ((4096,) * 3, 512, False), ((4096,) * 3, 8192, True), ((300, 65, 130), 5000, False),
    ],
    ids=str,
)  # fmt: skip
def test_pays_where_clusters_have_work(widths: tuple[int, ...], rows: int, pays: bool) -> None:
    """In the widest layer: a tile of 256 x 256 for three quarters of the 66 clusters."""
    found = plan(widths, rows)
    assert found is not None
    assert found.pays == pays


@pytest.mark.parametrize(
    ("widths", "rows", "pays"),
    [
        ((256,) * 6, 4096, True), ((100, 1000, 1000, 2), 1024, True), ((32, 64, 64, 16), 65536, True),
        ((784, 512, 512, 10), 1024, False), ((64, 128, 128, 8), 4096, False),
    ],
    ids=str,
)  # fmt: skip
def test_pays_sooner_in_tf32(widths: tuple[int, ...], rows: int, pays: bool) -> None:
    found = plan(widths, rows, precision="tf32")
    assert found is not None
    assert found.pays == pays


def test_is_taken_by_name_where_it_does_not_pay() -> None:
    small = task((40, 2000, 50), 1500)
    assert make_plan(small, H200).kernel != "bulk"
    assert make_plan(small, H200, "bulk").kernel == "bulk"
    assert make_plan(task(MID, 16384), H200).kernel == "bulk"


def test_few_tiles_share_out_the_batch() -> None:
    few, many = plan(MID, 16384), plan((4096,) * 5, 8192)
    assert few is not None
    assert many is not None
    assert few.splits > 1
    assert few.whole_rounds == 0
    assert (many.whole_rounds, many.splits) == (0, 1)  # 2048 tiles on 132 blocks
    pairs = list(pairwise(few.widths))
    shared, alone = (gradient_clocks(pairs, 16384, 256, splits, 0, 132, 64) for splits in (few.splits, 1))
    assert shared < alone
    some = plan((1024,) * 6, 8192)
    assert some is not None
    assert (some.whole_rounds, some.splits) == (1, 4)  # 160 tiles: the last 28 in shares


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan(MID, 16000, raw_type="u1")
    assert found is not None
    assert found.macros() == {
        "RAW_TYPE": "RAW_U8", "BULK_N": "256", "BULK_GRADIENT_N": "256", "BULK_STAGES": "4", "BULK_SPLITS": "3",
        "BULK_WHOLE_ROUNDS": "0",
        "BULK_ROWS": "16128",
    }  # fmt: skip
