"""What the builders share: their command line, and writing shards block by block on all ranks of a job.

`python datasets/NAME.py --out DIR` alone, or under `mpirun -n N` with the same result: a row depends on its
number alone, and shards are shared out over the ranks. Every file is complete or absent; a builder can be
run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distmlp.comm.world import World, open_world
from distmlp.data.writer import ShardWriter

Block = dict[str, NDArray]  # dataset name → its values for some rows
DRAW_ROWS = 1024  # rows drawn from one generator
WRITE_ROWS = 4 * DRAW_ROWS


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """A command line with `--out` and `--shards`."""
    made = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    folder = Path(__file__).parent / "shards" / name
    made.add_argument("--out", type=Path, default=folder, help="folder of the shards (default: %(default)s)")
    made.add_argument("--shards", type=int, default=4, help="files of the training set (default: %(default)s)")
    return made


def sized_parser(description: str, name: str, rows: int, validation_rows: int) -> argparse.ArgumentParser:
    """`parser` for a generator of any number of rows."""
    made = parser(description, name)
    made.add_argument("--rows", type=int, default=rows, help="training rows (default: %(default)s)")
    made.add_argument(
        "--validation-rows", type=int, default=validation_rows, help="validation rows (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=0, help="of every random number (default: %(default)s)")
    return made


def build(out: Path, part: str, rows: int, shards: int, make: Callable[[int, int], Block], world: World) -> None:
    """Write `rows` rows to `out`/`part`-00000.h5, …; this rank writes every `world.size`-th shard. Collective.

    `make(start, stop)` gives those rows; it must not depend on how the rows are cut.
    """
    shards = max(1, min(shards, rows))
    paths = [out / f"{part}-{number:05d}.h5" for number in range(shards)]

    def write() -> None:
        for number in range(world.rank, shards, world.size):
            first, last = rows * number // shards, rows * (number + 1) // shards
            with ShardWriter(paths[number]) as writer:
                for start in range(first, last, WRITE_ROWS):
                    writer.append(**make(start, min(start + WRITE_ROWS, last)))

    world.agree(write, "writing the shards")
    if world.rank == 0:
        for stale in set(out.glob(f"{part}-*.h5")) - set(paths):  # of an earlier run with more shards
            stale.unlink()
        print(f"{rows:,} rows in {shards} file{'s' if shards > 1 else ''}: {out / f'{part}-*.h5'}")
    world.barrier()


def build_both(options: argparse.Namespace, make: Callable[[int, int], Block]) -> None:
    """Training rows 0, 1, … and, after them, validation rows."""
    world = open_world()
    build(options.out, "train", options.rows, options.shards, make, world)
    first = options.rows
    build(options.out, "validation", options.validation_rows, 1, lambda a, b: make(first + a, first + b), world)


def draws(seed: int, start: int, stop: int, draw: Callable[[np.random.Generator], NDArray]) -> NDArray:
    """Random rows `start` to `stop - 1` of an endless table that depends on `seed` alone.

    `draw(generator)` gives `DRAW_ROWS` rows; the generators are counter-based, one for each such block.
    """
    blocks = [
        draw(np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, block])))
        for block in range(start // DRAW_ROWS, -(-stop // DRAW_ROWS))
    ]
    first = start // DRAW_ROWS * DRAW_ROWS
    return np.concatenate(blocks)[start - first : stop - first]
