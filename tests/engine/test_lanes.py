"""The summation tree: what each rank sends, and that the total has the same bits whoever sends it."""

from __future__ import annotations

import numpy as np
import pytest

from distmlp.engine.lanes import LaneSums, halves, whole_subtrees
from distmlp.engine.tally import TALLY, Sums
from distmlp.network import Network
from distmlp.order import owned_streams

NETWORK = Network.build([3, 2], "relu", "identity")


def total_bits(values, streams, ranks):
    """Bits of the total when `values` (streams, elements) lie on `ranks` ranks."""
    lanes = [LaneSums(NETWORK, streams, ranks, rank, np.float32) for rank in range(ranks)]
    for lane in lanes:
        lane.fill(lambda stream, out: np.copyto(out.buffer, values[stream]))
    message = sum((lane.message for lane in lanes[1:]), lanes[0].message.copy())
    bits = set()
    for lane in lanes:
        lane.message[:] = message
        out = Sums(NETWORK, np.empty(NETWORK.size + TALLY, np.float32))
        lane.total(out)
        bits.add(out.buffer.tobytes())
    assert len(bits) == 1
    return bits.pop()


@pytest.mark.parametrize("streams", [1, 2, 3, 8, 13, 16])
def test_total_has_the_same_bits_at_any_rank_count(streams):
    rng = np.random.default_rng()
    shape = (streams, NETWORK.size + TALLY)
    values = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values[:, :4] = -0.0
    bits = {total_bits(values, streams, ranks) for ranks in range(1, streams + 1)}
    assert len(bits) == 1
    total = np.frombuffer(bits.pop(), np.float32)
    np.testing.assert_allclose(total, values.astype(np.float64).sum(axis=0), rtol=1e-4, atol=1e-1)
    assert not np.signbit(total[:4]).any()


@pytest.mark.parametrize("streams", [1, 5, 16, 37])
def test_whole_subtrees_cover_what_a_rank_owns(streams):
    for ranks in range(1, streams + 1):
        for rank in range(ranks):
            owned = owned_streams(streams, ranks, rank)
            nodes = whole_subtrees(owned, (0, streams))
            assert [stream for node in nodes for stream in range(*node)] == list(owned)


def test_a_rank_sends_few_sums():
    """Two for every level of the tree at most, whatever the number of streams."""
    streams = 1 << 10
    for ranks in (1, 2, 3, 7):
        for rank in range(ranks):
            assert len(whole_subtrees(owned_streams(streams, ranks, rank), (0, streams))) <= 2 * 10
    assert len(LaneSums(NETWORK, 16, 4, 0, np.float32).message) == 4


def test_halves_split_every_node():
    assert halves((0, 2)) == ((0, 1), (1, 2))
    assert halves((3, 6)) == ((3, 5), (5, 6))
