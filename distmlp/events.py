"""TensorBoard's event files (extra)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distmlp.errors import SystemUnfitError


def require_tensorboard() -> None:
    """Raise SystemUnfitError where the extra is not installed."""
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise SystemUnfitError(
            f"run.tensorboard: {error.name or error} is not installed; "
            "`pip install 'distmlp[tensorboard]'`, or set run.tensorboard = false"
        ) from None


class EventFile:
    """An event file in `directory`, with the numbers of each record. Needs what `require_tensorboard` asks for."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.fspath(directory))

    def record(self, entry: dict[str, Any]) -> None:
        """Add the numbers of a line of `metrics.jsonl` at its step."""
        values = [
            self._summary.Value(tag=key, simple_value=float(value))
            for key, value in entry.items()
            if key not in ("step", "seconds") and isinstance(value, int | float)
        ]
        self._writer.add_event(
            self._event(step=entry["step"], wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()
