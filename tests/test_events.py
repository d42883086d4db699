"""TensorBoard's event files, where the extra is installed."""

from __future__ import annotations

import pytest

from distmlp.events import EventFile


def test_numbers_are_written_at_their_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    file = EventFile(tmp_path)
    file.record({"step": 5, "loss": 0.25, "validation_loss": None, "seconds": 2.0})
    file.record({"step": 10, "loss": 0.125})
    file.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    found = [
        (event.step, value.tag, value.simple_value or value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert found == [(5, "loss", 0.25), (10, "loss", 0.125)]
