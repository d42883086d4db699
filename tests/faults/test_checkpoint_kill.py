"""Killed while saving, again and again: every resume finds a complete checkpoint, the end is the same (E01)."""

from __future__ import annotations

import pytest

from tests.faults.killing import kill_again_and_again
from tests.faults.problem import record


@pytest.mark.parametrize(("ranks", "kills"), [(0, 8), (3, 4)])
def test_every_kill_leaves_a_complete_checkpoint(tmp_path, ranks, kills):
    kill_again_and_again(tmp_path, ranks, kills)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "kills"), [(0, 120), (3, 80)])
def test_two_hundred_kills(tmp_path, ranks, kills):
    steps = kill_again_and_again(tmp_path, ranks, kills)
    record(f"kills-{max(ranks, 1)}-ranks", kills=kills, resumes=kills, steps=steps, same_weights=True)
