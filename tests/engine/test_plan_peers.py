"""Which way large gradients take between the GPUs of a host."""

from __future__ import annotations

import pytest

from distmlp.engine.plan_peers import EVERYBODY, PAIR, SCATTER, peer_form, sent_bytes


@pytest.mark.parametrize(
    ("ranks", "size_bytes", "form"),
    [
        (1, 1 << 30, PAIR),
        (2, 1 << 30, PAIR),
        (3, 4 << 10, EVERYBODY),
        (4, 64 << 10, EVERYBODY),
        (4, 8 << 20, SCATTER),
        (8, 64 << 10, EVERYBODY),
        (8, 1 << 20, SCATTER),
    ],
)
def test_form(ranks, size_bytes, form):
    assert peer_form(ranks, size_bytes) == form


def test_more_ranks_or_bytes_never_lead_back_to_everybody():
    for ranks in range(3, 9):
        forms = [peer_form(ranks, 1 << power) for power in range(8, 31)]
        assert forms == sorted(forms)
        assert peer_form(ranks, 1 << 30) == SCATTER
    for power in range(8, 31):
        forms = [peer_form(ranks, 1 << power) for ranks in range(3, 9)]
        assert forms == sorted(forms)


def test_bytes():
    assert [sent_bytes(EVERYBODY, ranks, 12) for ranks in (2, 3, 4)] == [12, 24, 36]
    assert [sent_bytes(SCATTER, ranks, 12) for ranks in (2, 3, 4)] == [12, 16, 18]
