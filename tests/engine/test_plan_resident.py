"""The resident plan: what fits, and that it asks for no more than there is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from distmlp.engine.optimizers import slot_names
from distmlp.engine.plan_resident import (
    MAX_ALL_TILES,
    MAX_OPERANDS,
    STATIC_BYTES,
    WARPS,
    ResidentPlan,
    Sharing,
    choose_patch,
    plan_resident,
    share_out,
)
from distmlp.engine.plan_task import Device, Task
from distmlp.network import Network

H200 = Device("H200", 90, 132, 232448, 1 << 37)
A100 = Device("A100", 80, 108, 166912, 1 << 36)
SEED = (100, 1000, 1000, 1000, 2)
FITTING = [
    (SEED, 32), ((784, 512, 512, 10), 128), ((1, 3, 1), 1), ((17, *(16,) * 7, 2), 64), ((64,) * 6 + (16,), 128),
    ((100, 1064, 2), 32), ((8, 16, 2), 100), ((64, 128, 1), 113), ((30, *(20,) * 14, 16), 48), ((500, 33, 700, 5), 17),
    ((784, 256, 10), 96),
]  # fmt: skip


def plan(widths: tuple[int, ...], rows: int, device: Device = H200, **changes: object) -> ResidentPlan | None:
    values = {
        "network": Network.build(widths, "relu", "identity"), "rows": rows, "precision": "bf16", "loss": "mse",
        "labels": False, "weights": False, "slots": slot_names("adam"), "ema": False, "ranks": 1, **changes,
    }  # fmt: skip
    return plan_resident(Task(**values), device)  # type: ignore[arg-type]


def depth(width: int) -> int:
    return -(-width // 16)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("widths", "rows"), FITTING[1:], ids=str)
def test_asks_for_no_more_than_there_is(widths: tuple[int, ...], rows: int, device: Device) -> None:
    found = plan(widths, rows, device)
    assert found is not None
    assert found.shared_bytes + STATIC_BYTES <= device.shared_bytes
    assert found.blocks <= device.multiprocessors  # they wait for each other
    assert found.buffers()[0].zeroed  # what nobody writes is multiplied


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("widths", "rows"), [(SEED, 32), ((784, 512, 512, 10), 128), ((1, 3, 1), 1)], ids=str)
def test_floats_fit_too(widths: tuple[int, ...], rows: int, precision: str) -> None:
    found, half = plan(widths, rows, precision=precision), plan(widths, rows)
    assert found is not None
    assert half is not None
    assert half.shared_bytes < found.shared_bytes + STATIC_BYTES <= H200.shared_bytes
    assert found.patches == half.patches
    assert found.exchange_bytes > 1.9 * half.exchange_bytes
    assert plan(widths, rows, precision=precision, ranks=2) is None  # ranks send each other bfloat16


@pytest.mark.parametrize(("widths", "rows"), FITTING, ids=str)
def test_all_work_has_a_place(widths: tuple[int, ...], rows: int) -> None:
    found = plan(widths, rows)
    assert found is not None
    sharing = found.sharing
    assert rows <= 16 * sharing.tiles < rows + 16 * sharing.group_tiles
    across = found.blocks // sharing.groups  # blocks of a group; those beyond them only own weights
    assert across * sharing.column_blocks >= depth(max(widths[1:-1]))
    for (fan_in, fan_out), (patch_in, patch_out) in zip(pairwise(widths), found.patches, strict=True):
        assert -(-depth(fan_in) // patch_in) * -(-depth(fan_out) // patch_out) <= found.blocks  # one a layer
    assert depth(widths[0]) * sharing.tiles <= found.blocks * WARPS  # every tile of the next batch has a warp
    assert 16 * sharing.column_blocks * (len(widths) - 2) + widths[-1] <= found.threads  # every bias has a thread


def test_state_of_all_weights_is_kept() -> None:
    """What a slot or an average more takes: four bytes for every parameter of the block's patches, and its biases."""
    plain, more, mean = (
        plan((784, 512, 512, 10), 128, slots=slots, ema=ema)
        for slots, ema in (((), False), (("momentum",), False), ((), True))
    )
    assert plain is not None
    assert more is not None
    assert mean is not None
    biases = 2 * 16 * plain.sharing.column_blocks + 10
    added = 4 * (sum(256 * i * o for i, o in plain.patches) + biases)
    assert more.shared_bytes - plain.shared_bytes == mean.shared_bytes - plain.shared_bytes == added
    assert (more.mean, mean.mean) == (False, True)
    assert more.exchange_bytes == plain.exchange_bytes


@pytest.mark.parametrize(
    ("widths", "rows", "changes"),
    [
        (SEED, 129, {}), ((100, 1000, 17), 32, {}), ((10, 2), 32, {}), ((3000, 8, 1), 32, {}), ((100, 2000, 2), 32, {}),
        ((30, *(20,) * 16, 2), 48, {}), (SEED, 32, {"ema": True}), (SEED, 32, {"ranks": 4}), (SEED, 65, {"ranks": 2}),
        (SEED, 32, {"needs_norm": True}), (SEED, 64, {"precision": "tf32"}), (SEED, 64, {"precision": "fp32"}),
        (SEED, 32, {"device": Device("T4", 75, 132, 232448, 1 << 34)}),
    ],
    ids=str,
)  # fmt: skip
def test_leaves_the_rest_to_others(widths: tuple[int, ...], rows: int, changes: dict) -> None:
    assert plan(widths, rows, **changes) is None


def test_ranks_of_a_host_send_what_gradients_are_made_of() -> None:
    alone, several = plan(SEED, 32), plan(SEED, 32, ranks=2)
    assert alone is not None
    assert several is not None
    assert alone.peer_macros() is None
    assert several.peers_only
    macros = several.peer_macros()
    assert macros is not None
    assert macros["RESIDENT_RANKS"] == "2"
    features = 112 + 3 * 1008 + 3 * 1008 + 16
    assert several.sent_bytes == 32 * 2 * features + 2 * 4 * (3 * 1008 + 16) + 8 * 130
    assert several.peer_words % 4 == 0  # inboxes are of vectors
    assert several.shared_bytes + STATIC_BYTES <= H200.shared_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_of_all_ranks_are_bounded(ranks: int) -> None:
    found = plan((64, 128, 1), 256 // ranks, ranks=ranks)
    assert found is not None
    assert found.sharing.tiles * ranks <= MAX_ALL_TILES
    assert plan((64, 128, 1), 256 // ranks + 1, ranks=ranks) is None


def test_fewer_slots_fit_where_more_do_not() -> None:
    assert plan(SEED, 32, A100) is None
    assert plan(SEED, 32, A100, slots=()) is not None
    assert plan(SEED, 32, A100, slots=(), ema=True) is None
    assert plan((100, 800, 800, 800, 2), 32, A100, slots=(), ema=True) is not None


@pytest.mark.parametrize(
    ("widths", "rows", "multiprocessors"),
    [
        (SEED, 1, 132), (SEED, 32, 108), (SEED, 128, 132), ((784, 512, 512, 10), 128, 132), ((2, 3, 1), 128, 16),
        ((16, 300, 2), 64, 40),
    ],
    ids=str,
)  # fmt: skip
def test_sharing(widths: tuple[int, ...], rows: int, multiprocessors: int) -> None:
    sharing = share_out(widths, rows, multiprocessors)
    assert sharing is not None
    assert sharing.blocks <= multiprocessors
    assert sharing.blocks == sharing.groups * -(-depth(max(widths[1:-1])) // sharing.column_blocks)
    turns = -(-max(map(depth, widths[:-1])) // WARPS)
    assert 4 * turns * (sharing.group_tiles + sharing.column_blocks) < MAX_OPERANDS[2]


def test_no_sharing_for_fewer_multiprocessors() -> None:
    """More columns a block would need more registers for its operands."""
    assert share_out(SEED, 128, 132) == Sharing(groups=4, group_tiles=2, column_blocks=2, blocks=128)
    assert share_out(SEED, 128, 127) is None


@pytest.mark.parametrize("blocks", [1, 104, 132])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 63), (63, 63), (49, 32), (32, 1), (188, 1)])
def test_patches_cover_a_matrix(inputs: int, outputs: int, blocks: int) -> None:
    across, down = choose_patch(inputs, outputs, blocks)
    assert 1 <= across <= inputs
    assert 1 <= down <= outputs
    assert -(-inputs // across) * -(-outputs // down) <= blocks


def test_macros_are_what_the_kernel_reads() -> None:
    found = plan(SEED, 32, raw_type="u1")
    assert found is not None
    macros = found.macros()
    assert (macros["WIDTHS"], macros["ACTIVATIONS"]) == ("100,1000,1000,1000,2", "RELU,RELU,RELU,IDENTITY")
    assert (macros["RESIDENT_PATCH_IN"], macros["RESIDENT_PATCH_OUT"]) == ("2,8,8,1", "2,4,4,1")
    assert (macros["RESIDENT_GROUPS"], macros["RESIDENT_GROUP_TILES"], macros["RESIDENT_COLUMN_BLOCKS"]) == (
        "2", "1", "1",
    )  # fmt: skip
    assert (macros["RAW_TYPE"], macros["RESIDENT_MEAN"], macros["RESIDENT_BLOCKS"]) == ("RAW_U8", "0", "128")
    assert int(macros["RESIDENT_EXCHANGE_BYTES"]) == found.buffers()[0].size_bytes
