"""Raw columns to standardized ones and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Affine:
    """`(raw - mean) / deviation` per column; `None` leaves the values as they are.

    Raw values that `dtype` cannot hold exactly are standardized in float64 first and rounded once, so that a
    column such as a time stamp, large but narrow, keeps its digits.
    """

    def __init__(self, moments: tuple[NDArray, NDArray] | None, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._exact = moments
        if moments is not None:
            mean, deviation = moments
            self._mean, self._factor = mean.astype(self._dtype), (1.0 / deviation).astype(self._dtype)

    @property
    def identity(self) -> bool:
        """Whether it leaves all values as they are."""
        return self._exact is None

    def apply(self, raw: NDArray, out: NDArray) -> NDArray:
        """Standardize `raw` (rows, columns), any numeric dtype, into `out` of the engine's dtype; return `out`."""
        if self._exact is None:
            out[...] = raw
        elif raw.dtype == self._dtype:
            np.subtract(raw, self._mean, out=out)
            out *= self._factor
        elif np.can_cast(raw.dtype, self._dtype):
            out[...] = raw
            out -= self._mean
            out *= self._factor
        else:
            mean, deviation = self._exact
            out[...] = (raw.astype(np.float64) - mean) / deviation
        return out

    def invert(self, values: NDArray) -> NDArray:
        """Standardized `values` (rows, columns) in raw units, float64."""
        if self._exact is None:
            return values.astype(np.float64)
        mean, deviation = self._exact
        return values * deviation + mean
