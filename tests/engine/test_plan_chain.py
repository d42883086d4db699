"""The chain's plan: what fits, and that it asks for no more than there is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.plan_chain import PANEL, STATIC_BYTES, ChainPlan, plan_chain, rows_of_block
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
MID = (256,) * 6


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, **changes: object) -> ChainPlan | None:
    values = {
        "network": Network.build(widths, "relu", "identity"), "rows": rows, "precision": "bf16", "loss": "mse",
        "labels": False, "weights": False, "slots": (), "ema": False, "ranks": 1, **changes,
    }  # fmt: skip
    return plan_chain(Task(**values), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1000, 2113, 4096, 8448])
@pytest.mark.parametrize("widths", [MID, (1, 129, 1), (300, 65, 130), (16, *(192,) * 8, 2), (512, 512)], ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int) -> None:
    found = plan(widths, rows)
    assert found is not None
    assert found.shared_bytes + STATIC_BYTES <= H200.shared_bytes
    assert found.blocks <= H200.multiprocessors
    assert found.blocks * found.rows >= rows
    assert found.depth * PANEL >= rows
    assert found.tiles * found.splits <= max(found.tiles, found.blocks // 2)  # parts of a tile wait for each other
    sizes = {buffer.name: buffer.size_bytes for buffer in found.buffers()}
    assert sizes["chain_pieces"] >= 2 * sum(i * o + rows * (i + o) for i, o in pairwise(widths))


@pytest.mark.parametrize(
    ("widths", "rows", "changes"),
    [
        (MID, 999, {}), (MID, 8449, {}), ((100, 128, 100), 4096, {}), ((256, 2000, 256), 4096, {}),
        (MID, 4096, {"precision": "tf32"}), (MID, 4096, {"device": A100}),
        ((256, 256, 257), 4096, {"loss": "softmax_cross_entropy"}),
    ],
    ids=str,
)  # fmt: skip
def test_leaves_the_rest_to_others(widths: tuple[int, ...], rows: int, changes: dict) -> None:
    assert plan(widths, rows, **changes) is None


def test_ranks_of_a_host_sum_every_pair_of_weights_and_a_tally_a_block() -> None:
    alone, several = plan(MID, 4096), plan(MID, 4096, ranks=2)
    assert alone is not None
    assert several is not None
    assert alone.peer_macros() is None
    assert several.peer_macros() == {"CHAIN_PEERS": "1", "CHAIN_BLOCKS": "132"}
    assert several.macros() == alone.macros()
    assert several.peer_words == 5 * 256 * 256 + 5 * 256 + 132 * 8
    assert several.peer_words % 4 == 0  # inboxes are of vectors


@pytest.mark.parametrize(("rows", "each"), [(1000, 16), (2112, 16), (2113, 32), (4224, 32), (4225, 64), (8448, 64)])
def test_rows_of_a_block(rows: int, each: int) -> None:
    assert rows_of_block(rows, 132) == each


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan(MID, 4096)
    assert found is not None
    macros = found.macros()
    assert (macros["CHAIN_ROWS"], macros["CHAIN_DEPTH"], macros["CHAIN_TILES"], macros["CHAIN_SPLITS"]) == (
        "32", "64", "10", "6",
    )  # fmt: skip
