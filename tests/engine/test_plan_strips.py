"""The strips' plan: what fits, what is asked for, and that plan and kernel agree."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.plan_strips import MAX_LAYERS, MAX_ROWS, StripsPlan, plan_strips
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
T4 = Device("T4", 75, 40, 65536, 1 << 34)
NARROW64, NARROW128 = (32, 64, 64, 64, 64, 16), (32, 128, 128, 128, 128, 16)
DEEP64 = (16, *(64,) * 8, 2)


def plan(
    widths: tuple[int, ...], rows: int, device: Device = H200, ranks: int = 1, precision: str = "tf32",
    activation: str = "relu", raw_type: str = "f4",
) -> StripsPlan | None:  # fmt: skip
    network = Network.build(widths, activation, "identity")
    task = Task(network, rows, precision, "mse", False, False, (), False, ranks, raw_type=raw_type)
    return plan_strips(task, device)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("rows", [1, 17, 1024, 9000, 65_536, 1_000_000])
@pytest.mark.parametrize(
    "widths", [NARROW64, NARROW128, (1, 1), (3, 17, 100, 1), (128,) * 9, (16, *(64,) * 11, 2)], ids=str
)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int, device: Device) -> None:
    found = plan(widths, rows, device)
    assert found is not None
    assert found.shared_bytes <= device.shared_bytes
    assert found.rows <= MAX_ROWS
    assert found.rows % found.stage_rows == 0
    assert found.rows % (32 if found.rows >= 256 else 16) == 0
    assert (found.stages >= 3) != found.keeps
    assert found.rows % (16 * found.tiles) == 0
    assert found.warps % found.across == 0
    partials, image, kept = found.buffers()
    floats = sum((-(-i // 32) * 32 + 1) * (-(-o // 32) * 32) for i, o in pairwise(widths))
    assert image.size_bytes == 4 * floats
    assert partials.size_bytes >= found.blocks * 4 * floats
    assert kept.size_bytes >= found.blocks * found.rows * widths[0] * 4


def rows_and_copies(widths: tuple[int, ...], rows: int) -> tuple[int, int]:
    found = plan(widths, rows)
    assert found is not None
    return found.rows, found.weight_copies


def test_rows_are_shared_out_evenly() -> None:
    """A batch that fits goes through once, another in strips of the same size."""
    assert rows_and_copies(NARROW64, 1024) == (16, 5)
    assert rows_and_copies(NARROW64, 65_536) == (512, 2)
    assert rows_and_copies(NARROW128, 65_536) == (256, 1)


@pytest.mark.parametrize(
    ("widths", "rows", "keeps"),
    [
        (NARROW64, 1024, True), (NARROW128, 2000, True), (NARROW64, 16_896, True), (NARROW64, 16_897, False),
        (NARROW128, 65_536, False), (DEEP64, 9000, False),
    ],
    ids=str,
)  # fmt: skip
def test_activations_stay_where_they_fit(widths: tuple[int, ...], rows: int, keeps: bool) -> None:
    found = plan(widths, rows)
    assert found is not None
    assert found.keeps == keeps


@pytest.mark.parametrize(
    ("widths", "rows", "tiles", "across"),
    [
        (NARROW64, 1024, 1, 2), (NARROW128, 1024, 1, 4), (NARROW128, 65_536, 2, 2), (DEEP64, 65_536, 2, 1),
        (DEEP64, 9000, 1, 2),
    ],
)  # fmt: skip
def test_all_warps_have_rows_or_columns(widths: tuple[int, ...], rows: int, tiles: int, across: int) -> None:
    found = plan(widths, rows)
    assert found is not None
    assert (found.tiles, found.across) == (tiles, across)


def test_declines_what_does_not_fit() -> None:
    assert plan(NARROW64, 1024, raw_type="f8") is not None
    assert plan(NARROW64, 1024, raw_type="f2") is None
    assert plan(NARROW64, 1024, precision="bf16") is None
    assert plan((32, 129, 16), 1024) is None
    assert plan((8,) * (MAX_LAYERS + 2), 1024) is None
    assert plan(NARROW64, 1024, T4) is None
    assert plan(NARROW64, 1024, ranks=2) is None


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan((32, 100, 16), 65_536, activation="gelu")
    assert found is not None
    macros = found.macros()
    assert (macros["WIDTHS"], macros["ACTIVATIONS"], macros["RAW_TYPE"]) == ("32,100,16", "GELU,IDENTITY", "RAW_F32")
    assert (macros["KEPT_COPIES"], macros["STRIP_BLOCKS"], macros["STRIP_DIRECT"]) == ("2", "132", "1")


def test_norms_go_through_the_flat_gradient() -> None:
    network = Network.build(NARROW64, "relu", "identity")
    found = plan_strips(Task(network, 9000, "tf32", "mse", False, False, (), False, 1, needs_norm=True), H200)
    assert found is not None
    assert not found.direct
    assert "MAX_UPDATE_LAYERS" in found.macros()
