"""What a conversion reads: sources whose blocks of rows can be loaded, or passed over by a rank that needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from distmlp.data.rows import Rows

Kinds = dict[str, tuple[tuple[int, ...], np.dtype]]  # dataset → shape of one row, and its dtype


@dataclass(frozen=True)
class Block:
    """Some rows of a source. `load` is called before the next block is asked for, or not at all."""

    rows: int
    load: Callable[[], Rows]


@dataclass(frozen=True)
class Source:
    """A source whose header is read: its name in messages, what its rows are made of, its blocks from the start.

    `exact`: all rows come out; else `load` may leave some out.
    """

    where: str
    kinds: Kinds
    blocks: Callable[[], Iterator[Block]]
    exact: bool = True
