"""`distmlp bench`: limits as published, a preset timed for real on whatever is here, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from distmlp.engine.device import find_obstacle
from distmlp.errors import ConfigError, SystemUnfitError
from distmlp.tools.bench import PRESETS, find_preset, make_rows, run_bench, shorten, summary

# µs; PERFORMANCE figures for one H200
LIMITS = {
    "seed-32": 11.8, "seed-1024": 16.1, "mnist-128": 3.8, "mnist-1024": 4.5, "narrow64-64k": 7.3,
    "narrow128-64k": 26.8, "mid256-4k": 9.5, "mid512-16k": 152, "mid1024-8k": 304, "wide4096-8k": 3827,
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limit(name: str) -> None:
    assert PRESETS[name].limit_us == pytest.approx(LIMITS[name], rel=0.01)


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="narrow64-1k"):
        run_bench("narrow", False)


def test_a_network_of_ones_own_is_named_by_widths_and_batch() -> None:
    preset = find_preset("784-512x2-10@1024")
    assert (preset.layers, preset.batch) == ((784, 512, 512, 10), 1024)
    assert find_preset("784-512×2-10@1024").layers == preset.layers
    assert find_preset("mnist-1024").limit_us == preset.limit_us
    for wrong in ("784@64", "784-0-10@64", "784-10@0", "784-10", "-784-10@1", "784-10x@1", "784-10@"):
        with pytest.raises(ConfigError, match="WIDTHS@BATCH"):
            find_preset(wrong)


def test_times_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench("narrow64-1k", True) == 0
    answer = json.loads(capsys.readouterr().out)
    (row,) = answer["rows"]
    assert answer["engine"] == ("reference" if find_obstacle() else "fused")
    assert row["preset"] == "narrow64-1k"
    assert row["layers"] == [32, 64, 64, 64, 64, 16]
    assert row["blocks"] == 5
    assert 0 < row["us_min"] <= row["us_median"] <= row["us_max"]


def test_rows_that_do_not_fit_are_refused_with_figures() -> None:
    with pytest.raises(SystemUnfitError, match=r"bench 3-2@900000000: its rows need 288,000,000,000 bytes, and"):
        make_rows(find_preset("3-2@900000000"), 8)


def test_rows_repeat_a_pool_and_are_never_zero() -> None:
    rows = make_rows(PRESETS["mnist-128"], 3)
    assert rows.inputs.shape == (384, 784)
    assert rows.targets.shape == (384, 10)
    assert np.std(rows.inputs) == pytest.approx(1, abs=0.02)
    assert np.abs(rows.targets).min() > 0


def test_summary_and_short_widths() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"us_median": 2.0, "us_min": 1.0, "us_max": 3.0, "blocks": 3}
    assert shorten((32, 64, 64, 16)) == "32-64×2-16"
