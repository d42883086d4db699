"""What a scaling study leaves behind: `report.json`, `report.html`, `speedup.png`, `speedup.svg`; and `compare`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import tomli_w

from distmlp.errors import CheckpointError, DataError, SystemUnfitError
from distmlp.files import describe, replace_file
from distmlp.tools.scaling_plots import as_svg, plots, save

FORMAT = "distmlp-scaling"
FORMAT_VERSION = 1


def require_packages() -> None:
    """Raise SystemUnfitError where what draws the report is missing: before a sweep, not after it."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemUnfitError(
            f"scaling: the report needs {' and '.join(missing)}, which pip install 'distmlp[report]' brings"
        )


def write_report(report: dict[str, Any], directory: Path) -> None:
    """Write all files of a report into `directory`, `report.json` last.

    Raises CheckpointError when a file cannot be written.
    """
    figures = plots(report)
    page = render(report, {name: as_svg(figure) for name, figure in figures.items()})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save(figures["speedup"], directory / "speedup")
        replace_file(directory / "report.html", [page.encode()])
        text = json.dumps(report, indent=1, allow_nan=False)
        replace_file(directory / "report.json", [(text + "\n").encode()])
    except OSError as error:
        raise CheckpointError(f"scaling {directory}: cannot write the report: {describe(error, directory)}") from None


def render(report: dict[str, Any], svgs: dict[str, str]) -> str:
    """The page, with nothing outside itself."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distmlp.tools"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= FILTERS
    counts = sorted({point["blocks"] for point in report["points"]})
    return environment.get_template("scaling.html.j2").render(
        report=report,
        plots=svgs,
        blocks=f"{counts[0]} blocks" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} blocks",
        derived=any(point["communication_source"] == "derived" for point in report["points"]),
        has_target=report["target_loss"] is not None,
        config_text=tomli_w.dumps(report["config"]),
    )


def _or_dash(template: str, factor: float = 1.0) -> Any:
    return lambda value: "–" if value is None else template.format(value * factor)


def _us(value: float | None) -> str:
    """Three digits or more, as many as make sense."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _scaled(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    prefixes = ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}"


FILTERS = {
    "us": _us,
    "count": _or_dash("{:,.0f}"),
    "ratio": _or_dash("{:.2f}"),
    "percent": _or_dash("{:.1f} %", 100.0),
    "signed": _or_dash("{:+.1f} %", 100.0),
    "seconds": _or_dash("{:.1f}"),
    "rate": lambda value: _scaled(value, "B/s"),
    "size": lambda value: _scaled(value, "B"),
}


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json`, given by itself or by its directory. Raises DataError."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"report {file}: {error.strerror}; give a directory that `distmlp scaling` wrote") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"report {file}: not valid JSON: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise DataError(f"report {file}: not a scaling report (its `format` is not {FORMAT!r})")
    if report["format_version"] > FORMAT_VERSION:
        raise DataError(f"report {file}: format {report['format_version']} is newer than this program's; update it")
    return report


def run_compare(first: Path, second: Path) -> int:
    """`distmlp scaling compare A B`: print the points of both side by side, and what was not alike; returns 0.

    Ratios are B over A, in samples per second. Raises DataError for a file that is no report.
    """
    print(compare(read_report(first), read_report(second)))
    return 0


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The text that `run_compare` prints."""
    lines = [f"A: {_title(first)}", f"B: {_title(second)}"]
    lines += [f"  {key}: {a} in A, {b} in B" for key, a, b in _differences(first, second)]
    rows = {(p["mode"], p["ranks"]): [p, None] for p in first["points"]}
    for point in second["points"]:
        rows.setdefault((point["mode"], point["ranks"]), [None, None])[1] = point
    header = ("mode", "ranks", "µs A", "µs B", "samples/s A", "samples/s B", "B/A", "eff. A", "eff. B")
    table = [header]
    for (mode, ranks), (a, b) in sorted(rows.items(), key=lambda item: (item[0][0] != "weak", item[0][1])):
        ratio = f"{b['samples_per_second'] / a['samples_per_second']:.2f}" if a and b else "–"
        pairs = [_us(p and p["us_per_step_median"]) for p in (a, b)]
        pairs += [FILTERS["count"](p and p["samples_per_second"]) for p in (a, b)]
        efficiencies = [FILTERS["percent"](p and p["efficiency"]) for p in (a, b)]
        table.append((mode, str(ranks), *pairs, ratio, *efficiencies))
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines.append("")
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines)


def _title(report: dict[str, Any]) -> str:
    return f"{report['device']}, {report['engine']}, {report['transport']}, {report['created']}"


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """`(key, value in first, value in second)` of the conditions that differ."""
    found = [(key, first[key], second[key]) for key in ("precision", "hosts") if first[key] != second[key]]
    for group in ("versions", "config"):
        mine, theirs = dict(_flat(first[group])), dict(_flat(second[group]))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key) and key not in ("run.output", "data.train", "data.validation"):
                found.append((key, mine.get(key, "nothing"), theirs.get(key, "nothing")))
    return found


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in document.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs
