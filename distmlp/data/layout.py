"""Where and how the rows of one dataset lie in one HDF5 file.

A child process (`probe`) reads a file's structure through the HDF5 library; what it finds is this plain
description, from which rows are read without the library (`reader`). Pure apart from NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CHUNK_ENTRY = np.dtype([("offset", "<i8"), ("size", "<u4"), ("mask", "<u4")])  # offset -1: never written
CHECKSUM_GROUP = "distmlp_checksums"  # CRC-32 of every so many rows of the dataset of the same name
DEFLATE, SHUFFLE, NBIT, SCALEOFFSET = 1, 2, 5, 6


@dataclass(frozen=True)
class Filter:
    """One stage of a chunk's filter pipeline."""

    id: int
    name: str
    flags: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One dataset of one file. `kind` says where its bytes are: at `offset`, in `chunks`, or in `inline`."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype  # as stored, byte order included
    kind: Literal["contiguous", "chunked", "inline"]
    file_bytes: int
    offset: int = -1  # contiguous; -1: never written, every element is `fill`
    chunk: tuple[int, ...] = ()
    filters: tuple[Filter, ...] = ()
    chunks: NDArray | None = None  # CHUNK_ENTRY, one per chunk in C order of the chunk grid
    inline: bytes = b""
    fill: bytes = b""  # one element as stored
    checksums: NDArray | None = None  # uint32, CRC-32 of the stored values of each `checksum_rows` rows
    checksum_rows: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0]

    @cached_property  # asked for at every read
    def width(self) -> int:
        """Elements of a row, further dimensions flattened in C order."""
        return math.prod(self.shape[1:])

    @property
    def native(self) -> np.dtype:
        """The stored dtype in this machine's byte order."""
        return self.dtype.newbyteorder("=")

    @cached_property  # asked for at every read
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each dimension."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk before the filters."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @cached_property
    def chunks_are_rows(self) -> bool:
        """Chunks hold whole rows, unfiltered: parts of one can be read by themselves."""
        return self.kind == "chunked" and not self.filters and self.chunk[1:] == self.shape[1:]

    @cached_property  # asked for at every read
    def plain(self) -> bool:
        """Rows are raw bytes at an offset of the file."""
        return self.kind == "contiguous" and self.offset >= 0

    def spans(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """Where the bytes of stretches of rows, (first row, rows) each, lie: (offset, bytes), neighbours joined.

        None where they do not lie in the file as they are.
        """
        step = self.row_bytes
        if self.plain:
            return [(self.offset + first * step, count * step) for first, count in runs]
        if not self.chunks_are_rows or self.chunks is None:
            return None
        spans: list[tuple[int, int]] = []
        offsets, sizes, each = self.chunks["offset"], self.chunks["size"], self.chunk[0]
        for first, count in runs:
            stop = first + count
            for number in range(first // each, -(-stop // each)):
                start = int(offsets[number])
                if start < 0 or sizes[number] != self.chunk_bytes:
                    return None
                low, high = max(first - number * each, 0), min(stop - number * each, each)
                start += low * step
                if spans and spans[-1][0] + spans[-1][1] == start:
                    spans[-1] = (spans[-1][0], spans[-1][1] + (high - low) * step)
                else:
                    spans.append((start, (high - low) * step))
        return spans

    def where(self, start: int, stop: int) -> str:
        """ "file, dataset `name`, rows a to b" for messages; `stop` is exclusive."""
        rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
        return f"{self.path}, dataset `{self.name}`, {rows}"
