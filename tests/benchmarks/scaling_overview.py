"""Pages and pictures of the scaling reports under results/scaling, and one overview of all of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ranks_report import TRANSPORTS, efficiencies
from report import put_into

from distmlp.tools.scaling_report import read_report, write_report

COLOURS = {"weak": "#0072B2", "strong": "#D55E00"}
Named = tuple[str, str, dict[str, Any]]  # preset, transport, report


def draw(folder: Path, results: Path, readme: Path | None = None) -> None:
    """Everything that is made from `folder`/*/report.json; the overviews go into `results`, and into `readme`."""
    groups: dict[str, list[Named]] = {}
    for path in sorted(folder.glob("*/report.json")):
        report = read_report(path)
        write_report(report, path.parent)
        group, _, rest = path.parent.name.partition("-")
        if "x" in group:
            preset, _, transport = rest.rpartition("-")
            groups.setdefault(group, []).append((preset, transport, report))
    for group, reports in groups.items():
        reports.sort(key=lambda named: (named[0], -_efficiency(named[2], "weak")))
        name, steps = (
            f"{group}-scaling",
            _steps(results, group, {report.get("kernel_sha256") for *_, report in reports}),
        )
        chart(reports, group, results / name)
        (results / f"{name}.md").write_text(table(reports, folder.name, group, steps) + "\n", encoding="utf-8")
        if readme:
            place = folder.relative_to(readme.absolute().parent).as_posix()
            picture = (results / name).relative_to(readme.absolute().parent).as_posix()
            text = f"{table(reports, place, group, steps)}\n\n![Efficiency of every transport]({picture}.png)"
            put_into(readme, name, text)


def table(reports: list[Named], place: str, group: str, steps: dict[tuple[str, str], float]) -> str:
    """Markdown: a row for every transport and mode. `place`: where the reports lie; `steps`: see `_steps`."""
    lines = [
        "| network | transport | mode | global batch | µs a step (min–max) | speed-up | efficiency | communication "
        "| efficiency by ranks.py |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for preset, transport, report in reports:
        link = f"[{transport}]({place}/{group}-{preset}-{transport}/report.html)"
        for point in report["points"]:
            if point["ranks"] == 1:
                continue
            times = [_us(point[f"us_per_step_{which}"]) for which in ("median", "min", "max")]
            step = steps.get((preset, transport)) if point["mode"] == "weak" else None
            cells = [
                preset, link, point["mode"], f"{point['global_batch']:,}", f"**{times[0]}** ({times[1]}–{times[2]})",
                f"{point['speedup']:.2f}", *map(_percent, (point["efficiency"], point["communication_share"], step)),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    alone = {preset: report["points"][0]["us_per_step_median"] for preset, _, report in reports}
    first = reports[0][2]
    lines += [
        "",
        f"{group.rpartition('x')[2]} × {first['device']}, {first['precision']}, Adam, through `distmlp train` on "
        f"{first['created'][:10]}; relative to one rank of the same engine in the same sweep "
        f"({', '.join(f'{preset} {_us(us)} µs' for preset, us in alone.items())}).",
    ]
    return "\n".join(lines)


def chart(reports: list[Named], group: str, path: Path) -> None:
    """Bars of efficiency for every network and transport, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distmlp"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(reports)), 3.8), layout="constrained")
    for shift, mode in ((-0.2, "weak"), (0.2, "strong")):
        heights = [_efficiency(report, mode) for _, _, report in reports]
        bars = axes.bar([i + shift for i in range(len(reports))], heights, 0.38, label=mode, color=COLOURS[mode])
        axes.bar_label(bars, [f"{height:.0%}" for height in heights], fontsize=8)
    axes.axhline(1.0, color="#555555", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(reports)), [f"{preset}\n{transport}" for preset, transport, _ in reports])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("efficiency")
    axes.set_title(f"{reports[0][2]['device']}, {group.rpartition('x')[2]} ranks")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
    plt.close(figure)


def _efficiency(report: dict[str, Any], mode: str) -> float:
    return next((p["efficiency"] for p in report["points"] if p["mode"] == mode and p["ranks"] > 1), 0.0)


def _steps(results: Path, group: str, kernels: set[str | None]) -> dict[tuple[str, str], float]:
    """Weak efficiency of (preset, transport) by GPUxRANKS-step.json, if it is of these kernels."""
    file = results / f"{group}-step.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"kernel_sha256": ""}
    if kernels != {record["kernel_sha256"]}:
        return {}
    return {
        (preset, transport): reached[transport]
        for preset, reached in efficiencies(record).items()
        for transport in TRANSPORTS
        if not math.isnan(reached[transport])
    }


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
