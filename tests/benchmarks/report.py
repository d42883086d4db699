"""Table and chart from a results file: `python tests/benchmarks/report.py results/h200-step.json [README.md]`.

Writes FILE.md, FILE.svg and FILE.png beside the results; a README is changed between the lines
`<!-- FILE -->` and `<!-- /FILE -->`, where FILE is the name without ending: the table, or a sentence and a link.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import feed_report
from ranks_report import learnt_table, ranks_chart, ranks_of, ranks_table

from distmlp.engine.compile import kernel_sha256
from distmlp.tools.bench import shorten

OWN = "distmlp"
EARLIER = "Measured with an earlier version of the kernels."
NAMES = {"torch": "PyTorch", "jax": "JAX"}  # subjects begin with these
HOW = {
    "torch-compiled-graph": "PyTorch: the better of a CUDA graph and a compiled one",
    "jax-scan": "JAX: `jit` of a `lax.scan`",
}
COLOURS = {"limit": "#bbbbbb", "distmlp": "#1b6ca8", "torch": "#d9822b", "jax": "#6a9f4b"}


def best(record: dict[str, Any], preset: str, subject: str) -> dict[str, Any] | None:
    """The row with the least median among the subjects whose names begin with `subject`."""
    rows = [row for row in record["rows"] if row["preset"] == preset and row["subject"].startswith(subject)]
    return min(rows, key=lambda row: row["us_median"], default=None)


def table(record: dict[str, Any]) -> str:
    """Markdown: medians in µs a step, the spread of distmlp's blocks, and how far the best peer is behind or ahead."""
    limits = record.get("limits_us", {})
    lines = [
        f"| preset | layers | batch | distmlp (min–max) | {' | '.join(NAMES.values())} | "
        + ("limit | " if limits else "")
        + "best peer ÷ ours |"
        + (" ours ÷ limit |" if limits else ""),
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name in dict.fromkeys(row["preset"] for row in record["rows"]):
        own = best(record, name, OWN)
        if own is None:
            continue
        cells = [name, shorten(tuple(own["layers"])), str(own["batch"])]
        cells.append(f"**{show(own['us_median'])}** ({show(own['us_min'])}–{show(own['us_max'])})")
        peers = {peer: best(record, name, peer) for peer in NAMES}
        cells += [show(row["us_median"]) if row else "–" for row in peers.values()]
        cells += [show(limits[name])] if limits else []
        cells.append(ahead(own["us_median"], {peer: row["us_median"] for peer, row in peers.items() if row}))
        cells += [f"{own['us_median'] / limits[name]:.2f}"] if limits else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", conditions(record)])


def ahead(own: float, peers: dict[str, float]) -> str:
    """How many times the best of `peers` takes what we take; bold where we are ahead, with its name where it is."""
    if not peers:
        return "–"
    peer = min(peers, key=lambda name: peers[name])
    ratio = peers[peer] / own
    text = f"{ratio:.1f}×" if ratio >= 1.95 else f"{ratio:.2f}×"
    return f"**{text}**" if ratio > 1 else f"{text}, {NAMES[peer]} ahead"


def conditions(record: dict[str, Any]) -> str:
    """What was measured how, in a line."""
    measured = {row["subject"] for row in record["rows"]}
    peers = [f"{how} ({record['versions'].get(subject.split('-')[0], '?')})" for subject, how in HOW.items()
             if subject in measured]  # fmt: skip
    absent = [name for peer, name in NAMES.items() if not any(subject.startswith(peer) for subject in measured)]
    row = next(row for row in record["rows"] if row["subject"].startswith(OWN))
    devices = f"one {record['device']}" if row["ranks"] == 1 else f"{row['ranks']} × {record['device']}"
    parts = [
        f"µs a training step on {devices} (driver {record['driver']}), {record['date'][:10]}; {row['precision']} "
        "products, float32 master weights, Adam, mean squared error, rows resident on the GPU",
        "; ".join([*peers, *([f"not measured in this run: {', '.join(absent)}"] if absent else [])]),
        "limit: operations ÷ 790 TFLOP/s or bytes ÷ 4.3 TB/s, the larger" if record.get("limits_us") else "",
    ]
    return ". ".join(filter(None, parts)) + "."


def ratios(record: dict[str, Any], peer: str) -> dict[str, float]:
    """Preset → how many times as long as ours a step of `peer` takes."""
    found = {}
    for name in dict.fromkeys(row["preset"] for row in record["rows"]):
        own, other = best(record, name, OWN), best(record, name, peer)
        if own and other:
            found[name] = other["us_median"] / own["us_median"]
    return found


def summary(record: dict[str, Any], name: str) -> str:
    """How distmlp compares with JAX in the results file `name`.json, in a sentence, with a link to its table."""
    found = ratios(record, "jax")
    if not found:
        return ""
    slower = [preset for preset, ratio in found.items() if ratio < 1]
    kind = "random networks and batches" if name.endswith("-shapes") else "presets"
    text = (
        f"On {len(found)} {kind} in {record['rows'][0]['precision']} ([table](tests/benchmarks/results/{name}.md)) a "
        f"step of JAX's scan takes {min(found.values()):.2f} to {max(found.values()):.1f} times as long as distmlp's, "
        f"{sorted(found.values())[len(found) // 2]:.1f} times in the median"
    )
    if slower:
        return f"{text}; JAX is ahead in {len(slower)}: {', '.join(slower)}."
    return f"{text}; distmlp is ahead in all of them."


def accuracy_table(record: dict[str, Any]) -> str:
    """Markdown: what every data set was learnt to by every engine and precision."""
    lines = ["| data set | engine | products | accuracy | loss | samples/s |", "|---|---|---|---|---|---|"]
    for row in record["rows"]:
        lines.append(
            f"| {row['dataset']} | {row['engine']} | {row['precision']} | {row['accuracy']:.4f} "
            f"| {row['validation_loss']:.4f} | {row['samples_per_second']:,} |"
        )
    where = f"{record['device']} (driver {record['driver']})"
    return "\n".join(
        [*lines, "", f"Of the test rows, after the epochs of the TOML file; {where}, {record['date'][:10]}."]
    )


def show(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def chart(record: dict[str, Any], path: Path) -> None:
    """Bars of µs a step on a logarithmic scale, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distmlp"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    presets = dict.fromkeys(row["preset"] for row in record["rows"])
    names = [name for name in presets if best(record, name, OWN)]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    limits = record.get("limits_us", {})
    series = [*(["limit"] if limits else []), OWN, *NAMES]
    for place, label in enumerate(series):
        rows = {} if label == "limit" else {name: row for name in names if (row := best(record, name, label))}
        if label in NAMES and not rows:
            continue
        heights = [limits[n] if label == "limit" else rows[n]["us_median"] if n in rows else math.nan for n in names]
        positions = [i + (place - 1.5) * 0.2 for i in range(len(names))]
        axes.bar(positions, heights, 0.19, label=label, color=COLOURS[label])
    axes.set_yscale("log")
    axes.set_ylabel("µs a training step")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_title(f"{record['device']}, {record['rows'][0]['precision']}, Adam: lower is better")
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


def told(record: dict[str, Any], name: str) -> tuple[str, str]:
    """The Markdown of results file `name`, and what README shows of it; both say so where the kernels have changed."""
    text, shown = _told(record, name)
    if record["kernel_sha256"] == kernel_sha256():
        return text, shown
    return f"{text}\n\n{EARLIER}", f"{shown}\n\n{EARLIER}"


def _told(record: dict[str, Any], name: str) -> tuple[str, str]:
    if name.endswith("-accuracy"):
        text = learnt_table(record) if "ranks" in record["rows"][0] else accuracy_table(record)
        return text, text
    if name.endswith("-feed"):
        return feed_report.feed_table(record), feed_report.summary(record)
    if ranks_of(record) > 1:
        text = ranks_table(record)
        return text, f"{text}\n\n![Weak-scaling efficiency](tests/benchmarks/results/{name}.png)"
    text = table(record)
    return text, text if name.endswith("-step") else summary(record, name)


def main(arguments: list[str]) -> None:
    path = Path(arguments[0])
    record = json.loads(path.read_text())
    text, shown = told(record, path.stem)
    if "-step" in path.stem:
        (ranks_chart if ranks_of(record) > 1 else chart)(record, path)
    path.with_suffix(".md").write_text(text + "\n")
    for readme in arguments[1:]:
        put_into(Path(readme), path.stem, shown)


if __name__ == "__main__":
    main(sys.argv[1:])
