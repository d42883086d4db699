"""Markdown from the results of `feed.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WANTED = 0.8  # of the rate of reading that a network may need


def feed_table(record: dict[str, Any]) -> str:
    """Rates by layout, training beside it, and a sentence each on memory and on PyTorch's loader."""
    parts = [rates(record["rates"]), "", f"GB/s of inputs and targets, from the page cache. {conditions(record)}"]
    if record.get("training"):
        parts += ["", training(record["training"])]
    parts += ["", " ".join(filter(None, (larger(record.get("larger", {})), loader(record))))]
    return "\n".join(parts).rstrip()


def rates(rows: list[dict[str, Any]]) -> str:
    """A line for every layout."""
    lines = [
        "| layout | h5py, one thread | all rows at the start | streamed | streamed, shuffled | shuffled ÷ sequential "
        "| shuffled, from host memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = row["streamed_shuffled"] / row["streamed"]
        cells = [row["layout"], *(f"{row[name]:.2f}" for name in ("h5py", "resident", "streamed", "streamed_shuffled"))]
        host = f"{row['host_shuffled']:.2f}" if "host_shuffled" in row else ""
        lines.append(f"| {' | '.join([*cells, f'{share:.2f}', host])} |")
    for row in rows:
        if "with_scratch" in row:
            lines += ["", (
                f"{row['layout']}: shuffled {row['streamed_shuffled']:.2f} where decoded chunks stay in memory, "
                f"{row['without_memory']:.2f} where they do not, {row['with_scratch']:.2f} from `data.scratch`."
            )]  # fmt: skip
    return "\n".join(lines)


def training(rows: list[dict[str, Any]]) -> str:
    """A line for every network."""
    lines = [
        "| network | batch | needs GB/s | samples/s, resident | streamed, shuffled | of resident | waiting for data |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {'-'.join(map(str, row['layers']))} | {row['batch']} | {row['needs_gigabytes_per_second']:.1f} "
            f"| {row['device_samples_per_second']:,} | {row['stream_samples_per_second']:,} "
            f"| {row['streamed_of_resident']:.1%} | {row['wait_share']:.1%} |"
        )
    return "\n".join(lines)


def larger(found: dict[str, Any]) -> str:
    """What a run with more data than memory holds."""
    if "rss_bytes" not in found:
        return ""
    held = found["rss_bytes"]
    each = found["data_bytes"] / 1e9
    return (
        f"A run on {each:.0f} GB of rows in {found['files']:,} files, of which GPU and host together have "
        f"{(found['gpu_free_bytes'] + found['host_free_bytes']) / 1e9:.0f} GB free, streams them: after "
        f"{found['rows_trained'] / 1e6:.0f} million rows the resident set has {held[-1] / 1e9:.2f} GB (after a fifth "
        f"of them {held[0] / 1e9:.2f}; most at any time {found['rss_peak_bytes'] / 1e9:.2f}), the GPU "
        f"{found['gpu_bytes'] / 1e9:.2f} GB, at {found['samples_per_second']:,} samples/s ("
        f"{'-'.join(map(str, found['layers']))})."
    )


def loader(record: dict[str, Any]) -> str:
    """PyTorch's DataLoader on the same rows."""
    found = record.get("loader", {})
    if "rows" not in found:
        return ""
    first = record["rates"][0]
    each = 4 * (int(first["layout"].split(", ")[1].split()[0]) + 1) / 1e9
    return (
        f"PyTorch's DataLoader over h5py ({found['torch']}, {found['workers']} workers, pinned, copied to the GPU): "
        f"{found['rows'] * each:.2f} GB/s shuffled row by row, {found['slices'] * each:.2f} GB/s by whole batches as "
        f"they lie; distmlp's shuffled stream of the same rows: {first['streamed_shuffled']:.2f}."
    )


def summary(record: dict[str, Any]) -> str:
    """The main figures in a sentence or two, for README."""
    by_name = {row["layout"]: row for row in record["rates"]}
    first = record["rates"][0]
    text = (
        f"On one {record['device']} with {record['cores']} CPU cores, page-cached float32 shards reach the GPU at "
        f"{first['streamed']:.0f} GB/s in file order and {first['streamed_shuffled']:.0f} GB/s shuffled (one thread of "
        f"h5py: {first['h5py']:.1f}, to host memory)"
    )
    packed = next((row for name, row in by_name.items() if name.startswith("gzip")), None)
    if packed:
        text += f", gzip at {packed['streamed_shuffled']:.1f} (h5py: {packed['h5py']:.2f})"
    within = [
        row
        for row in record.get("training", ())
        if row["needs_gigabytes_per_second"] <= WANTED * by_name.get(row.get("layout"), first)["streamed_shuffled"]
    ]
    if within:
        least = min(row["streamed_of_resident"] for row in within)
        text += (
            f"; networks that need no more than {WANTED:.0%} of that train at {least:.1%} or more of the speed that "
            "they have with resident rows"
        )
    return f"{text} ([table](tests/benchmarks/results/h200-feed.md))."


BARS = {  # of the chart
    "h5py": ("h5py, one thread, to host memory", "#bbbbbb"),
    "resident": ("all rows at the start", "#7fb2d9"),
    "streamed": ("streamed in file order", "#1b6ca8"),
    "streamed_shuffled": ("streamed, shuffled", "#0d3d63"),
}


def chart(record: dict[str, Any], path: Path) -> None:
    """GB/s by layout, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distmlp"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    rows = record["rates"]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    for place, (name, (label, colour)) in enumerate(BARS.items()):
        positions = [k + (place - 1.5) * 0.2 for k in range(len(rows))]
        bars = axes.bar(positions, [row[name] for row in rows], 0.19, label=label, color=colour)
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["layout"].replace(", ", ",\n", 1) for row in rows])
    axes.set_ylabel("GB/s")
    axes.set_title(f"From the page cache to one {record['device']}, {record['cores']} cores: higher is better")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
    plt.close(figure)


def conditions(record: dict[str, Any]) -> str:
    """Where and how."""
    note = f" Of this run: {record['note']}." if "note" in record else ""
    return (
        f"{record['device']} (driver {record['driver']}), {record['cores']} cores, {record['readers']} reader threads, "
        f"{record['date'][:10]}; all rows: as they lie, into device memory, as for a run whose rows stay there; "
        f"streamed: an epoch in training order into device memory.{note}"
    )
