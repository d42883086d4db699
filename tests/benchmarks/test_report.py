"""What is made from benchmark results, and the random problems: the programs' pure parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from feed_report import feed_table
from feed_report import summary as feed_summary
from report import accuracy_table, ahead, summary, table
from shapes import MOST_US, draw_shapes
from step import disagreements, make_record

from distmlp.tools.bench import PRESETS, find_preset


def line(preset: str, subject: str, us: float, loss: float = 1.0) -> dict:
    return {
        "preset": preset, "subject": subject, "us_median": us, "us_min": us, "us_max": us, "blocks": 7,
        "losses": [2.0, loss],
    }  # fmt: skip


def test_who_is_ahead_is_said_and_no_loss_is_rounded_to_a_draw() -> None:
    assert ahead(10.0, {"torch": 54.0, "jax": 61.0}) == "**5.4×**"
    assert ahead(100.0, {"jax": 101.0}) == "**1.01×**"
    assert ahead(100.0, {"torch": 120.0, "jax": 97.0}) == "0.97×, JAX ahead"
    assert ahead(100.0, {}) == "–"


def test_the_table_says_what_was_measured() -> None:
    lines = [line("seed-32", "distmlp", 50.0), line("seed-32", "torch-graph", 90.0), line("mnist-128", "distmlp", 40.0)]
    text = table(make_record(lines, [PRESETS["seed-32"], PRESETS["mnist-128"]], "bf16"))
    assert "| seed-32 | 100-1000×3-2 | 32 | **50.0** (50.0–50.0) | 90.0 | – | 11.8 | **1.80×** |" in text
    assert "| mnist-128 | 784-512×2-10 | 128 | **40.0** (40.0–40.0) | – | – |" in text
    assert "not measured in this run: JAX" in text
    plain = table(make_record(lines, [PRESETS["seed-32"], PRESETS["mnist-128"]], "tf32"))
    assert "limit" not in plain
    assert "tf32 products" in plain


def test_a_subject_that_learns_something_else_is_named() -> None:
    losses = {("seed-32", "distmlp"): [2.0, 1.0], ("seed-32", "jax-scan"): [2.0, 1.02]}
    assert disagreements(losses) == []
    losses["seed-32", "torch-graph"] = [2.0, 1.2]
    assert disagreements(losses) == ["seed-32 torch-graph: loss 1.2 at step 1, distmlp 1"]


def test_random_problems_are_the_same_for_a_seed_and_of_all_kinds() -> None:
    shapes = draw_shapes(30, 0)
    assert shapes == draw_shapes(30, 0)
    assert shapes != draw_shapes(30, 1)
    assert all(find_preset(shape.name).layers == shape.layers and shape.limit_us <= MOST_US for shape in shapes)
    assert len({len(shape.layers) for shape in shapes}) > 4
    assert any(shape.batch < 100 for shape in shapes)
    assert any(shape.batch > 10_000 for shape in shapes)


@pytest.mark.parametrize(("jax", "words"), [(120.0, "ahead in all"), (80.0, "JAX is ahead in 1: 8-16-4@64")])
def test_random_problems_are_summed_up(jax: float, words: str) -> None:
    lines = [line("8-16-4@64", "distmlp", 100.0), line("8-16-4@64", "jax-scan", jax)]
    assert words in summary(make_record(lines, [find_preset("8-16-4@64")], "bf16"), "h200-shapes")


def test_accuracies_are_told_for_every_run() -> None:
    row = {"dataset": "digits", "engine": "fused", "precision": "bf16", "accuracy": 0.97, "validation_loss": 0.1}
    record = {"rows": [{**row, "samples_per_second": 1234567}], "device": "G", "driver": "1", "date": "2026-01-02T03"}
    assert "| digits | fused | bf16 | 0.9700 | 0.1000 | 1,234,567 |" in accuracy_table(record)


def test_the_feed_is_told_in_tables_and_a_sentence() -> None:
    rates = {"layout": "contiguous, 784 columns", "h5py": 3.0, "resident": 21.0, "streamed": 25.0}
    network = {
        "layers": [784, 64, 1], "batch": 8192, "needs_gigabytes_per_second": 9.0, "device_samples_per_second": 3000000,
        "stream_samples_per_second": 2970000, "streamed_of_resident": 0.99, "wait_share": 0.004,
    }  # fmt: skip
    fast = {**network, "needs_gigabytes_per_second": 40.0, "streamed_of_resident": 0.5}
    record = {
        "device": "GPU", "driver": 1, "cores": 16, "readers": 16, "date": "2026-11-30",
        "rates": [{**rates, "streamed_shuffled": 22.0}], "training": [network, fast],
        "larger": {
            "data_bytes": 400e9, "files": 1000, "gpu_free_bytes": 140e9, "host_free_bytes": 200e9, "gpu_bytes": 3e9,
            "rss_bytes": [2e9, 2.01e9], "rss_peak_bytes": 2.5e9, "rows_trained": 20e6, "samples_per_second": 3000000,
            "layers": [784, 64, 1],
        },
        "loader": {"workers": 16, "torch": "2.11", "rows": 100000, "slices": 1000000},
    }  # fmt: skip
    text = feed_table(record)
    assert "| contiguous, 784 columns | 3.00 | 21.00 | 25.00 | 22.00 | 0.88 |" in text
    assert "| 784-64-1 | 8192 | 9.0 | 3,000,000 | 2,970,000 | 99.0% | 0.4% |" in text
    assert "340 GB free" in text
    assert "has 2.01 GB (after a fifth of them 2.00; most at any time 2.50)" in text
    assert "0.31 GB/s shuffled row by row, 3.14 GB/s by whole batches" in text
    assert "train at 99.0% or more" in feed_summary(record)  # the fast one needs more than the files give
