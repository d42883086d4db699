"""Which columns of a table are inputs, targets and weights, and what to do with cells that are not numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distmlp.data.blocks import Kinds
from distmlp.data.rows import Rows
from distmlp.errors import ConfigError, DataError

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


@dataclass(frozen=True)
class Selection:
    """What a user says about the columns of CSV, Parquet and two-dimensional NPY sources.

    `inputs`, `targets`: column names (or numbers from 0) separated by commas; targets default to the last
    column, "none" for none; inputs to all that are left. `labels`: the target is a class label and stored
    as an integer. `categories`: column → its values in order, stored as 0, 1, 2, …. `missing`: "" refuses
    missing values, "drop" leaves out their rows, a number stands in for them.
    """

    inputs: str = ""
    targets: str = ""
    weights: str = ""
    labels: bool = False
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    missing: str = ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Table:
    """Turns columns of numbers into rows. `names`: the columns of the source; `where` names it in messages."""

    def __init__(self, names: Sequence[str], selection: Selection, where: str) -> None:
        self.names, self.selection, self.where = list(names), selection, where
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"{where}: two columns are called `{twice}`; rename one")
        for name in selection.categories:
            self._column(name)
        self.weights = self._columns(selection.weights)
        self.targets = self._columns(selection.targets) if selection.targets else [len(self.names) - 1]
        taken = {*self.targets, *self.weights}
        chosen = self._columns(selection.inputs)
        self.inputs = chosen or [k for k in range(len(self.names)) if k not in taken]
        if not self.inputs:
            raise DataError(f"{where}: no column is left for the inputs; it has {self._shown()}")
        if len(self.weights) > 1 or (selection.labels and len(self.targets) != 1):
            raise DataError(f"{where}: expected one column of weights at most, and one target column for class labels")
        categorical = len(self.targets) == 1 and self.names[self.targets[0]] in selection.categories
        self.labels = selection.labels or categorical
        self.codes = {
            self._column(name): {value: code for code, value in enumerate(values)}
            for name, values in selection.categories.items()
        }
        self.used = sorted({*self.inputs, *self.targets, *self.weights})
        self._stand_in = self._replacement()

    @property
    def kinds(self) -> Kinds:
        """What the rows are made of."""
        kinds: Kinds = {"inputs": ((len(self.inputs),), np.dtype(np.float32))}
        if self.targets:
            number = np.dtype(np.float32)
            kinds["targets"] = ((), np.dtype(np.int64)) if self.labels else ((len(self.targets),), number)
        if self.weights:
            kinds["sample_weights"] = ((), np.dtype(np.float32))
        return kinds

    @property
    def exact(self) -> bool:
        """Whether every row comes out."""
        return self.selection.missing != "drop"

    def _replacement(self) -> float | None:
        if self.selection.missing in ("", "drop"):
            return None
        try:
            return float(self.selection.missing)
        except ValueError:
            raise ConfigError(f'--missing {self.selection.missing}: expected "drop" or a number') from None

    def _columns(self, names: str) -> list[int]:
        if names in ("", "none"):
            return []
        return [self._column(name.strip()) for name in ([names] if names in self.names else names.split(","))]

    def _column(self, name: str) -> int:
        if name in self.names:
            return self.names.index(name)
        if name.lstrip("-").isdigit() and -len(self.names) <= int(name) < len(self.names):
            return int(name) % len(self.names)
        raise DataError(f"{self.where}: no column `{name}`; it has {self._shown()} (numbers count from 0)")

    def _shown(self) -> str:
        shown = ", ".join(self.names[:20])
        return f"{shown} and {len(self.names) - 20} more" if len(self.names) > 20 else shown

    def cell(self, column: int, text: str, where: str) -> float:
        """The number in a cell: a number, a category's code, or NaN where the value is missing. Raises DataError."""
        text = text.strip()
        codes = self.codes.get(column)
        if codes is not None:
            if text in codes:
                return codes[text]
            if text.lower() not in MISSING:
                raise DataError(
                    f"{where}, column `{self.names[column]}`: {text!r} is not among its categories {', '.join(codes)}"
                )
            return np.nan
        try:
            return float(text)
        except ValueError:
            if text.lower() in MISSING:
                return np.nan
        comma = text.count(",") > 0 and _is_number(text.replace(",", ""))
        raise DataError(
            f"{where}, column `{self.names[column]}`: {text[:40]!r} is not a number; "
            + (
                "write it with a decimal point and without separators of thousands"
                if comma
                else f"give its values in order with --category {self.names[column]}=first,second,… or leave the "
                "column out with --inputs"
            )
        )

    def rows(self, values: NDArray, numbers: Sequence[int], what: str = "row") -> Rows:
        """Rows of `values` (rows, columns) float64, where NaN means missing. `numbers`: of the rows, for messages."""
        missing = np.isnan(values[:, self.used])
        if missing.any():
            if self._stand_in is not None:
                values = np.where(np.isnan(values), self._stand_in, values)
            elif self.selection.missing == "drop":
                keep = ~missing.any(axis=1)
                values = values[keep]
            else:
                row, place = np.argwhere(missing)[0]
                raise DataError(
                    f"{self.where}, {what} {numbers[row]}, column `{self.names[self.used[place]]}`: "
                    "the value is missing; say what to do with --missing drop, or --missing VALUE"
                )
        self._refuse_infinite(values, numbers, what)
        targets = values[:, self.targets]
        if self.labels:
            if (targets != np.floor(targets)).any():
                bad = targets[targets != np.floor(targets)][0]
                raise DataError(f"{self.where}: class label {bad:g} is not a whole number")
            targets = targets[:, 0].astype(np.int64)
        else:
            targets = targets.astype(np.float32)
        weights = values[:, self.weights[0]].astype(np.float32) if self.weights else None
        return Rows(values[:, self.inputs].astype(np.float32), targets, weights)

    def _refuse_infinite(self, values: NDArray, numbers: Sequence[int], what: str) -> None:
        """Numbers beyond float32, in which rows are stored: "1e400" is read as infinity, "1e39" would become it."""
        beyond = np.abs(values[:, self.used]) > np.finfo(np.float32).max
        if beyond.any():
            row, place = np.argwhere(beyond)[0]
            where = f"{self.where}, {what} {numbers[row]}" if len(numbers) == len(values) else self.where
            raise DataError(
                f"{where}, column `{self.names[self.used[place]]}`: {values[row, self.used[place]]:g} is infinite or "
                "beyond float32, which holds up to 3.4e38; scale the column, or leave the row out"
            )
