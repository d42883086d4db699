"""Rows of CSV files, and of texts whose columns blanks separate, a block at a time: NumPy's parser where all is
numbers, cell by cell where it is not."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from distmlp.data.blocks import Block, Source
from distmlp.data.rows import Rows
from distmlp.data.tables import MISSING, Selection, Table
from distmlp.errors import DataError

BLOCK_LINES = 8192
DELIMITERS, COMMENT = ",;\t|", "#"
MAX_LINE = 64 << 20


def csv_source(path: Path, selection: Selection, header: bool | None = None) -> Source:
    """A CSV file (.gz too), block by block. Raises DataError naming line and column.

    `header`: whether the first line names the columns; None: it does if a cell in it is not a number.
    """
    with closing(_blocks(path)) as blocks:
        _, lines = next(blocks, ([], []))
    comments = next((k for k, line in enumerate(lines) if not line.startswith(COMMENT)), len(lines))
    if comments == len(lines):
        raise DataError(f"{path}: is empty, expected lines of numbers")
    delimiter = _delimiter(lines[comments])
    first, named = next(_cells(lines[comments : comments + 1], delimiter)), False
    if comments:  # the last comment names the columns where it has as many, as numpy.savetxt writes it
        told = next(_cells([lines[comments - 1].lstrip(COMMENT).strip()], delimiter), [])
        named = len(told) == len(first) and all(map(_is_number, first))
        first = told if named else first
    if header is None:
        header = named or any(not _is_number(cell) for cell in first)
    names = [cell.strip() for cell in first] if header else [str(k) for k in range(len(first))]
    table = Table(names, selection, str(path))

    def rows(lines: list[str], where: list[int]) -> Rows:
        return table.rows(_parse(lines, where, delimiter, table), where, "line")

    def blocks_of_rows() -> Iterator[Block]:
        skip = comments + int(bool(header) and not named)
        for where, block in _blocks(path):
            if block[skip:]:
                yield Block(len(block) - skip, partial(rows, block[skip:], where[skip:]))
            skip = 0

    return Source(str(path), table.kinds, blocks_of_rows, table.exact)


def _delimiter(line: str) -> str | None:
    """What separates the cells of a line; None: blanks."""
    best = max(DELIMITERS, key=line.count)
    return None if best not in line and len(line.split()) > 1 and '"' not in line else best


def _cells(lines: Sequence[str], delimiter: str | None) -> Iterator[list[str]]:
    return (line.split() for line in lines) if delimiter is None else csv.reader(lines, delimiter=delimiter)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.strip().lower() in MISSING
    return True


def _blocks(path: Path) -> Generator[tuple[list[int], list[str]], None, None]:
    """(line numbers, whole records) of at most `BLOCK_LINES`; a quoted cell may span lines."""
    try:
        with _open(path) as file:
            number, open_quote = 0, False
            numbers: list[int] = []
            block: list[str] = []
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) >= MAX_LINE:
                    raise DataError(f"{path}, line {number}: longer than {MAX_LINE:,} characters; is this a CSV file?")
                if open_quote:
                    block[-1] += line
                elif line.strip():
                    numbers.append(number)
                    block.append(line)
                open_quote ^= line.count('"') % 2 == 1
                if len(block) >= BLOCK_LINES and not open_quote:
                    yield numbers, block
                    numbers, block = [], []
            if open_quote:
                raise DataError(f"{path}: a quotation mark is never closed")
            if block:
                yield numbers, block
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text ({error.reason}); is this a CSV file? Others: iconv -f UTF-16 -t UTF-8 IN > OUT"
        ) from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _parse(lines: list[str], numbers: list[int], delimiter: str | None, table: Table) -> NDArray:
    """float64 (lines, columns); NaN where a value is missing or the column is not used."""
    if not table.codes and len(table.used) == len(table.names):
        try:
            values = np.loadtxt(lines, np.float64, delimiter=delimiter, quotechar='"', comments=None, ndmin=2)
            if values.shape == (len(lines), len(table.names)):
                return values
        except ValueError:
            pass  # the slow way says where and why
    values = np.full((len(lines), len(table.names)), np.nan)
    for row, cells in enumerate(_cells(lines, delimiter)):
        where = f"{table.where}, line {numbers[row]}"
        if len(cells) != len(table.names):
            raise DataError(f"{where}: {len(cells)} cells, expected {len(table.names)}")
        for column in table.used:
            values[row, column] = table.cell(column, cells[column], where)
    return values
