"""`distmlp inspect`: what is inside a checkpoint."""

from __future__ import annotations

from pathlib import Path

from distmlp.checkpoint import Checkpoint, load
from distmlp.checkpoint.store import resolve_checkpoint

__all__ = ["describe", "resolve_checkpoint", "run_inspect"]


def run_inspect(checkpoint: str | Path) -> int:
    """Print what a checkpoint, or the newest good one of a run's directory, holds. Raises CheckpointError."""
    path = resolve_checkpoint(checkpoint)
    print(describe(load(path), path))
    return 0


def describe(checkpoint: Checkpoint, path: Path) -> str:
    """A report for people: where the run stood, the network, what else is inside, and the configuration."""
    config, network = checkpoint.config, checkpoint.network
    scaled = [side for side in ("inputs", "targets") if getattr(checkpoint.standardization, side)]
    versions = [f"{name} {version}" for name, version in checkpoint.versions.items()]
    lines = [
        f"checkpoint  {path}  ({path.stat().st_size:,} bytes, intact)",
        f"step        {checkpoint.step} (epoch {checkpoint.epoch}, batch {checkpoint.step_in_epoch} in it; "
        f"{checkpoint.state.step} updates, {checkpoint.skipped} batches left out)",
        f"precision   {config.run.precision} (weights float32)",
        f"loss        {config.model.loss}",
        f"validation  {_validation(checkpoint)}",
        f"optimizer   {config.optimizer.name}: {', '.join(checkpoint.state.slots) or 'no state'}"
        f"{', averaged weights' if checkpoint.state.ema is not None else ''}",
        f"scaled      {' and '.join(scaled) or 'nothing'}",
        f"weights     sha256 {network.sha256(checkpoint.state.parameters)}",
        f"versions    {', '.join(versions) or 'not recorded'}",
        "",
        f"{'layer':>5} {'inputs':>9} {'outputs':>9} {'parameters':>13}  activation",
    ]
    for layer in network.layers:
        count = layer.fan_in * layer.fan_out + layer.fan_out
        lines.append(f"{layer.index:>5} {layer.fan_in:>9} {layer.fan_out:>9} {count:>13,}  {layer.activation}")
    total = sum(layer.fan_in * layer.fan_out + layer.fan_out for layer in network.layers)
    lines += [f"{'total':>5} {'':>9} {'':>9} {total:>13,}", ""]
    for change in checkpoint.history:
        lines.append(f"resumed at step {change['step']} with")
        lines += [f"  {key}: {old!r} -> {new!r}" for key, (old, new) in change["changes"].items()]
    return "\n".join([*lines, "configuration:", "", config.to_toml()])


def _validation(checkpoint: Checkpoint) -> str:
    if checkpoint.best is None:
        return "none yet"
    here = "" if checkpoint.validation is None else f"loss {checkpoint.validation:.6g} here, "
    return f"{here}best {checkpoint.best:.6g}, {checkpoint.stale_validations} without improvement since"
