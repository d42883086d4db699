"""Throughput, mean losses, and what is printed where."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest

from distmlp.metrics import MeanLoss, Reporter, Throughput
from tests.worlds import LoneWorld

ENTRY = {
    "step": 50, "epoch": 1, "loss": 0.25, "learning_rate": 1e-3, "samples_per_second": 12345.6, "seconds": 3.0,
    "validation_loss": None,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def reporter(stream: io.StringIO, rank: int = 0, size: int = 1, others: list | None = None) -> Reporter:
    return Reporter(LoneWorld(rank, size, others), stream=stream)  # type: ignore[arg-type]


def test_throughput_leaves_the_warm_up_out():
    throughput = Throughput()
    assert throughput.samples_per_second is None
    throughput.add(100, 10.0)  # compiles
    assert throughput.samples_per_second == 10.0  # nothing better is known yet
    throughput.add(100, 1.0)
    throughput.add(300, 1.0)
    assert throughput.samples_per_second == 200.0
    assert throughput.latest == 300.0
    assert throughput.warmup_seconds == 10.0


def test_mean_loss_weighs_batches_by_their_rows():
    mean = MeanLoss()
    assert mean.value is None
    mean.add(0, np.array([1.0, np.nan, 4.0]), np.array([2.0, 9.0, 1.0]))  # NaN: a batch that was left out
    assert mean.value == pytest.approx(2.0)
    mean.add(1, np.array([5.0]), np.array([2.0]))
    assert mean.value == 5.0


def test_mean_loss_does_not_depend_on_where_a_run_was_interrupted():
    random = np.random.default_rng(0)
    losses, weights = random.uniform(size=100), random.uniform(1, 9, size=100)
    whole = MeanLoss()
    whole.add(3, losses, weights)
    for cut in (1, 50, 99):
        first = MeanLoss(3)
        first.add(3, losses[:cut], weights[:cut])
        second = MeanLoss(3, first.total, first.weight)
        second.add(3, losses[cut:], weights[cut:])
        assert second.value == whole.value


def test_plain_lines_away_from_a_terminal():
    stream = io.StringIO()
    report = reporter(stream)
    report.say("engine reference")
    report.start(0, 100)
    report.log(ENTRY)
    report.log(ENTRY | {"step": 100, "validation_loss": 0.5, "validation_accuracy": 0.75})
    report.close()
    assert stream.getvalue().splitlines() == [
        "engine reference",
        "step 50/100  epoch 1  loss 0.25  lr 0.001  12,346 samples/s",
        "step 100/100  epoch 1  loss 0.25  lr 0.001  12,346 samples/s  validation loss 0.5  accuracy 0.7500",
    ]
    assert "\r" not in stream.getvalue()


def test_a_progress_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    report = reporter(stream)
    report.start(10, 100)
    report.log(ENTRY)
    report.log(ENTRY | {"validation_loss": 0.5})
    report.close()
    text = stream.getvalue()
    for part in ("50/100", "loss 0.25", "12,346 samples/s", "left", "validation loss 0.5"):
        assert part in text


def test_plain_lines_on_a_terminal_that_cannot_move_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    report = reporter(stream)
    report.start(0, 100)
    report.log(ENTRY)
    report.close()
    assert stream.getvalue() == "step 50/100  epoch 1  loss 0.25  lr 0.001  12,346 samples/s\n"


def test_only_rank_0_prints():
    stream = io.StringIO()
    report = reporter(stream, rank=1, size=2)
    report.say("hello")
    report.start(0, 10)
    report.log(ENTRY)
    report.close()
    assert stream.getvalue() == ""


def test_warnings_of_all_ranks_are_told_once_with_their_ranks():
    stream = io.StringIO()
    report = reporter(stream, rank=0, size=4, others=[["disk slow"], ["disk slow", "odd"], []])
    report.warn("disk slow")
    report.exchange()
    report.exchange()
    report.close()
    assert stream.getvalue().splitlines() == ["warning: disk slow [ranks 0, 1, 2]", "warning: odd [rank 2]"]


def test_a_warning_of_every_rank():
    stream = io.StringIO()
    report = reporter(stream, rank=0, size=2, others=[["hot"]])
    report.warn("hot")
    report.exchange()
    report.close()
    assert stream.getvalue() == "warning: hot [all ranks]\n"


def test_python_warnings_are_taken_and_given_back():
    stream = io.StringIO()
    before = warnings.showwarning
    report = reporter(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = report._take_warning
        warnings.warn("too deep", RuntimeWarning, stacklevel=1)
    report.exchange()
    report.close()
    assert stream.getvalue() == "warning: RuntimeWarning: too deep\n"
    assert warnings.showwarning is before


def test_warnings_that_were_not_exchanged_are_not_lost(capsys):
    report = reporter(io.StringIO(), rank=3, size=4)
    report.warn("late")
    report.close()
    assert capsys.readouterr().err == "warning: late [rank 3]\n"


def test_a_reader_that_has_gone_ends_nothing():
    report = reporter(ClosedPipe())
    report.say("hello")
    report.log(ENTRY)
    report.close()


def test_text_that_the_terminal_cannot_show():
    raw = io.BytesIO()
    report = reporter(io.TextIOWrapper(raw, encoding="ascii"))  # type: ignore[arg-type]
    report.say("größer → 1")
    assert raw.getvalue() == b"gr??er ? 1\n"
