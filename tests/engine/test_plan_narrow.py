"""The narrow plan: what fits, and that every weight's gradient has one place in some warpgroup's registers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.plan_narrow import CHUNK, MAX_WIDTH, NarrowPlan, plan_narrow
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
FITTING = [
    (32, 64, 64, 64, 64, 16),
    (1, 1),
    (3, 17, 100, 1),
    (128, 128, 1),
    (64,) * 6,
    (17, *(16,) * 7, 2),
    (100, 33, 128),
]


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, ranks: int = 1) -> NarrowPlan | None:
    network = Network.build(widths, "relu", "identity")
    return plan_narrow(Task(network, rows, "bf16", "mse", False, False, (), False, ranks), device)


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("rows", [1, 1000, 65536])
@pytest.mark.parametrize("widths", FITTING, ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int, device: Device) -> None:
    found = plan(widths, rows, device)
    if found is None:
        assert device == A100  # a large network may not fit the smaller shared memory
        return
    assert found.shared_bytes <= device.shared_bytes
    assert 1 <= found.blocks <= device.multiprocessors
    assert found.chains <= found.groups
    assert found.threads * found.sums <= 65536  # registers


@pytest.mark.parametrize("widths", FITTING, ids=str)
def test_every_gradient_has_one_place(widths: tuple[int, ...]) -> None:
    found = plan(widths, 65536)
    assert found is not None
    for group in range(found.groups):
        taken = sorted((i.offset, i.offset + i.floats) for i in found.items if i.group == group)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert not taken or taken[-1][1] <= found.sums
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        items = [item for item in found.items if item.layer == layer]
        rows, columns = (fan_out, fan_in) if items[0].out_major else (fan_in, fan_out)
        assert sorted(item.block for item in items) == list(range(-(-rows // 64)))
        assert all(8 * item.columns >= columns for item in items)
    assert found.chunks * CHUNK >= sum(i * o + o for i, o in pairwise(widths))
    assert found.partial_bytes == 2 * found.blocks * (found.chunks * CHUNK * 4 + 16)


@pytest.mark.parametrize(
    "widths", [(32, 128, 128, 128, 128, 16), (MAX_WIDTH + 1, 2), (784, 512, 10), (64,) * 9], ids=str
)
def test_leaves_what_does_not_fit_to_the_wide_regime(widths: tuple[int, ...]) -> None:
    assert plan(widths, 65536) is None


def test_small_batches_spread_over_more_blocks() -> None:
    small, large = plan(FITTING[0], 1024), plan(FITTING[0], 65536)
    assert small is not None
    assert large is not None
    assert (small.tile_rows, large.tile_rows) == (64, 128)
    assert large.blocks == 128  # four tiles each, none idle


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan((32, 64, 16), 1024)
    assert found is not None
    macros = found.macros()
    assert macros["WIDTHS"] == "32,64,16"
    assert macros["ACTIVATIONS"] == "RELU,IDENTITY"
    assert macros["NARROW_ITEMS"].count("{") == len(found.items)


def test_several_ranks_go_through_the_flat_gradient() -> None:
    alone, joined = (plan(FITTING[0], 1000, ranks=ranks) for ranks in (1, 2))
    assert alone is not None
    assert joined is not None
    assert (alone.direct, joined.direct) == (True, False)
    assert alone.peer_macros() is None


def test_ranks_of_a_host_sum_every_parameter_and_a_tally_a_block() -> None:
    joined = plan(FITTING[0], 1000, ranks=2)
    assert joined is not None
    assert joined.peer_words == joined.chunks * 128 + joined.blocks * 8
    macros = joined.peer_macros()
    assert macros is not None
    assert {name: macros[name] for name in macros.keys() - joined.macros().keys()} == {"NARROW_PEERS": "1"}
    assert (joined.macros()["NARROW_DIRECT"], macros["NARROW_DIRECT"]) == ("0", "1")
