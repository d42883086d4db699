"""How the rows of a dataset are stored, in words, and what to do where that is slow."""

from __future__ import annotations

import numpy as np

from distmlp.data.layout import Layout
from distmlp.order import BLOCK_ROWS

FEW_ROWS = 32  # in a chunk: reading costs a seek and a filter run for each
MANY_BLOCKS = 4  # of the shuffled order in one chunk: each is decoded that often where chunks do not stay in memory


def describe(layout: Layout) -> str:
    """How the rows are stored, in words."""
    sums = ", checksums" if layout.checksum_rows else ""
    if layout.kind == "inline":
        return f"compact{sums}"
    fill = np.frombuffer(layout.fill, layout.dtype)[0] if layout.fill else 0
    if layout.kind != "chunked":
        return ("contiguous" if layout.offset >= 0 else f"never written, reads as {fill:g}") + sums
    names = "+".join(stage.name for stage in layout.filters) or "no filter"
    assert layout.chunks is not None
    missing = int((layout.chunks["offset"] < 0).sum())
    gaps = f", {missing:,} of {len(layout.chunks):,} never written, read as {fill:g}" if missing else ""
    return f"chunks {'×'.join(map(str, layout.chunk))}, {names}{gaps}{sums}"


def advice(layout: Layout) -> str:
    """What makes this layout slow to train from and how to repack it, or ""."""
    if layout.kind != "chunked":
        return ""
    repack = f"repack it: distmlp data convert {layout.path} OUT.h5"
    rows = layout.chunk[0]
    if rows < min(FEW_ROWS, layout.rows):
        return f"chunks of {rows} row{'s' if rows > 1 else ''} are slow to read; {repack}"
    if layout.filters and rows > MANY_BLOCKS * BLOCK_ROWS:
        return (
            f"chunks of {rows} rows: shuffled reading decodes each about {rows // BLOCK_ROWS} times where data does "
            f"not fit in memory; {repack}, or set data.scratch to a folder on a local disk with room"
        )
    return ""
