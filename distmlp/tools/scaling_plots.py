"""The plots of a scaling report, from its `report.json`. Colours are Okabe & Ito's, hatches help in print."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = {"weak": ("#0072B2", "o"), "strong": ("#D55E00", "s")}
CAUSES = {
    "compute": ("#009E73", ""), "communication": ("#D55E00", "///"), "data_wait": ("#56B4E9", "..."),
    "other": ("#999999", "xxx"),
}  # fmt: skip


def plots(report: dict[str, Any]) -> dict[str, Figure]:
    """`speedup`, `efficiency` and `breakdown`."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figures = {
        name: Figure(figsize=(7.5, 3.9), layout="constrained") for name in ("speedup", "efficiency", "breakdown")
    }
    _speedup(figures["speedup"].subplots(), report)
    _efficiency(figures["efficiency"].subplots(), report)
    _breakdown(figures["breakdown"].subplots(), report)
    return figures


def as_svg(figure: Figure) -> str:
    """An `<svg>` element to stand in a page; the same bytes for the same figure."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "distmlp"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save(figure: Figure, stem: Path) -> None:
    """`stem`.png (for slides) and `stem`.svg (for papers)."""
    figure.savefig(stem.with_suffix(".png"), dpi=200)
    stem.with_suffix(".svg").write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{as_svg(figure)}', encoding="utf-8")


def _points(report: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    return sorted((p for p in report["points"] if p["mode"] == mode), key=lambda p: p["ranks"])


def _ranks_axis(axes: Axes, ranks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ranks)), [str(n) for n in sorted(set(ranks))])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _speedup(axes: Axes, report: dict[str, Any]) -> None:
    ranks = sorted({p["ranks"] for p in report["points"]})
    axes.plot(ranks, ranks, color="#555555", linestyle="--", linewidth=1, label="ideal")
    for mode, (color, marker) in MODES.items():
        points = _points(report, mode)
        if points:
            gains = [p["speedup"] for p in points]
            # a block's speed-up goes with the inverse of its time
            low = [p["speedup"] * (1 - p["us_per_step_median"] / p["us_per_step_max"]) for p in points]
            high = [p["speedup"] * (p["us_per_step_median"] / p["us_per_step_min"] - 1) for p in points]
            axes.errorbar(
                [p["ranks"] for p in points], gains, [low, high], color=color, marker=marker, capsize=3, label=mode
            )
    axes.set_yscale("log", base=2)
    axes.set_yticks(ranks, [str(n) for n in ranks])
    _ranks_axis(axes, ranks)
    axes.set_ylabel("speed-up")
    axes.legend(frameon=False)


def _efficiency(axes: Axes, report: dict[str, Any]) -> None:
    ranks = [p["ranks"] for p in report["points"]]
    for mode, (color, marker) in MODES.items():
        points = _points(report, mode)
        if not points:
            continue
        axes.plot([p["ranks"] for p in points], [p["efficiency"] for p in points], color=color, marker=marker,
                  label=f"{mode}, measured")  # fmt: skip
        ahead = [p for p in report["predictions"] if p["mode"] == mode and p["efficiency"] is not None]
        ahead = [p for p in ahead if p["ranks"] > points[-1]["ranks"]]
        if ahead:
            axes.plot([p["ranks"] for p in ahead], [p["efficiency"] for p in ahead], color=color, marker=marker,
                      markerfacecolor="white", linestyle="--", linewidth=1, label=f"{mode}, predicted")  # fmt: skip
            ranks += [p["ranks"] for p in ahead]
    axes.axhline(1.0, color="#555555", linestyle="--", linewidth=1)
    axes.set_ylim(0, max(1.1, *(1.05 * p["efficiency"] for p in report["points"])))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _ranks_axis(axes, ranks)
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False)


def _breakdown(axes: Axes, report: dict[str, Any]) -> None:
    points = report["points"]
    labels = [f"{p['mode']}\n{p['ranks']}" for p in points]
    bottom = [0.0] * len(points)
    for cause, (color, hatch) in CAUSES.items():
        heights = [p["split_us"][cause] or 0.0 for p in points]
        if any(heights):
            axes.bar(range(len(points)), heights, 0.65, bottom, color=color, hatch=hatch, edgecolor="white",
                     label=cause.replace("_", " "))  # fmt: skip
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(points)), labels)
    axes.set_ylim(0, 1.25 * max(bottom))  # room for the legend
    axes.set_ylabel("µs a step")
    axes.set_xlabel("mode, ranks")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, ncols=len(CAUSES), loc="upper center")
