"""The sweep's plan: what fits, and that every parameter's gradient has a place among the partial sums."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.plan_narrow import CHUNK
from distmlp.engine.plan_sweep import MAX_TILES, TILE_ROWS, SweepPlan, plan_sweep
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
DEEP = (32, 128, 128, 128, 128, 16)


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, ranks: int = 1) -> SweepPlan | None:
    network = Network.build(widths, "relu", "identity")
    return plan_sweep(Task(network, rows, "bf16", "mse", False, False, (), False, ranks), device)


@pytest.mark.parametrize("rows", [8449, 20_000, 65_536, 132 * TILE_ROWS * MAX_TILES])
@pytest.mark.parametrize("widths", [DEEP, (1, 1), (3, 17, 100, 1), (128,) * 9, (16, *(64,) * 30, 2)], ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int) -> None:
    found = plan(widths, rows)
    assert found is not None
    assert found.shared_bytes <= H200.shared_bytes
    assert found.blocks * found.tiles * TILE_ROWS >= rows
    assert found.threads * 128 <= 65536  # registers
    assert found.chunks * CHUNK >= sum(i * o + o for i, o in pairwise(widths))


def test_declines_what_does_not_fit() -> None:
    assert plan(DEEP, 1000) is None  # the general kernel is as good
    assert plan(DEEP, 132 * TILE_ROWS * MAX_TILES + 1) is None
    assert plan((32, 129, 16), 65_536) is None
    assert plan(DEEP, 65_536, A100) is None


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan((32, 100, 16), 65_536)
    assert found is not None
    macros = found.macros()
    assert (macros["WIDTHS"], macros["ACTIVATIONS"], macros["SWEEP_TILES"]) == ("32,100,16", "RELU,IDENTITY", "8")
    assert macros["NARROW_ITEMS"] == "{0,0,1,0,0},{0,1,1,0,0},{1,0,1,0,0}"


def test_several_ranks_go_through_the_flat_gradient() -> None:
    alone, joined = (plan(DEEP, 20_000, ranks=ranks) for ranks in (1, 2))
    assert alone is not None
    assert joined is not None
    assert (alone.direct, joined.direct) == (True, False)
