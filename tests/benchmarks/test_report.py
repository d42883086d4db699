"""What is made from benchmark results, and the random problems: the programs' pure parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from accuracy_ranks import off
from feed_report import feed_table
from feed_report import summary as feed_summary
from ranks import TRANSPORTS, ranks_record, with_alone
from ranks_report import efficiencies, learnt_table, ranks_of, ranks_table, verdict
from report import accuracy_table, ahead, summary, table
from shapes import MOST_US, draw_shapes
from step import disagreements, make_record

from distmlp.tools.bench import PRESETS, find_preset

RESULTS = Path(__file__).parent / "results"


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


def ranks_lines(us: dict[str, float]) -> list[dict]:
    return [
        line("seed-1024", f"distmlp-{name}" if name in TRANSPORTS else name, value) | {"transport": name}
        for name, value in us.items()
    ]


def test_several_gpus_are_told_beside_one() -> None:
    """Every transport, what `peer` adds, efficiencies, JAX's, and what was not measured."""
    together = ranks_lines({"peer": 125.0, "nccl": 250.0, "staged": 500.0, "jax-scan": 300.0, "torch-ddp": 900.0})
    alone = [line("seed-1024", "distmlp", 100.0), line("seed-1024", "jax-scan", 150.0)]
    record = ranks_record(together, alone, [PRESETS["seed-1024"]], 2)
    text = ranks_table(record)
    row = "| seed-1024 | 1,024 | 100 | **125** | 250 | – | 500 | 25.0 | **80%** | 150 | 300 | 50% | 900 |"
    assert row in text
    assert record["missing"] == ["seed-1024: mpi was not measured"]
    assert record["learning"] == []
    assert "scales better than JAX in 1 of 1 rows" in text
    assert sorted(row["ranks"] for row in record["rows"]) == [1, 1, 2, 2, 2, 2, 2]


def test_losses_over_other_rows_are_not_compared() -> None:
    """With fewer batches a rank's share of the rows is another one; a call may add to what another one measured."""
    peer, nccl = ranks_lines({"peer": 125.0, "nccl": 250.0})
    fewer = nccl | {"batches": 3, "losses": [5.0]}

    def complaints(second: dict) -> list[str]:
        return ranks_record([peer | {"batches": 9}, second], [], [PRESETS["seed-1024"]], 2)["learning"]

    assert complaints(fewer) == []
    assert len(complaints(nccl | {"batches": 9, "losses": [5.0, 1.0]})) == 1


def test_several_gpus_are_told_without_one() -> None:
    record = ranks_record(ranks_lines({"peer": 125.0}), [], [PRESETS["seed-1024"]], 2)
    assert "| seed-1024 | 1,024 | – | **125** | – | – | – | – | **–** | – | – | – | – |" in ranks_table(record)
    assert verdict(record) == ""


def test_steps_on_one_gpu_may_come_from_another_file() -> None:
    presets = [PRESETS["seed-1024"]]
    record = ranks_record(ranks_lines({"peer": 125.0, "jax-scan": 300.0}), [], presets, 2, ("peer",))
    assert record["missing"] == ["seed-1024: distmlp was not measured (one GPU)"]
    single = make_record([line("seed-1024", "distmlp", 100.0), line("seed-1024", "torch-graph", 90.0)], presets, "bf16")
    both = with_alone(record, single)
    assert efficiencies(both)["seed-1024"]["peer"] == 0.8
    assert both["missing"] == []
    assert len(with_alone(both, single)["rows"]) == len(both["rows"]) == 3
    with pytest.raises(SystemExit, match="kernel_sha256 differs"):
        with_alone(record, {**single, "kernel_sha256": "other"})


def test_what_several_gpus_learn_is_told_and_compared_with_one() -> None:
    row = {"dataset": "fashion", "precision": "bf16", "ranks": 2, "accuracy": 0.8912, "validation_loss": 0.31}
    rows = [{**row, "transport": "none", "ranks": 1}, {**row, "transport": "peer"}]
    record = {"rows": rows, "device": "G", "driver": "1", "date": "2026-01-02T03"}
    assert "| fashion | peer | 2 | 0.8912 | 0.3100 |" in learnt_table(record)
    assert "| fashion | one rank | 1 |" in learnt_table(record)
    assert off(rows) == []
    rows += [{**row, "transport": "mpi", "accuracy": 0.88}, {"transport": "nccl", "failed": "no NCCL"}]
    assert off(rows) == ["nccl: no NCCL", "mpi: accuracy 0.8800, on one GPU 0.8912"]


def scaling_reports() -> dict[str, dict[tuple[str, str], dict]]:
    """By GPUxRANKS: (preset, transport) → what is committed under results/scaling."""
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for path in sorted((RESULTS / "scaling").glob("*x*-*/report.json")):
        group, _, rest = path.parent.name.partition("-")
        preset, _, transport = rest.rpartition("-")
        found.setdefault(group, {})[preset, transport] = json.loads(path.read_text())
    return found


def test_scaling_reports_agree_with_the_steps_of_the_same_kernels() -> None:
    """Weak efficiency through the command and through the engine, as far as both were measured."""
    for group, reports in scaling_reports().items():
        file = RESULTS / f"{group}-step.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        reached = efficiencies(record)
        for (preset, transport), report in reports.items():
            if report.get("kernel_sha256") != record["kernel_sha256"] or preset not in reached:
                continue
            points = [p for p in report["points"] if p["mode"] == "weak" and p["ranks"] == ranks_of(record)]
            for point in points:
                assert point["efficiency"] == pytest.approx(reached[preset][transport], abs=0.1), (preset, transport)


def test_the_overview_of_scaling_is_that_of_the_reports() -> None:
    readme = (RESULTS.parents[2] / "README.md").read_text(encoding="utf-8")
    for group, reports in scaling_reports().items():
        text = (RESULTS / f"{group}-scaling.md").read_text(encoding="utf-8")
        assert f"results/{group}-scaling.png" in readme
        for (preset, transport), report in reports.items():
            for point in report["points"]:
                if point["ranks"] > 1:
                    us = f"**{point['us_per_step_median']:,.0f}**"
                    row = next(
                        row for row in text.splitlines()
                        if row.startswith(f"| {preset} | [{transport}](") and f"| {point['mode']} |" in row
                    )  # fmt: skip
                    assert us in row or f"**{point['us_per_step_median']:.1f}**" in row
