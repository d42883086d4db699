"""What `distmlp data check` and `distmlp data convert` print. Under `mpirun` the first rank checks for all, while
all share the work of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distmlp.comm.world import open_world
from distmlp.data.check import FileSummary, Summary, check
from distmlp.data.convert import convert
from distmlp.data.tables import Selection
from distmlp.errors import ConfigError, DataError


def check_command(
    patterns: Sequence[str], inputs: str = "inputs", targets: str = "targets", sample_weights: str = ""
) -> int:
    """Print a summary of all shards; 0 when all are good, 3 when one is not. Raises DataError for an empty pattern."""

    def run() -> int:
        summary = check(patterns, inputs, targets, sample_weights)
        for file in summary.files:
            print("\n".join(_lines(file)))
        print(_total(summary))
        return DataError.exit_code if summary.problems else 0

    return on_first_rank(run)


def on_first_rank(run: Callable[[], int]) -> int:
    """`run()` on rank 0; its exit code, or the error it raised, on all."""
    world = open_world()
    return world.broadcast(world.agree(lambda: run() if world.rank == 0 else 0))


def _lines(file: FileSummary) -> list[str]:
    lines = [f"{file.path}: {f'{file.rows:,} rows' if not file.problem else 'BAD: ' + file.problem}"]
    for dataset in file.datasets:
        values = "no finite value" if dataset.lowest is None else f"{dataset.lowest:g} to {dataset.highest:g}"
        strange = f", {dataset.nonfinite:,} NaN or infinite" if dataset.nonfinite else ""
        shape = "×".join(map(str, dataset.shape))
        lines.append(f"  {dataset.name}: {shape} {dataset.dtype}, {dataset.layout}, {values}{strange}")
        if dataset.advice:
            lines.append(f"    slow: {dataset.advice}")
    return lines


def _total(summary: Summary) -> str:
    good = len(summary.files) - len(summary.problems)
    text = f"{good} of {len(summary.files)} files good, {summary.rows:,} rows"
    if summary.seconds > 0 and summary.read_bytes and summary.rows:
        rate = f"{summary.rows / summary.seconds:,.0f} rows/s, {summary.read_bytes / summary.seconds / 1e6:,.0f} MB/s"
        text += f"; read through by one thread at {rate}"
    return text


def convert_command(
    arguments: Sequence[str],
    *,
    rows_per_shard: int = 0,
    inputs: str = "",
    targets: str = "",
    weights: str = "",
    labels: bool = False,
    category: Sequence[str] = (),
    missing: str = "",
    header: bool | None = None,
    validation: float = 0.0,
    seed: int = 0,
    checksums: bool = False,
    overwrite: bool = False,
    resume: bool = False,
) -> int:
    """Convert and print what was written. `arguments`: sources, then the shard to write. See `convert`, `Selection`.

    `category`: "COLUMN=first,second,…", one for each categorical column. Raises ConfigError, DataError.
    """
    if len(arguments) < 2:
        raise ConfigError("data convert: give one source at least and the shard to write: SOURCE… OUT.h5")
    selection = Selection(inputs, targets, weights, labels, _categories(category), missing)

    world = open_world()
    done = convert(
        list(arguments[:-1]),
        Path(arguments[-1]),
        selection=selection,
        header=header,
        rows_per_shard=rows_per_shard,
        validation=validation,
        seed=seed,
        checksums=checksums,
        overwrite=overwrite,
        resume=resume,
        world=world,
    )
    if world.rank == 0:
        for path in done.paths:
            print(path)
        parts = ", ".join(f"{rows:,} {part or ''}".rstrip() + " rows" for part, rows in done.rows.items())
        files = f"{len(done.paths)} file{'s' if len(done.paths) != 1 else ''}"
        print(f"{parts} in {files}" + (f"; {done.dropped:,} incomplete rows left out" if done.dropped else ""))
    return 0


def _categories(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    categories = {}
    for text in texts:
        column, equals, values = text.partition("=")
        names = tuple(value.strip() for value in values.split(","))
        if not equals or not column or len(set(names)) < len(names) or "" in names:
            raise ConfigError(f"--category {text}: expected COLUMN=first,second,… with different values")
        categories[column.strip()] = names
    return categories
