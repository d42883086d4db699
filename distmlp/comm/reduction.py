"""The all-reduce of host buffers, summed in the order of the ranks by our own additions.

MPI asks for identical results on all ranks only of good implementations, and some algorithms add in an order
that depends on the rank (pmodels/mpich#6538, open-mpi/ompi#11721) or on the layout of processes on nodes.
So MPI moves the numbers and NumPy adds them: sum over ranks 0, 1, 2, … at every element.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 22  # elements in flight at once: bounds the scratch memory and keeps counts far below MPI's 2^31
GATHER_ALL = 1 << 14  # elements up to which every rank adds everything: one message round instead of two


class Reducer:
    """Sums buffers over the ranks of `communicator`, keeping its scratch buffers between calls."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._rank: int = communicator.rank
        self._size: int = communicator.size
        self._scratch: dict[Any, NDArray] = {}

    def sum(self, buffer: NDArray) -> None:
        """Sum `buffer` (contiguous, float16/32/64 or integers) over the ranks, in place.

        float16, for which MPI has no type, is summed in float32. Raises ValueError and TypeError for what
        it cannot sum.
        """
        if not buffer.flags.c_contiguous:
            raise ValueError("all_reduce needs a contiguous buffer")
        if buffer.dtype.kind not in "fiu" or not buffer.dtype.isnative or buffer.dtype.itemsize > 8:
            raise TypeError(f"all_reduce sums native float16, float32, float64 and integers, not {buffer.dtype}")
        flat = buffer.reshape(-1)
        for start in range(0, flat.size, PIECE):
            piece = flat[start : start + PIECE]
            if piece.dtype == np.float16:
                wide = piece.astype(np.float32)
                self._sum_piece(wide)
                piece[:] = wide
            else:
                self._sum_piece(piece)

    def _sum_piece(self, piece: NDArray) -> None:
        # overflow is a value here (inf is found later by all ranks alike), not a reason to warn
        with np.errstate(all="ignore"):
            if self._size == 2:
                self._swap(piece)
            elif piece.size <= GATHER_ALL:
                self._gather_all(piece)
            else:
                self._scatter_gather(piece)

    def _swap(self, piece: NDArray) -> None:
        """Two ranks: a + b has the same bits as b + a (but for the payload of a NaN, so keep the order)."""
        other = 1 - self._rank
        received = self._buffer(piece.size, piece.dtype)
        self._communicator.Sendrecv(piece, other, 0, received, other, 0)
        first, second = (piece, received) if self._rank == 0 else (received, piece)
        np.add(first, second, out=piece)

    def _gather_all(self, piece: NDArray) -> None:
        parts = self._buffer(self._size * piece.size, piece.dtype).reshape(self._size, -1)  # (ranks, elements)
        self._communicator.Allgather(piece, parts)
        _add_rows(parts, piece)

    def _scatter_gather(self, piece: NDArray) -> None:
        """Every rank adds its own share of the elements, then all shares are passed on: 2 N (size-1)/size moved."""
        share = -(-piece.size // self._size)
        starts = [min(rank * share, piece.size) for rank in range(self._size + 1)]
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        own = piece[starts[self._rank] : starts[self._rank + 1]]
        parts = self._buffer(self._size * own.size, piece.dtype).reshape(self._size, -1)  # (ranks, own elements)
        self._communicator.Alltoallv(
            (piece, (counts, starts[:-1])),
            (parts, ([own.size] * self._size, [rank * own.size for rank in range(self._size)])),
        )
        _add_rows(parts, own)
        result = self._buffer(piece.size, piece.dtype, "result")
        self._communicator.Allgatherv(own, (result, (counts, starts[:-1])))
        piece[:] = result

    def _buffer(self, size: int, dtype: Any, use: str = "") -> NDArray:
        scratch = self._scratch.get((dtype, use))
        if scratch is None or scratch.size < size:
            scratch = self._scratch[dtype, use] = np.empty(size, dtype)
        return scratch[:size]


def _add_rows(parts: NDArray, out: NDArray) -> None:
    np.add(parts[0], parts[1], out=out)
    for row in parts[2:]:
        np.add(out, row, out=out)
