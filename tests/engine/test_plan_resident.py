"""The resident plan: what fits, and that it asks for no more than there is."""

from __future__ import annotations

import pytest

from distmlp.engine.optimizers import slot_names
from distmlp.engine.plan_resident import STATIC_BYTES, WARPS, ResidentPlan, plan_resident, row_tiles
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
SEED = (100, 1000, 1000, 1000, 2)
FITTING = [(SEED, 32), ((784, 512, 512, 10), 128), ((1, 3, 1), 1), ((17, *(16,) * 7, 2), 64), ((64,) * 6 + (16,), 128)]


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, **changes: object) -> ResidentPlan | None:
    values = {
        "network": Network.build(widths, "relu", "identity"), "rows": rows, "precision": "bf16", "loss": "mse",
        "labels": False, "weights": False, "slots": slot_names("adam"), "ema": False, "ranks": 1, **changes,
    }  # fmt: skip
    return plan_resident(Task(**values), device)  # type: ignore[arg-type]


@pytest.mark.parametrize(("widths", "rows"), FITTING, ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int) -> None:
    found = plan(widths, rows)
    assert found is not None
    assert found.shared_bytes + STATIC_BYTES <= H200.shared_bytes
    assert found.blocks <= H200.multiprocessors
    assert 8 * found.blocks >= max(widths[1:-1])
    assert 16 * found.tiles >= rows
    assert -(-widths[0] // 16) * found.tiles <= found.blocks * WARPS  # every tile of a batch has a warp
    assert found.buffers()[0].zeroed  # what nobody writes is multiplied


@pytest.mark.parametrize(
    ("widths", "rows", "changes"),
    [
        (SEED, 129, {}), ((100, 1064, 2), 32, {}), ((100, 1000, 17), 32, {}), ((10, 2), 32, {}), ((3000, 8, 1), 32, {}),
        (SEED, 32, {"ema": True}), (SEED, 32, {"ranks": 2}), (SEED, 32, {"needs_norm": True}),
        (SEED, 32, {"precision": "tf32"}),
    ],
    ids=str,
)  # fmt: skip
def test_leaves_the_rest_to_others(widths: tuple[int, ...], rows: int, changes: dict) -> None:
    assert plan(widths, rows, **changes) is None


def test_fewer_slots_fit_where_more_do_not() -> None:
    assert plan(SEED, 32, A100) is None
    assert plan(SEED, 32, A100, slots=()) is None  # 125 blocks for 108 multiprocessors
    wide = (100, 800, 800, 800, 2)
    assert plan(wide, 32, A100) is None
    assert plan(wide, 32, A100, slots=()) is not None


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (16, 1), (17, 2), (33, 4), (128, 8)])
def test_row_tiles(rows: int, tiles: int) -> None:
    assert row_tiles(rows) == tiles
