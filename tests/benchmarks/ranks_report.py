"""Table and chart of what ranks.py measured: a step on one GPU and on several, by every transport and by JAX."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

TRANSPORTS = ("peer", "nccl", "mpi", "staged")
COLOURS = ("#1b6ca8", "#56a0d3", "#9fc9e8", "#cfd8dc", "#6a9f4b")
WORTH_US = 100  # of a step: where efficiency is more than latency


def step(record: dict[str, Any], preset: str, subject: str, ranks: int, transport: str = "") -> dict[str, Any] | None:
    """The row with the least median, None without one. `transport` "": any."""
    rows = [
        row for row in record["rows"]
        if (row["preset"], row["ranks"]) == (preset, ranks) and row["subject"].startswith(subject)
        and transport in ("", row.get("transport"))
    ]  # fmt: skip
    return min(rows, key=lambda row: row["us_median"], default=None)


def efficiency(alone: dict[str, Any] | None, together: dict[str, Any] | None) -> float:
    """Weak: a step of one GPU over that of several, each with the same batch. NaN where one was not measured."""
    return alone["us_median"] / together["us_median"] if alone and together else math.nan


def presets_of(record: dict[str, Any]) -> list[str]:
    """Those of which there is anything of ours on several GPUs."""
    found = dict.fromkeys(row["preset"] for row in record["rows"])
    return [name for name in found if step(record, name, "distmlp", ranks_of(record))]


def ranks_of(record: dict[str, Any]) -> int:
    return max(row["ranks"] for row in record["rows"])


def efficiencies(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Preset → weak efficiency by every transport, the best of them (`distmlp`) and JAX's (`jax`)."""
    ranks, found = ranks_of(record), {}
    for name in presets_of(record):
        alone = step(record, name, "distmlp", 1)
        found[name] = {t: efficiency(alone, step(record, name, "distmlp", ranks, t)) for t in TRANSPORTS}
        found[name]["distmlp"] = efficiency(alone, step(record, name, "distmlp", ranks))
        found[name]["jax"] = efficiency(step(record, name, "jax", 1), step(record, name, "jax", ranks))
    return found


def ranks_table(record: dict[str, Any]) -> str:
    """Markdown: medians in µs a step, what `peer` adds, and weak efficiencies."""
    ranks, reached = ranks_of(record), efficiencies(record)
    lines = [
        f"| preset | batch a GPU | one GPU | {' | '.join(TRANSPORTS)} | `peer` adds | efficiency | JAX, one GPU | JAX "
        "| JAX's efficiency | PyTorch DDP |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name in presets_of(record):
        alone, jax = step(record, name, "distmlp", 1), step(record, name, "jax", 1)
        own = {transport: step(record, name, "distmlp", ranks, transport) for transport in TRANSPORTS}
        best = step(record, name, "distmlp", ranks)
        cells = [name, f"{next(row['batch'] for row in record['rows'] if row['preset'] == name):,}", us(alone)]
        cells += [f"**{us(row)}**" if row and row is best else us(row) for row in own.values()]
        peer = own["peer"]
        cells.append(f"{peer['us_median'] - alone['us_median']:.1f}" if peer and alone else "–")
        cells.append(f"**{percent(reached[name]['distmlp'])}**")
        cells += [us(jax), us(step(record, name, "jax", ranks)), percent(reached[name]["jax"])]
        cells.append(us(step(record, name, "torch", ranks)))
        lines.append(f"| {' | '.join(cells)} |")
    row = next(row for row in record["rows"] if row["ranks"] == ranks)
    versions = record["versions"]
    lines += [
        "",
        f"µs a training step on {ranks} × {record['device']} (driver {record['driver']}), {record['date'][:10]}; "
        f"{row['precision']} products, Adam, the batch of one GPU on each, rows resident. Efficiency: the step on one "
        f"GPU over that on {ranks}, by the fastest transport; JAX ({versions.get('jax', '?')}): a sharded `jit` of a "
        f"`lax.scan`; PyTorch ({versions.get('torch', '?')}): DistributedDataParallel, eager.",
    ]
    if sentence := verdict(record):
        lines += ["", sentence]
    if record["learning"]:
        lines += ["", f"Not the same loss after the learning check: {'; '.join(record['learning'])}."]
    return "\n".join(lines)


def verdict(record: dict[str, Any]) -> str:
    """How the best transport scales beside JAX, and where a step takes long."""
    both = {n: e for n, e in efficiencies(record).items() if not math.isnan(e["jax"] + e["distmlp"])}
    if not both:
        return ""
    behind = [name for name, e in both.items() if e["distmlp"] < e["jax"]]
    text = f"distmlp scales better than JAX in {len(both) - len(behind)} of {len(both)} rows"
    if behind:
        text += f" (not in {', '.join(behind)})"
    long = {n: e["distmlp"] for n, e in both.items() if (step(record, n, "distmlp", 1) or {})["us_median"] > WORTH_US}
    if long:
        good = [name for name, value in long.items() if value >= 0.9]
        text += f"; of {len(long)} whose step takes over {WORTH_US} µs, {len(good)} reach 90 %"
        text += f" ({', '.join(good)})" if 0 < len(good) < len(long) else ""
    return text + "."


def learnt_table(record: dict[str, Any]) -> str:
    """Markdown: what accuracy_ranks.py found, a row for every transport."""
    lines = ["| data set | transport | GPUs | accuracy | loss |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        transport = "one rank" if row["transport"] == "none" else row["transport"]
        cells = [row["dataset"], transport, row["ranks"], f"{row['accuracy']:.4f}", f"{row['validation_loss']:.4f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    words = f"Of the test rows, after the epochs of the TOML file; {record['rows'][0]['precision']} products"
    return "\n".join([*lines, "", f"{words}; {record['device']} (driver {record['driver']}), {record['date'][:10]}."])


def us(row: dict[str, Any] | None) -> str:
    value = row["us_median"] if row else math.nan
    return "–" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def ranks_chart(record: dict[str, Any], path: Path) -> None:
    """Bars of weak efficiency by every transport and by JAX, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distmlp"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    reached, labels = efficiencies(record), [*TRANSPORTS, "jax"]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    for place, (label, colour) in enumerate(zip(labels, COLOURS, strict=True)):
        positions = [i + (place - 2) * 0.17 for i in range(len(reached))]
        name = "JAX" if label == "jax" else f"distmlp, {label}"
        axes.bar(positions, [values[label] for values in reached.values()], 0.16, label=name, color=colour)
    axes.axhline(1.0, color="#555555", linestyle="--", linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("weak-scaling efficiency")
    axes.set_xticks(range(len(reached)), list(reached), rotation=30, ha="right")
    axes.set_title(f"{ranks_of(record)} × {record['device']}, bf16, Adam: higher is better")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=5, fontsize=8)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
    plt.close(figure)
