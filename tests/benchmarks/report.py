"""Table and chart from a results file: `python tests/benchmarks/report.py results/h200-step.json [README.md]`.

Writes FILE.md, FILE.svg and FILE.png beside the results; a README is changed between the lines
`<!-- FILE -->` and `<!-- /FILE -->`, where FILE is the name without ending.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from distmlp.tools.bench import PRESETS, shorten

PEERS = {"torch": ("torch-graph", "torch-compiled-graph"), "jax": ("jax-scan",)}
HOW = {"torch": "PyTorch: the better of a CUDA graph and a compiled one", "jax": "JAX: `jit` of a `lax.scan`"}
COLOURS = {"limit": "#bbbbbb", "distmlp": "#1b6ca8", "torch": "#d9822b", "jax": "#6a9f4b"}


def best(record: dict[str, Any], preset: str, subjects: tuple[str, ...]) -> dict[str, Any] | None:
    """The row with the least median among `subjects`."""
    rows = [row for row in record["rows"] if row["preset"] == preset and row["subject"] in subjects]
    return min(rows, key=lambda row: row["us_median"], default=None)


def table(record: dict[str, Any]) -> str:
    """Markdown: medians in µs a step, the spread of distmlp's blocks, and how far the best peer is behind."""
    lines = [
        "| preset | layers | batch | distmlp (min–max) | PyTorch | JAX | limit | best peer ÷ ours | ours ÷ limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in PRESETS:
        own = best(record, name, ("distmlp",))
        if own is None:
            continue
        peers = [best(record, name, subjects) for subjects in PEERS.values()]
        times = [row["us_median"] for row in peers if row]
        cells = [show(row["us_median"]) if row else "–" for row in peers]
        limit = PRESETS[name].limit_us
        ratio = f"{min(times) / own['us_median']:.1f}×" if times else "–"
        lines.append(
            f"| {name} | {shorten(PRESETS[name].layers)} | {PRESETS[name].batch} "
            f"| **{show(own['us_median'])}** ({show(own['us_min'])}–{show(own['us_max'])}) | {' | '.join(cells)} "
            f"| {show(limit)} | {ratio} | {own['us_median'] / limit:.2f} |"
        )
    measured = {row["subject"] for row in record["rows"]}
    peers = [f"{how} ({record['versions'].get(package, '?')})" for package, how in HOW.items()
             if measured & set(PEERS[package])]  # fmt: skip
    absent = [package for package in PEERS if not measured & set(PEERS[package])]
    lines += [
        "",
        f"µs a training step on one {record['device']} (driver {record['driver']}), {record['date'][:10]}; bf16 "
        "products, float32 master weights, Adam, mean squared error, rows resident on the GPU. "
        + "; ".join(peers)
        + (f"; not measured in this run: {', '.join(absent)}" if absent else "")
        + ". limit: operations ÷ 790 TFLOP/s or bytes ÷ 4.3 TB/s, the larger.",
    ]
    return "\n".join(lines)


def show(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def chart(record: dict[str, Any], path: Path) -> None:
    """Bars of µs a step on a logarithmic scale, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distmlp"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    names = [name for name in PRESETS if best(record, name, ("distmlp",))]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    series = {"limit": None, "distmlp": ("distmlp",), **PEERS}
    for place, (label, subjects) in enumerate(series.items()):
        if subjects and not any(best(record, name, subjects) for name in names):
            continue
        heights = []
        for name in names:
            row = best(record, name, subjects) if subjects else None
            heights.append(PRESETS[name].limit_us if subjects is None else row["us_median"] if row else float("nan"))
        positions = [i + (place - 1.5) * 0.2 for i in range(len(names))]
        axes.bar(positions, heights, 0.19, label=label, color=COLOURS[label])
    axes.set_yscale("log")
    axes.set_ylabel("µs a training step")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_title(f"{record['device']}, bf16, Adam: lower is better")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
    plt.close(figure)


def put_into(readme: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of `name`."""
    old = readme.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    new, count = pattern.subn(lambda match: match[1] + text + "\n" + match[2], old)
    if not count:
        raise SystemExit(f"{readme}: no lines <!-- {name} --> and <!-- /{name} -->")
    readme.write_text(new, encoding="utf-8")


def main(arguments: list[str]) -> None:
    path = Path(arguments[0])
    record = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(record) + "\n")
    chart(record, path)
    for readme in arguments[1:]:
        put_into(Path(readme), path.stem, table(record))


if __name__ == "__main__":
    main(sys.argv[1:])
