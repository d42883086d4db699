"""Which rows make up every batch: a pure function of (seed, epoch) and the configuration.

The rows are cut into `streams` contiguous ranges of equal length (the first `rows % streams` of them one
longer). Position p of an epoch is row p // streams of stream p % streams; batch g is positions
g * batch to (g + 1) * batch - 1. A rank owns a contiguous range of whole streams, so the batches are the
same at any number of ranks.

Within a stream, blocks of `BLOCK_ROWS` consecutive rows are shuffled, then the rows inside each window of
`WINDOW_BLOCKS` shuffled blocks. Both shuffles are keyed bijections that are evaluated point by point
(no table, no state), so the host and a GPU thread get the same row for the same position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 256
WINDOW_BLOCKS = 16
WINDOW_ROWS = BLOCK_ROWS * WINDOW_BLOCKS
ROUNDS = 6

_U32 = np.uint32


def mix(value: NDArray | int, key: NDArray | int) -> NDArray:
    """32-bit finalizer of MurmurHash3 over `value` xor `key`; uint32 in, uint32 out."""
    with np.errstate(over="ignore"):
        x = np.asarray(value, _U32) ^ np.asarray(key, _U32)
        x ^= x >> _U32(16)
        x *= _U32(0x85EBCA6B)
        x ^= x >> _U32(13)
        x *= _U32(0xC2B2AE35)
        x ^= x >> _U32(16)
        return x


def permutation_key(seed: int, epoch: int, stream: NDArray | int, window: NDArray | int) -> NDArray:
    """The 32-bit key of a shuffle. `window` 0 shuffles the blocks of `stream`, w + 1 the rows of window w."""
    key = mix(seed & 0xFFFFFFFF, 0x9E3779B9)
    with np.errstate(over="ignore"):
        for part in (seed >> 32, epoch, stream, window):
            key = mix(key, np.asarray(part, _U32) * _U32(0x9E3779B9) + _U32(0x7F4A7C15))
    return key


def permute(index: NDArray, size: NDArray | int, key: NDArray | int) -> NDArray:
    """Keyed bijection of [0, size): `index` (int64, elementwise below `size`, which is below 2**62) to int64.

    A Feistel network on the a x b grid that just holds `size` (a = ceil(sqrt(size)), b = ceil(size / a)),
    with cycle walking for the few points beyond it (Black & Rogaway 2002).
    """
    index = np.asarray(index, np.int64)
    if np.ndim(size):
        index, size, key = np.broadcast_arrays(index, np.asarray(size, np.int64), key)
    elif np.ndim(key):
        index, key = np.broadcast_arrays(index, key)
    size = np.asarray(size, np.int64)
    side_a = np.maximum(np.ceil(np.sqrt(size.astype(np.float64))).astype(np.int64), 1)
    side_b = np.maximum(-(-size // side_a), 1)
    limits = [np.asarray(part).reshape(-1) for part in (side_a, side_b, key, size)]
    out = _feistel(index.reshape(-1), *limits[:3])
    todo = np.flatnonzero(out >= limits[3])
    while todo.size:
        some = [part if part.size == 1 else part[todo] for part in limits]
        out[todo] = _feistel(out[todo], *some[:3])
        todo = todo[out[todo] >= some[3]]
    return out.reshape(index.shape)


def _feistel(value: NDArray, side_a: NDArray, side_b: NDArray, key: NDArray) -> NDArray:
    """`side_a`, `side_b` and `key`: one element, which is much the fastest, or as many as `value`."""
    above = value // side_b
    left, right = above.astype(_U32), (value - above * side_b).astype(_U32)  # < a, < b
    a, b, key = side_a.astype(_U32), side_b.astype(_U32), key.astype(_U32)
    for turn in range(0, ROUNDS, 2):
        with np.errstate(over="ignore"):
            even, odd = key + _U32(turn * 0x632BE5AB & 0xFFFFFFFF), key + _U32((turn + 1) * 0x632BE5AB & 0xFFFFFFFF)
        left = _sum_within(left, mix(right, even), a)
        right = _sum_within(right, mix(left, odd), b)
    return left.astype(np.int64) * side_b + right


def _sum_within(part: NDArray, noise: NDArray, side: NDArray) -> NDArray:
    """`(part + noise) % side` without more than 32 bits, of which NumPy does more at a time; part < side < 2**31."""
    total = part + (noise - noise // side * side)  # < 2 * side; NumPy is faster at dividing than at remainders
    return np.minimum(total, total - side)  # which is huge where it is below 0


def owned_streams(streams: int, ranks: int, rank: int) -> range:
    """The contiguous range of streams that `rank` of `ranks` owns, as even as can be."""
    base, extra = divmod(streams, ranks)
    first = rank * base + min(rank, extra)
    return range(first, first + base + (rank < extra))


@dataclass(frozen=True)
class Order:
    """The sample order of a run: `rows` rows in `streams` streams, global batches of `batch` rows."""

    rows: int
    streams: int
    batch: int
    seed: int
    shuffle: bool

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows // self.batch)

    def batch_size(self, number: int) -> int:
        """Rows of global batch `number` of an epoch; only the last may be short."""
        return min(self.batch, self.rows - number * self.batch)

    def stream_start(self, stream: int) -> int:
        """First row of `stream`; `stream_start(streams)` is `rows`."""
        base, extra = divmod(self.rows, self.streams)
        return stream * base + min(stream, extra)

    def stream_length(self, stream: int) -> int:
        return self.stream_start(stream + 1) - self.stream_start(stream)

    def owned_rows(self, streams: range) -> range:
        """The contiguous rows of a contiguous range of streams."""
        return range(self.stream_start(streams.start), self.stream_start(streams.stop))

    def rows_at(self, epoch: int, positions: NDArray) -> NDArray:
        """Global row (int64) that stands at each of `positions` (int64) of `epoch`."""
        positions = np.asarray(positions, np.int64)
        stream, place = positions % self.streams, positions // self.streams
        base, extra = divmod(self.rows, self.streams)
        start, length = stream * base + np.minimum(stream, extra), base + (stream < extra)
        if not self.shuffle:
            return start + place
        window = place // WINDOW_ROWS
        window_start = window * WINDOW_ROWS
        window_size = np.minimum(WINDOW_ROWS, length - window_start)
        key = permutation_key(self.seed, epoch, stream, window + 1)
        place = window_start + permute(place - window_start, window_size, key)
        block, offset = place // BLOCK_ROWS, place % BLOCK_ROWS
        full_blocks = length // BLOCK_ROWS  # a short last block keeps its place at the end
        whole = block < full_blocks
        key = permutation_key(self.seed, epoch, stream, 0)
        moved = permute(np.where(whole, block, 0), np.maximum(full_blocks, 1), key)
        return start + np.where(whole, moved, block) * BLOCK_ROWS + offset

    def windows_runs(self, epoch: int, streams: range, first: int, count: int) -> NDArray:
        """`window_runs` of those of windows `first` to `first + count - 1` that are whole in all of `streams`, stream
        after stream: int64 (windows, runs, 2)."""
        each = WINDOW_ROWS // BLOCK_ROWS
        shortest = min(self.stream_length(streams.start), self.stream_length(streams.stop - 1))
        windows = max(0, min(first + count, shortest // WINDOW_ROWS) - first)
        runs = np.full((windows, len(streams), each, 2), BLOCK_ROWS, np.int64)
        for _, same in self._by_length(streams):
            blocks = self._blocks(epoch, same, first * each, (first + windows) * each)
            place = slice(same.start - streams.start, same.stop - streams.start)
            runs[:, place, :, 0] = blocks.reshape(len(same), windows, each).transpose(1, 0, 2)
        return runs.reshape(windows, len(streams) * each, 2)

    def window_runs(self, epoch: int, streams: range, number: int) -> list[NDArray]:
        """Window `number` of every one of `streams` as it is read: first global row and rows of every block, int64
        (runs, 2)."""
        first, found = number * WINDOW_ROWS, []
        for length, same in self._by_length(streams):
            count = max(0, min(WINDOW_ROWS, length - first))
            begin, whole = first // BLOCK_ROWS, count // BLOCK_ROWS
            rest = count % BLOCK_ROWS  # of a short last block, which keeps its place at the end
            runs = np.full((len(same), whole + (rest > 0), 2), BLOCK_ROWS, np.int64)
            runs[:, :whole, 0] = self._blocks(epoch, same, begin, begin + whole)
            if rest:
                runs[:, -1, 0] = [self.stream_start(stream) + length // BLOCK_ROWS * BLOCK_ROWS for stream in same]
                runs[:, -1, 1] = rest
            found += list(runs)
        return found

    def _by_length(self, streams: range) -> list[tuple[int, range]]:
        """Their one or two lengths, and which of them are so long."""
        cut = min(max(self.rows % self.streams, streams.start), streams.stop)
        parts = [range(streams.start, cut), range(cut, streams.stop)]
        return [(self.stream_length(part.start), part) for part in parts if part]

    def _blocks(self, epoch: int, streams: range, first: int, stop: int) -> NDArray:
        """First global row of the whole blocks that stand at places `first` to `stop - 1` among those of each of some
        streams of one length, int64 (streams, blocks)."""
        places = np.arange(first, stop, dtype=np.int64)[None]
        if self.shuffle and places.size:
            whole = self.stream_length(streams.start) // BLOCK_ROWS
            places = permute(places, whole, permutation_key(self.seed, epoch, np.array(streams), 0)[:, None])
        return np.array([self.stream_start(stream) for stream in streams])[:, None] + places * BLOCK_ROWS

    def window_places(self, epoch: int, stream: int, number: int) -> NDArray:
        """Which of the rows that `window_runs` names, one after the other, stands at each place, int64 (rows,).

        Together the same as `rows_at` for these positions, at a fraction of its time.
        """
        places = np.arange(min(WINDOW_ROWS, self.stream_length(stream) - number * WINDOW_ROWS), dtype=np.int64)
        if not self.shuffle or not len(places):
            return places
        return permute(places, len(places), permutation_key(self.seed, epoch, stream, number + 1))

    def batch_positions(self, number: int, streams: range) -> NDArray:
        """Epoch positions (int64, ascending) of batch `number` that lie in `streams`."""
        first = number * self.batch
        positions = np.arange(first, first + self.batch_size(number), dtype=np.int64)
        stream = positions % self.streams
        return positions[(stream >= streams.start) & (stream < streams.stop)]

    def batch_rows(self, epoch: int, number: int, streams: range) -> NDArray:
        """Global rows (int64, in position order) of batch `number` of `epoch` that lie in `streams`."""
        return self.rows_at(epoch, self.batch_positions(number, streams))
