"""What may change between the parts of a run. Pure."""

from __future__ import annotations

from typing import Any

from distmlp.checkpoint.contents import Checkpoint
from distmlp.config import RunConfig
from distmlp.errors import ConfigError, DataError

# The network, what it learns from and in which order. Everything else may change: where the data lies and how it
# is read, the learning rate and its schedule, how long the run goes on and what it leaves behind.
FIXED = frozenset(
    {
        "data.batch", "data.streams", "data.shuffle", "data.standardize", "data.sample_weights",
        "optimizer.name", "run.seed",
    }
)  # fmt: skip


def is_fixed(key: str) -> bool:
    """Whether `section.key` must stay as it was when a run is resumed."""
    return key.startswith("model.") or key in FIXED


def continue_run(saved: Checkpoint, config: RunConfig, rows: int) -> dict[str, tuple[Any, Any]]:
    """Make `saved` go on under `config` (all widths known) with `rows` training rows.

    Returns the changed keys with old and new value, after noting them in the history of `saved`.
    Raises ConfigError naming the keys that cannot change, DataError when the data has other rows.
    """
    changes = saved.config.changes(config)
    refused = [
        f"  {key}: {old!r} in the checkpoint, {new!r} now" for key, (old, new) in changes.items() if is_fixed(key)
    ]
    if refused:
        lines = "\n".join(refused)
        raise ConfigError(
            f"{config.run.output}: a run cannot be resumed with another network, loss, optimizer or order of data:\n"
            f"{lines}\nput these back, or train anew in another run.output"
        )
    if saved.rows and rows != saved.rows:
        raise DataError(
            f"data.train holds {rows:,} rows, {saved.rows:,} when the checkpoint at step {saved.step} was written; "
            "a run can be resumed only with the same rows (in other files if need be)"
        )
    if changes:
        saved.history.append({"step": saved.step, "changes": {key: list(pair) for key, pair in changes.items()}})
    state = saved.state
    if not config.run.ema_decay:
        state.ema = None
    elif state.ema is None:
        state.ema = state.parameters.copy()  # an average begins at the weights of its first moment
    saved.config = config
    return changes
