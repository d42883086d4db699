import pytest

from distmlp.config import RunSection
from distmlp.interval import Interval
from distmlp.timeline import Timeline


def stretches(timeline: Timeline, log_every: int, *intervals: Interval) -> list[int]:
    ends, step = [], 0
    while step < timeline.total_steps:
        step = timeline.next_event(step, log_every, intervals)
        ends.append(step)
    return ends


@pytest.mark.parametrize(
    ("batches", "total", "log_every", "intervals", "expected"),
    [
        (10, 25, 100, (), [10, 20, 25]),
        (10, 20, 4, (), [4, 8, 10, 12, 16, 20]),
        (1, 3, 50, (), [1, 2, 3]),
        (100, 7, 50, (Interval(steps=3),), [3, 6, 7]),
        (4, 8, 50, (Interval(seconds=1.0), Interval(epochs=2)), [4, 8]),
    ],
)
def test_stretches_end_at_every_event(batches, total, log_every, intervals, expected):
    assert stretches(Timeline(batches, total), log_every, *intervals) == expected


def test_a_stretch_never_crosses_an_epoch():
    timeline = Timeline(7, 40)
    start = 0
    for end in stretches(timeline, 5, Interval(steps=6)):
        assert timeline.position(start)[0] == timeline.position(end - 1)[0]
        start = end


@pytest.mark.parametrize(
    ("every", "step", "seconds", "expected"),
    [
        (Interval(steps=5), 10, 0, True),
        (Interval(steps=5), 11, 1e9, False),
        (Interval(epochs=2), 20, 0, True),
        (Interval(epochs=2), 10, 0, False),
        (Interval(seconds=60), 3, 59, False),
        (Interval(seconds=60), 3, 60, True),
    ],
)
def test_due(every, step, seconds, expected):
    assert Timeline(10, 100).due(every, step, seconds) is expected


def test_length_from_epochs_or_steps():
    assert Timeline.of(RunSection(epochs=3), 7).total_steps == 21
    assert Timeline.of(RunSection(steps=5), 7).total_steps == 5
    assert Timeline.of(RunSection(), 7).total_steps == 70
    assert Timeline(7, 21).epochs == 3
