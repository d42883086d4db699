"""Other formats → shards: `distmlp data convert`. Streaming, in constant memory; every file complete or absent.

Under `mpirun` every rank walks through the blocks of all sources and counts their rows, but parses and writes only
those of its own shards: the files are the same at any number of ranks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.apart import agree_apart
from distmlp.comm.world import World
from distmlp.data.blocks import Block, Source
from distmlp.data.present import PresentShard
from distmlp.data.recognize import HDF5, open_sources
from distmlp.data.rows import Rows
from distmlp.data.sequence import ShardSequence
from distmlp.data.tables import Selection
from distmlp.data.writer import ShardWriter
from distmlp.errors import ConfigError, DataError
from distmlp.files import check_replaceable, describe, leftovers
from distmlp.order import mix

EVERYTHING = Selection()


@dataclass
class Converted:
    """What came out: the files in order, rows by part ("" without a split), rows left out as incomplete."""

    paths: list[Path] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


def convert(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    selection: Selection = EVERYTHING,
    header: bool | None = None,
    rows_per_shard: int = 0,
    validation: float = 0.0,
    seed: int = 0,
    checksums: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    world: World | None = None,
) -> Converted:
    """Write the rows of `sources`, one after the other, to HDF5 shards with contiguous datasets.

    Sources: CSV (.gz too), Parquet, NPZ, HDF5 (repacked); IDX (.gz) and NPY in pairs of inputs and targets.
    `out`: "data.h5"; with `rows_per_shard` data-00000.h5, data-00001.h5, …. `validation`: fraction of the
    rows that goes to data-validation*.h5, the rest to data-train*.h5, chosen by a hash of (seed, row
    number) so that rows added later do not move the others. `checksums`: see `ShardWriter`. `resume`: shards
    that an interrupted conversion finished are compared and kept. `world`: ranks that share the work; collective.
    Raises DataError for what is wrong in a source or on the disk, ConfigError for what is asked.
    """
    out, world = Path(out), world or World()
    if not sources:
        raise ConfigError("data convert: no source is given")
    if selection.inputs.strip() == "none":
        raise ConfigError("--inputs none: rows need inputs; name columns or a dataset, or leave the option out")
    if not 0.0 <= validation < 1.0:
        raise ConfigError(f"--validation {validation:g}: expected a fraction from 0 to below 1")
    if overwrite and resume:
        raise ConfigError("data convert: --overwrite begins anew, --resume goes on; give one of them")
    if out.suffix.lower() not in HDF5:
        raise ConfigError(f"{out}: the last argument is the shard to write and must end in .h5")
    paths = [Path(source) for source in sources]
    opened = world.agree(lambda: open_sources(paths, selection, header), "data convert")

    def open_shard(path: Path) -> ShardWriter | PresentShard:
        return PresentShard(path) if resume and path.exists() else ShardWriter(path, checksums)

    def sequence(part: str, first: int) -> ShardSequence:
        def mine(shard: int) -> bool:
            return (shard + first) % world.size == world.rank

        return ShardSequence(out, part, rows_per_shard, mine, open_shard)

    names = ("train", "validation") if validation else ("",)
    shards = {name: sequence(name, first) for first, name in enumerate(names)}
    world.agree(
        lambda: _prepare(out, list(shards.values()), paths, overwrite, resume) if world.rank == 0 else None,
        "data convert",
    )
    counts = _counts(opened, world)
    split = _Split(shards, validation, seed)
    dropped = agree_apart(world, lambda listen: _write(opened, counts, split, listen), "data convert")
    world.agree(lambda: _check_others(shards.values(), overwrite) if world.rank == 0 else None, "data convert")
    written = [path for sequence in shards.values() for path in sequence.paths]
    return Converted(written, {name: sequence.rows for name, sequence in shards.items()}, dropped)


def _prepare(
    out: Path, shards: Sequence[ShardSequence], sources: Sequence[Path], overwrite: bool, resume: bool
) -> None:
    """Find out before the work whether its files may and can be written, and remove what a killed one left."""
    for path in (path for sequence in shards for path in sequence.present()):
        if not overwrite and not resume:
            raise DataError(
                f"{path}: exists already; choose another name, or give --overwrite, or --resume to go on where a "
                "conversion was interrupted"
            )
        try:  # a single file appears when all is read, so that it may replace its source
            check_replaceable(path, sources if path != out else ())
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {describe(error, path)}") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
        names = rf"{re.escape(out.stem)}(-train|-validation)?(-\d{{5}})?{re.escape(out.suffix)}"
        for path in leftovers(out.parent, names) if overwrite or resume else ():  # else of another that is under way
            path.unlink()
    except OSError as error:
        raise DataError(f"{out.parent}: cannot be written: {describe(error, out.parent)}") from None


def _blocks(sources: Sequence[Source]) -> Iterator[tuple[Source, Block]]:
    for source in sources:
        for block in source.blocks():
            yield source, block


def _counts(sources: Sequence[Source], world: World) -> dict[int, int]:
    """How many rows come out of the blocks of which that shows only when they are parsed. The ranks share that
    work; a process alone counts as it writes."""
    if world.size == 1 or all(source.exact for source in sources):
        return {}

    def mine(listen: Callable[[], None]) -> dict[int, int]:
        counts = {}
        for number, (source, block) in enumerate(_blocks(sources)):
            listen()
            if not source.exact and number % world.size == world.rank:
                counts[number] = len(block.load())
        return counts

    parts = world.all_gather(agree_apart(world, mine, "data convert"))
    return {number: count for part in parts for number, count in part.items()}


class _Split:
    """Which part a row belongs to."""

    def __init__(self, parts: dict[str, ShardSequence], validation: float, seed: int) -> None:
        self.parts, self._validation, self._seed = parts, validation, seed

    def of(self, first: int, count: int) -> list[tuple[ShardSequence, NDArray | slice, int]]:
        """Of `count` rows from number `first` on: for every part those that go there, and how many."""
        if not self._validation:
            return [(sequence, slice(None), count) for sequence in self.parts.values()]
        place = mix(np.arange(first, first + count) & 0xFFFFFFFF, mix(self._seed & 0xFFFFFFFF, 0x5EED))
        held = place < self._validation * 2.0**32
        masks = {"train": ~held, "validation": held}
        return [(sequence, masks[part], int(masks[part].sum())) for part, sequence in self.parts.items()]


def _write(sources: Sequence[Source], counts: dict[int, int], split: _Split, listen: Callable[[], None]) -> int:
    """Write this rank's shards; how many rows were left out of all."""
    number, dropped = 0, 0
    try:
        for place, (source, block) in enumerate(_blocks(sources)):
            listen()
            count = block.rows if source.exact else counts.get(place)
            rows = None
            if count is None:
                rows = block.load()
                count = len(rows)
            pieces = split.of(number, count)
            if rows is None and any(sequence.wants(part) for sequence, _, part in pieces):
                rows = block.load()
            for sequence, chosen, part in pieces:
                sequence.append(None if rows is None else _part(rows, chosen), part)
            number += count
            dropped += block.rows - count
        for sequence in split.parts.values():
            sequence.finish()
    finally:
        for sequence in split.parts.values():
            sequence.discard()
    if not number:
        raise DataError(f"{', '.join(source.where for source in sources)}: no row came out")
    return dropped


def _part(rows: Rows, chosen: NDArray | slice) -> Rows:
    return rows.map(lambda array: array[chosen] if len(array) else array)


def _check_others(shards: Iterable[ShardSequence], overwrite: bool) -> None:
    """Shards of an earlier, longer conversion would be read with the new ones."""
    for sequence in shards:
        for path in sequence.present()[len(sequence.paths) :]:
            if not overwrite:
                raise DataError(
                    f"{path}: is none of the {len(sequence.paths)} shards that these sources and options give, but "
                    "would be read with them; remove it, or begin anew with --overwrite"
                )
            path.unlink()
