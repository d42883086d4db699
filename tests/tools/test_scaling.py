"""Scaling reports: from finished runs with known times, from a real sweep, and compared."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from launching import clean_environment
from tools.finished_runs import GPUS, write_run, write_sweep

from distmlp.errors import ConfigError, DataError, SystemUnfitError
from distmlp.tools.launcher import launch_command
from distmlp.tools.scaling import run_scaling
from distmlp.tools.scaling_build import build_report
from distmlp.tools.scaling_model import AllReduce
from distmlp.tools.scaling_report import run_compare
from distmlp.tools.scaling_runs import FinishedRun, modes_of
from distmlp.tools.scaling_sweep import ChildFailed

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

KEYS = {
    "mode", "ranks", "global_batch", "us_per_step_median", "samples_per_second", "speedup", "efficiency",
    "communication_share", "data_wait_share",
}  # fmt: skip


def report_of(paths, out, **options):
    assert run_scaling(None, "1", "both", out, from_=paths, **options) == 0
    return json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)


def points_of(report):
    return {(point["mode"], point["ranks"]): point for point in report["points"]}


def test_a_report_of_finished_runs_has_the_promised_figures(tmp_path):
    report = report_of(write_sweep(tmp_path), tmp_path / "out")
    assert {"device", "hosts", "versions", "transport", "config", "points", "baseline"} <= report.keys()
    assert report["device"] == "NVIDIA H200"
    assert "one-rank run of the fused engine in this sweep" in report["baseline"]
    points = points_of(report)
    assert list(points) == [(mode, ranks) for mode in ("weak", "strong") for ranks in (1, 2, 4)]
    assert all(point.keys() >= KEYS for point in points.values())
    weak, strong = points["weak", 4], points["strong", 4]
    assert (weak["global_batch"], strong["global_batch"]) == (4096, 1024)
    assert weak["us_per_step_median"] == pytest.approx(120.0)
    assert weak["us_per_step_min"] == pytest.approx(118.8)
    assert weak["samples_per_second"] == pytest.approx(4096e6 / 120)
    assert weak["speedup"] == pytest.approx(4 * 100 / 120)
    assert weak["efficiency"] == pytest.approx(100 / 120)
    assert strong["speedup"] == pytest.approx(100 / 60)
    assert strong["efficiency"] == pytest.approx(25 / 60)
    assert weak["communication_share"] == pytest.approx(20 / 120)
    assert strong["data_wait_share"] == pytest.approx(1 / 60)
    assert sum(value or 0 for value in strong["split_us"].values()) == pytest.approx(60.0)
    assert strong["split_us"]["other"] == pytest.approx(0.02 * 60, rel=0.05)
    assert weak["all_reduce_bytes_per_second"] == pytest.approx(1.5 * report["gradient_bytes"] / 20e-6)


def test_predictions_are_marked_and_carry_their_error(tmp_path):
    report = report_of(write_sweep(tmp_path), tmp_path / "out")
    assert {(p["mode"], p["ranks"]) for p in report["predictions"]} == {
        (mode, ranks) for mode in ("weak", "strong") for ranks in (8, 64, 512, 4096)
    }
    assert all(p["prediction"] for p in report["predictions"])
    assert len(report["prediction_errors"]) == len(report["points"])
    assert max(abs(p["error"]) for p in report["prediction_errors"]) < 0.05
    assert abs(report["held_out_error"]) < 0.2
    weak = [p["efficiency"] for p in report["predictions"] if p["mode"] == "weak"]
    assert weak == sorted(weak, reverse=True)


def test_communication_inside_the_kernel_is_derived_from_one_rank(tmp_path):
    runs = [write_run(tmp_path / "1", 1, 64, 10.0), write_run(tmp_path / "2", 2, 128, 16.0, transport="peer")]
    point = points_of(report_of(runs, tmp_path / "out"))["weak", 2]
    assert point["communication_source"] == "derived"
    assert point["communication_share"] == pytest.approx(6 / 16)


def test_a_one_rank_run_over_a_ranks_share_tells_the_communication_of_a_strong_point(tmp_path):
    runs = [write_run(tmp_path / "1", 1, 64, 10.0), write_run(tmp_path / "2", 2, 64, 9.0, transport="peer")]
    pairs = modes_of([FinishedRun.read(path) for path in runs])
    assert build_report(pairs)["points"][1]["communication_share"] is None
    half = FinishedRun.read(write_run(tmp_path / "half", 1, 32, 6.0))
    report = build_report(pairs, references=[half])
    assert len(report["points"]) == 2
    assert report["points"][1]["communication_share"] == pytest.approx(3 / 9)
    assert report["model"]["fixed_us"] == pytest.approx(2.0, rel=0.01)
    assert report["model"]["per_row_us"] == pytest.approx(4 / 32, rel=0.01)


def test_shared_and_mixed_gpus_short_batches_and_unsteady_blocks_are_flagged(tmp_path):
    shared = [GPUS[0], {**GPUS[0], "rank": 1}]
    mixed = [GPUS[0], {**GPUS[1], "name": "NVIDIA A100"}]
    runs = [
        write_run(tmp_path / "1", 1, 64, 10.0),
        write_run(tmp_path / "2w", 2, 128, 12.0, 2.0, devices=shared, spread=0.3),
        write_run(tmp_path / "2s", 2, 64, 7.0, 2.0, devices=mixed, samples=600 * 32),
    ]
    report = report_of(runs, tmp_path / "out")
    text = "\n".join(report["warnings"])
    assert "2 ranks shared 1 GPU" in text
    assert "mixed GPU models: NVIDIA A100, NVIDIA H200" in text
    assert "batches had 32 rows on average" in text
    assert "weak, 2 ranks: the blocks spread by 60%" in text
    assert [point["shared_gpus"] for point in report["points"]] == [False, True, False, False]
    assert all(warning in (tmp_path / "out" / "report.html").read_text() for warning in report["warnings"])


def test_time_to_a_target_loss(tmp_path):
    report = report_of(write_sweep(tmp_path), tmp_path / "out", target_loss=0.34)
    point = points_of(report)["weak", 1]
    assert point["seconds_to_target"] == pytest.approx(3.0 + 2 * 100e-4, rel=1e-3)  # the third line
    assert "s to loss ≤ 0.34" in (tmp_path / "out" / "report.html").read_text()
    missed = report_of([tmp_path / "one"], tmp_path / "missed", target_loss=0.01)
    assert missed["points"][0]["seconds_to_target"] is None


def test_the_model_takes_the_all_reduce_that_the_runs_took_and_slower_device_memory_is_hinted_at(tmp_path):
    runs = modes_of([FinishedRun.read(path) for path in write_sweep(tmp_path)])
    host = [AllReduce(2, size, 3.0 + size / 1e4, "host") for size in (4096, 1 << 20)]
    device = [AllReduce(2, size, 30.0 + size / 1e3, "device MPI") for size in (4096, 1 << 20)]
    report = build_report(runs, [*host, *device])
    assert report["model"]["latency_us"] == pytest.approx(15.0)
    assert report["model"]["bandwidth_bytes_per_second"] == pytest.approx(1e9)
    assert [exchange["way"] for exchange in report["exchanges"]] == ["host", "host", "device MPI", "device MPI"]
    assert any("run.transport=staged" in warning for warning in report["warnings"])
    assert not any("run.transport=staged" in warning for warning in build_report(runs, host)["warnings"])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(2, 128, {})], "0 of the runs have one rank"),
        ([(1, 64, {}), (2, 100, {})], r"neither a weak \(128\) nor a strong \(64\)"),
        ([(1, 64, {"engine": "reference"}), (2, 128, {})], "engine reference in .*, fused in"),
        ([(1, 64, {"blocks": 0})], "too few to time a step"),
    ],
)
def test_runs_that_make_no_report_are_refused(tmp_path, runs, message):
    paths = [write_run(tmp_path / str(i), n, batch, 10.0, **more) for i, (n, batch, more) in enumerate(runs)]
    with pytest.raises(DataError, match=message):
        run_scaling(None, "1", "both", tmp_path / "out", from_=paths)


def test_directories_that_hold_no_finished_run_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing/run\.toml: No such file"):
        run_scaling(None, "1", "both", tmp_path / "out", from_=[tmp_path / "nothing"])
    run = write_run(tmp_path / "run", 1, 64, 10.0)
    (run / "summary.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        run_scaling(None, "1", "both", tmp_path / "out", from_=[run])


def test_pictures_for_papers_are_whole(tmp_path):
    report_of(write_sweep(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "speedup.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    root = ElementTree.parse(tmp_path / "out" / "speedup.svg").getroot()
    assert root.tag.endswith("svg")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20


def test_two_reports_are_compared(tmp_path, capsys):
    report_of(write_sweep(tmp_path), tmp_path / "a")
    slower = [write_run(tmp_path / "s1", 1, 1024, 200.0), write_run(tmp_path / "s2", 2, 2048, 250.0, 50.0)]
    report_of(slower, tmp_path / "b")
    capsys.readouterr()
    assert run_compare(tmp_path / "a", tmp_path / "b" / "report.json") == 0
    rows = {tuple(line.split()[:2]): line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["weak", "1"][6] == "0.50"
    assert rows["weak", "2"][6] == f"{110 / 250:.2f}"
    assert rows["strong", "4"][6] == "–"
    for bad, content in (("none", None), ("bad.json", "["), ("other.json", "{}")):
        if content is not None:
            (tmp_path / bad).write_text(content)
        with pytest.raises(DataError, match=bad):
            run_compare(tmp_path / "a", tmp_path / bad)


def test_the_launch_line():
    assert launch_command(4, "aprun -n {ranks} -N 2") == ["aprun", "-n", "4", "-N", "2"]
    assert launch_command(4, "mpiexec --bind-to none") == ["mpiexec", "--bind-to", "none", "-n", "4"]
    with pytest.raises(ConfigError, match="No closing quotation"):
        launch_command(4, "mpiexec '")
    assert launch_command(3, "", {})[-2:] == ["-n", "3"]
    with pytest.raises(SystemUnfitError, match=r"999,999 ranks: more than the \d+ that are started on one host"):
        launch_command(999_999, "", {})  # it would swap for an hour
    assert launch_command(999_999, "", {"PBS_NODEFILE": "hosts"})[-1] == "999999"


@pytest.fixture
def real_run(tmp_path, monkeypatch):
    """A small configuration with data, and an environment in which `mpirun` starts."""
    h5py = pytest.importorskip("h5py")
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["inputs"] = random.normal(size=(2000, 16)).astype("f4")
        file["targets"] = random.integers(0, 4, 2000).astype("i4")
    (tmp_path / "run.toml").write_text(
        '[model]\nhidden = [32]\nloss = "softmax_cross_entropy"\n[data]\ntrain = "rows.h5"\nbatch = 64\n'
        '[run]\nengine = "reference"\n'
    )
    for key, value in clean_environment().items():
        monkeypatch.setenv(key, value)
    return tmp_path / "run.toml"


def test_a_sweep_over_one_and_two_ranks(real_run, tmp_path, capsys):
    assert run_scaling(real_run, "1,2", "both", tmp_path / "out", steps=160) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    points = points_of(report)
    assert [(key, point["global_batch"]) for key, point in points.items()] == [
        (("weak", 1), 64), (("weak", 2), 128), (("strong", 1), 64), (("strong", 2), 64),
    ]  # fmt: skip
    assert all(point["blocks"] >= 5 and point["steps_per_block"] == 20 for point in points.values())
    assert points["strong", 2]["communication_source"] == "measured"
    assert points["strong", 2]["communication_share"] > 0
    assert {exchange["ranks"] for exchange in report["exchanges"]} == {2}
    assert report["link_bytes_per_second"] > 0
    assert (tmp_path / "out" / "speedup.png").exists()
    assert "weak-ranks-2: " in capsys.readouterr().out
    assert not list((tmp_path / "out").rglob("checkpoints"))


def test_a_point_that_fails_ends_the_sweep_with_its_words_and_code(real_run, tmp_path):
    with pytest.raises(ChildFailed, match=r"ranks-1, 1 rank:(.|\n)*missing\.h5") as failure:
        run_scaling(real_run, "1", "weak", tmp_path / "a", steps=16, set_=["data.train=missing.h5"])
    assert failure.value.exit_code == DataError.exit_code
    assert not (tmp_path / "a" / "report.json").exists()


def test_points_before_a_failure_are_reported(real_run, tmp_path, capsys):
    launcher = (
        f'{shlex.quote(sys.executable)} -c "import sys,subprocess; n=int(sys.argv[2]); sys.exit(9 if n > 1 else '
        'subprocess.call(sys.argv[3:]))" -n {ranks}'
    )
    with pytest.raises(ChildFailed, match="weak-ranks-2") as failure:
        run_scaling(real_run, "1,2", "weak", tmp_path / "out", steps=16, launcher=launcher)
    assert failure.value.exit_code == SystemUnfitError.exit_code
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [point["ranks"] for point in report["points"]] == [1]
    assert "ended early" in report["warnings"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": "1,two"}, "expected rank counts such as 1,2,4"),
        ({"target_loss": float("nan")}, "--target-loss nan: expected a finite number"),
        ({"mode": "medium"}, "expected weak, strong or both"),
        ({"steps": 3}, "at least 8"),
        ({"set_": ["run.nonsense=1"]}, "unknown key"),
    ],
)
def test_bad_arguments(real_run, tmp_path, arguments, message):
    options = {"ranks": "1,2", "mode": "weak", **arguments}
    with pytest.raises(ConfigError, match=message):
        run_scaling(real_run, options.pop("ranks"), options.pop("mode"), tmp_path / "out", **options)


def test_packages_for_the_report_are_asked_for_before_the_sweep(real_run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, found=importlib.util.find_spec: None if name == "jinja2" else found(name),
    )
    with pytest.raises(SystemUnfitError, match=r"needs jinja2, which pip install 'distmlp\[report\]'"):
        run_scaling(real_run, "1", "weak", tmp_path / "out", steps=8)
    assert not (tmp_path / "out").exists()


def test_no_launcher_is_a_clear_refusal(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(SystemUnfitError, match="no launcher"):
        launch_command(2, "", {})
