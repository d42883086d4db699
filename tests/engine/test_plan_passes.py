"""The plan of several passes: what fits, that passes cover all layers, and that every gradient has a place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from distmlp.engine.plan import make_plan
from distmlp.engine.plan_narrow import CHUNK, sums_limit
from distmlp.engine.plan_passes import TILE_ROWS, PassesPlan, plan_passes
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
DEEP = (32, 128, 128, 128, 128, 16)


def task(widths: tuple[int, ...], rows: int, activation: str = "relu", ranks: int = 1) -> Task:
    network = Network.build(widths, activation, "identity")
    return Task(network, rows, "bf16", "mse", False, False, (), False, ranks)


@pytest.mark.parametrize("rows", [8449, 20_000, 65_536, 1_000_000])
@pytest.mark.parametrize(
    ("widths", "activation"),
    [
        (DEEP, "relu"), ((1, 1, 1), "tanh"), ((3, 17, 100, 1), "gelu"), ((128,) * 4, "relu"),
        ((16, *(64,) * 8, 2), "gelu"), ((20, 100, 100, 100, 100, 3), "tanh"),
    ],
    ids=str,
)  # fmt: skip
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], activation: str, rows: int) -> None:
    found = plan_passes(task(widths, rows, activation), H200)
    assert found is not None
    assert found.shared_bytes < H200.shared_bytes
    assert found.blocks <= H200.multiprocessors
    assert found.blocks * found.turns * TILE_ROWS >= rows
    assert found.sums <= sums_limit(widths)
    assert found.chunks * CHUNK >= sum(i * o + o for i, o in pairwise(widths))
    layers = len(widths) - 1
    assert [layer for low, high in reversed(found.passes) for layer in range(low, high)] == list(range(layers))
    assert {item.layer for item in found.items} == set(range(layers))


def test_declines_what_does_not_fit() -> None:
    assert plan_passes(task(DEEP, 8448), H200) is None  # the general kernel is as good
    assert plan_passes(task((32, 129, 16), 65_536), H200) is None
    assert plan_passes(task((64, *(128,) * 7, 16), 65_536), H200) is None  # weights do not fit shared memory
    assert plan_passes(task((1, 1), 65_536), H200) is None  # nothing to divide
    assert plan_passes(task(DEEP, 65_536), A100) is None


def test_is_taken_where_gradients_do_not_fit_at_once() -> None:
    kernels = [make_plan(task(widths, 65_536), H200).kernel for widths in (DEEP, (32, 64, 64, 64, 64, 16))]
    assert kernels == ["passes", "narrow"]


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan_passes(task(DEEP, 65_536), H200)
    assert isinstance(found, PassesPlan)
    macros = found.macros()
    assert (macros["NARROW_PASSES"], macros["NARROW_TURNS"], macros["NARROW_SUMS"]) == ("{3,5},{2,3},{0,2}", "4", "88")
    assert macros["NARROW_ITEMS"].startswith("{3,0,1,0,0},{3,1,1,1,0},{4,0,0,0,68},{4,1,0,1,68},{2,0,1,0,0}")


def test_several_ranks_go_through_the_flat_gradient() -> None:
    alone, joined = (plan_passes(task(DEEP, 20_000, ranks=ranks), H200) for ranks in (1, 2))
    assert alone is not None
    assert joined is not None
    assert (alone.direct, joined.direct) == (True, False)


def test_lamb_finds_room_for_what_it_keeps() -> None:
    """The plan leaves what the kernel declares beside: 16 bytes a layer and some that do not depend on the layers."""
    for widths in (DEEP, (16, 100, 100, 100, 3)):
        found = plan_passes(replace(task(widths, 65536), needs_norm=True), H200)
        assert found is not None
        assert H200.shared_bytes - found.shared_bytes >= 384 + 16 * (len(widths) - 1)
        assert found.macros()["MAX_UPDATE_LAYERS"] == str(len(widths) - 1)
