"""GPUs of ranks, from what each rank sees: all shapes that schedulers and users make of it."""

from __future__ import annotations

import pytest

from distmlp.comm.binding import Gpu, bind, choose_gpus, seat_ranks, shared_gpus, table
from distmlp.comm.world import World
from distmlp.errors import AgreedError

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


@pytest.mark.parametrize(
    ("visible", "ordinals", "uuids"),
    [
        pytest.param([[A, B, C, D]] * 4, [0, 1, 2, 3], [A, B, C, D], id="all see all"),
        pytest.param([[B, A]] * 2, [0, 1], [B, A], id="CUDA_VISIBLE_DEVICES=1,0"),
        pytest.param([[A], [B], [C], [D]], [0, 0, 0, 0], [A, B, C, D], id="one per task"),
        pytest.param([[A, B], [B, A]], [0, 0], [A, B], id="each lists its own first"),
        pytest.param([[A, B], [C, D]], [0, 1], [A, D], id="two per task"),
        pytest.param([[A, B], [A]], [1, 0], [B, A], id="the one with a choice gives way"),
        pytest.param([[A, B, C, D]] * 2, [0, 1], [A, B], id="fewer ranks than GPUs"),
        pytest.param([[A]] * 2, [0, 0], [A, A], id="two ranks, one GPU"),
        pytest.param([[A, B]] * 4, [0, 1, 0, 1], [A, B, A, B], id="four ranks, two GPUs"),
        pytest.param([[C]], [0], [C], id="single rank"),
    ],
)
def test_ranks_of_one_host(visible, ordinals, uuids):
    chosen = choose_gpus(visible)
    assert chosen == ordinals
    assert [seen[ordinal] for seen, ordinal in zip(visible, chosen, strict=True)] == uuids


def seats(*ranks: tuple[str, str | None, list[str]]):
    return seat_ranks([(host, host, seen, [Gpu("H200", uuid) for uuid in gpus]) for host, seen, gpus in ranks])


def test_hosts_are_apart_however_ranks_are_dealt_out():
    dealt = seats(("a", None, [A, B]), ("b", None, [C, D]), ("a", None, [A, B]), ("b", None, [C, D]))
    assert [seat.gpu.uuid for seat in dealt] == [A, C, B, D]
    assert shared_gpus(dealt) == ""


def test_sharing_names_host_ranks_and_gpus():
    crowd = seats(("a", None, [A]), ("a", None, [A]), ("b", "0", [B]))
    assert shared_gpus(crowd) == f"2 ranks on host a, 1 GPU ({A})"
    assert shared_gpus(seats(*[("a", None, [A, B])] * 4)) == f"4 ranks on host a, 2 GPUs ({A}, {B})"


def test_rank_without_a_gpu_is_named():
    with pytest.raises(AgreedError, match=r"visible to rank 1 on host b \(CUDA_VISIBLE_DEVICES ''\)") as caught:
        seats(("a", None, [A]), ("b", "", []))
    assert caught.value.exit_code == 4


def test_table_shows_what_was_chosen():
    lines = table(seats(("a", "1,0", [B, A]), ("a", "1,0", [B, A]))).splitlines()
    assert lines[0].split() == ["rank", "host", "CUDA_VISIBLE_DEVICES", "ordinal", "GPU", "UUID"]
    assert lines[2].split() == ["1", "a", "'1,0'", "1", "H200", A]
    assert "not set" in table(seats(("a", None, [A])))


@pytest.mark.parametrize("share", [False, True])
def test_sharing_is_refused_unless_asked_for(monkeypatch, share):
    world = World()
    crowd = [("host", None, [Gpu("H200", A)]), ("host", None, [Gpu("H200", A)])]
    monkeypatch.setattr(world, "all_gather", lambda value: crowd)
    monkeypatch.setattr(world, "rank_hosts", ("h", "h"))
    if share:
        binding = bind(world, share_gpu=True)
        assert (binding.ordinal, binding.shared, binding.warning) == (0, True, f"2 ranks on host h, 1 GPU ({A})")
    else:
        with pytest.raises(AgreedError, match=r"2 ranks on host h, 1 GPU \(GPU-a\): .*run\.share_gpu=true") as caught:
            bind(world, share_gpu=False)
        assert caught.value.exit_code == 4
