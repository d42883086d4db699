"""`report.html` in a real browser: headless Chromium, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tools.finished_runs import write_run, write_sweep

from distmlp.tools.scaling import run_scaling

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

WEAK, STRONG, COMPUTE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)
SERIES = {"speedup": (WEAK, STRONG), "efficiency": (WEAK, STRONG), "breakdown": (COMPUTE, STRONG)}

# Runs inside a copy of the page, after everything else: where each plot lies, and what it shows.
MEASURE = """<script>
const plots = {};
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect(), style = getComputedStyle(svg);
  const shapes = [...svg.querySelectorAll("path, use")].filter(shape => shape.getBoundingClientRect().width > 0);
  plots[figure.id] = {x: box.x, y: box.y, width: box.width, height: box.height, shapes: shapes.length,
                      visible: style.visibility === "visible" && style.display !== "none"};
}
const pre = document.createElement("pre");
pre.id = "measured";
pre.textContent = JSON.stringify({plots, width: document.documentElement.scrollWidth});
document.body.append(pre);
</script></body>"""


class Tables(HTMLParser):
    """The cells of every table with an id, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self._table, self._in_cell = "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self._table = dict(attrs).get("id", "")
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.rows[self._table][-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[self._table][-1][-1] += data


def browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Open `page` in a browser that has never been used before and may reach nothing."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", f"--log-net-log={folder / 'net.json'}",
        "--force-device-scale-factor=1", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done


def console(done: subprocess.CompletedProcess) -> list[str]:
    """What pages wrote to the console: errors of scripts, refused requests, violated policies."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def requests(folder: Path) -> set[str]:
    """URLs that the page asked for. What the browser wants for itself has no origin in its network log."""
    events = json.loads((folder / "net.json").read_text(encoding="utf-8", errors="replace"))["events"]
    asked = [event.get("params", {}) for event in events]
    asked = [params for params in asked if params.get("initiator", "not an origin") != "not an origin"]
    return {params["url"] for params in asked if not params["url"].startswith(("file:", "data:"))}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [*write_sweep(folder), write_run(folder / "strong8", 8, 1024, 50.0, 30.0, devices=[])]
    run_scaling(None, "1", "both", folder / "out", from_=runs, target_loss=0.34)
    return folder / "out"


@pytest.fixture(scope="module")
def seen(report, tmp_path_factory):
    """`(what the browser said, the page as it stood, its network log)`, the page as it was written."""
    folder = tmp_path_factory.mktemp("browser")
    done = browse(report / "report.html", folder, "--dump-dom")
    return done, done.stdout, folder


def test_no_console_message_and_no_request(seen):
    done, page, folder = seen
    assert "Scaling report" in page
    assert console(done) == []
    assert requests(folder) == set()


def test_the_checks_above_would_notice(report, tmp_path):
    page = tmp_path / "bad.html"
    text = (report / "report.html").read_text()
    page.write_text(text.replace("</body>", '<img src="http://127.0.0.1:9/x.png"><script>boom()</script></body>'))
    done = browse(page, tmp_path, "--dump-dom")
    assert len(console(done)) >= 2  # the policy in the page forbids both
    page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()))
    done = browse(page, tmp_path, "--dump-dom")
    assert any("boom is not defined" in line for line in console(done))
    assert requests(tmp_path) == {"http://127.0.0.1:9/x.png"}


def test_tables_match_the_report(report, seen):
    content = json.loads((report / "report.json").read_text())
    tables = Tables(seen[1]).rows
    number = re.compile(r"[^\d.+-]")
    header, *rows = tables["points"]
    assert header[:3] == ["mode", "ranks", "global batch"]
    assert len(rows) == len(content["points"]) == 7
    for row, point in zip(rows, content["points"], strict=True):
        assert row[0] == point["mode"]
        shown = [float(number.sub("", cell)) for cell in (*row[1:4], row[5], row[6], row[7], row[8], row[9])]
        expected = [
            point["ranks"], point["global_batch"], point["us_per_step_median"], point["samples_per_second"],
            point["speedup"], 100 * point["efficiency"], 100 * point["communication_share"],
            100 * point["data_wait_share"],
        ]  # fmt: skip
        assert shown == pytest.approx(expected, rel=6e-3, abs=0.05)
    assert [row[:2] for row in tables["predictions"][1:]] == [
        [p["mode"], str(p["ranks"])] for p in content["predictions"]
    ]
    assert [float(number.sub("", row[4])) for row in tables["errors"][1:]] == pytest.approx(
        [100 * p["error"] for p in content["prediction_errors"]], abs=0.06
    )
    assert dict(tables["versions"]) == content["versions"]


@pytest.mark.parametrize("width", [1200, 420])
def test_plots_are_drawn_and_nothing_overflows(report, tmp_path, width):
    pytest.importorskip("PIL")
    from PIL import Image

    copy = tmp_path / "measured.html"
    page = re.sub(r"<meta http-equiv[^>]*>", "", (report / "report.html").read_text())
    copy.write_text(page.replace("</body>", MEASURE))
    size = f"--window-size={max(width, 500)},6000"
    dumped = browse(copy, tmp_path, "--dump-dom", size).stdout
    measured = json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', dumped, re.DOTALL)[1]))
    assert measured["width"] <= max(width, 500)
    browse(copy, tmp_path, f"--screenshot={tmp_path / 'page.png'}", size)
    picture = Image.open(tmp_path / "page.png").convert("RGB")
    assert set(measured["plots"]) == {"speedup", "breakdown", "efficiency"}
    for name, plot in measured["plots"].items():
        assert plot["visible"], name
        assert plot["width"] > 300, name
        assert plot["shapes"] > 20, name
        box = (plot["x"], plot["y"], plot["x"] + plot["width"], plot["y"] + plot["height"])
        colors = picture.crop(tuple(map(int, box))).getcolors(1 << 24)
        for wanted in SERIES[name]:
            drawn = sum(
                count for count, color in colors if max(abs(a - b) for a, b in zip(color, wanted, strict=True)) < 40
            )
            assert drawn > 30, f"{name}: no {wanted}"


def test_it_prints_as_a_page(report, tmp_path):
    browse(report / "report.html", tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
