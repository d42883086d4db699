"""Sums over the streams in a tree that no number of ranks can change (`reproducible = "ranks"`).

Every stream's sums are a leaf. Whatever ranks there are, the same leaves are added in the same pairs, so the
total has the same bits. A rank owns a contiguous range of streams; it adds up the largest whole subtrees
inside its range and sends only these. In the message every subtree has a place of its own, which the other
ranks leave zero: the all-reduce then only adds zeros, and its order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmlp.engine.tally import TALLY, Sums
from distmlp.network import Network
from distmlp.order import owned_streams

Node = tuple[int, int]  # the streams [first, last)


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node with more than one stream."""
    middle = (node[0] + node[1] + 1) // 2
    return (node[0], middle), (middle, node[1])


def whole_subtrees(owned: range, root: Node) -> list[Node]:
    """The largest nodes of the tree below `root` that lie in `owned`, left to right."""
    if owned.stop <= root[0] or root[1] <= owned.start:
        return []
    if owned.start <= root[0] and root[1] <= owned.stop:
        return [root]
    left, right = halves(root)
    return whole_subtrees(owned, left) + whole_subtrees(owned, right)


class LaneSums:
    """The message of one rank of `ranks`, and the tree that turns the reduced message into the total."""

    def __init__(self, network: Network, streams: int, ranks: int, rank: int, dtype: DTypeLike) -> None:
        self._root = (0, streams)
        nodes = [
            (owner, node)
            for owner in range(ranks)
            for node in whole_subtrees(owned_streams(streams, ranks, owner), self._root)
        ]
        self.message: NDArray = np.zeros((len(nodes), network.size + TALLY), dtype)
        self._places = {node: Sums(network, row) for (_, node), row in zip(nodes, self.message, strict=True)}
        self._mine = [node for owner, node in nodes if owner == rank]
        levels = (streams - 1).bit_length()
        self._spare = [Sums(network, np.zeros(network.size + TALLY, dtype)) for _ in range(levels)]

    @property
    def first(self) -> Sums:
        """A place of this rank, for what it says about itself."""
        return self._places[self._mine[0]]

    def fill(self, leaf: Callable[[int, Sums], None]) -> None:
        """Put this rank's sums into the message; `leaf(stream, out)` writes those of one stream."""

        def compute(node: Node, out: Sums) -> bool:
            if node[1] - node[0] > 1:
                return False
            leaf(node[0], out)
            return True

        self.message[:] = 0
        for node in self._mine:
            _tree_sum(node, compute, self._places[node], self._spare)

    def total(self, out: Sums) -> None:
        """Write the sums over all streams to `out`, from the reduced message."""

        def look_up(node: Node, out: Sums) -> bool:
            if node not in self._places:
                return False
            out.buffer[:] = self._places[node].buffer
            return True

        _tree_sum(self._root, look_up, out, self._spare)
        out.buffer += 0  # whether a zero kept its sign depends on who added zeros to it


def _tree_sum(node: Node, leaf: Callable[[Node, Sums], bool], out: Sums, spare: Sequence[Sums]) -> None:
    """Write the sum below `node` to `out`. `leaf(node, out)` fills `out` and returns True where it can."""
    if leaf(node, out):
        return
    left, right = halves(node)
    _tree_sum(left, leaf, out, spare[1:])
    _tree_sum(right, leaf, spare[0], spare[1:])
    out.buffer += spare[0].buffer
