"""Where and how the rows of one dataset lie in one HDF5 file.

A child process (`probe`) reads a file's structure through the HDF5 library; what it finds is this plain
description, from which rows are read without the library (`reader`). Pure apart from NumPy.
"""

from __future__ import annotations

import math
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
    columns: tuple[str, ...] = ()  # their names, where the file tells

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

    def spans(self, runs: NDArray) -> NDArray | None:
        """Where the bytes of stretches of rows, first row and rows each (runs, 2), lie: offset and bytes, int64 (…, 2),
        neighbours joined. None where they do not lie in the file as they are."""
        step, (firsts, counts) = self.row_bytes, runs.T
        if self.plain:
            offsets, sizes = self.offset + firsts * step, counts * step
        elif self.chunks_are_rows and self.chunks is not None:
            each = self.chunk[0]
            low = firsts // each
            parts = (firsts + counts - 1) // each - low + 1  # chunks that a stretch touches
            number = np.repeat(low - np.cumsum(parts) + parts, parts) + np.arange(int(parts.sum()))
            chunk = self.chunks[number]
            if (chunk["offset"] < 0).any() or (chunk["size"] != self.chunk_bytes).any():
                return None
            begin = np.maximum(np.repeat(firsts, parts), number * each)
            end = np.minimum(np.repeat(firsts + counts, parts), (number + 1) * each)
            offsets, sizes = chunk["offset"] + (begin - number * each) * step, (end - begin) * step
        else:
            return None
        heads = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1]))
        return np.stack((offsets[heads], np.add.reduceat(sizes, heads)), axis=1)

    def where(self, start: int, stop: int) -> str:
        """ "file, dataset `name`, rows a to b" for messages; `stop` is exclusive."""
        rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
        return f"{self.path}, dataset `{self.name}`, {rows}"
