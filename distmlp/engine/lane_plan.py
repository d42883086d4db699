"""`reproducible = "ranks"` on the GPU: streams are computed one after another and added in the tree of lanes.py. Pure.

A kernel does the tree with a stack (kernels/lanes.cuh): a lane's sums go on top, then so many pairs from the top down
are added as subtrees end there. What a rank sends are its largest whole subtrees, a row of the message each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distmlp.engine.lanes import Node, halves, whole_subtrees
from distmlp.order import owned_streams

LANE = np.dtype([("place", "i4"), ("level", "i4"), ("merges", "i4"), ("padding", "i4")])  # in kernels/params.cuh


class LanePlan:
    """What one rank of `ranks` adds up of `streams` streams, and how the message of all ranks becomes the total."""

    def __init__(self, streams: int, ranks: int, rank: int) -> None:
        self.owned = owned_streams(streams, ranks, rank)
        self.count = len(self.owned)
        self.most = -(-streams // ranks)  # of any rank
        root = (0, streams)
        nodes = [
            (owner, node)
            for owner in range(ranks)
            for node in whole_subtrees(owned_streams(streams, ranks, owner), root)
        ]
        self.nodes = len(nodes)  # rows of the message
        self.rows = self.nodes + (streams - 1).bit_length()  # and of the stack above them
        self.table = np.zeros(self.count + self.nodes, LANE)  # of every own lane, then of every node
        lane = 0
        for place, (owner, node) in enumerate(nodes):
            if owner == rank:
                merges = endings(node, {(stream, stream + 1) for stream in range(*node)})
                part = self.table[lane : lane + len(merges)]
                part["place"], part["merges"], part["level"] = place, merges, _levels(merges)
                lane += len(merges)
        part = self.table[lane:]
        part["place"] = np.arange(self.nodes)
        part["merges"] = endings(root, {node for _, node in nodes})
        part["level"] = _levels(list(part["merges"]))

    def split(self, bounds: NDArray, firsts: NDArray) -> tuple[NDArray, NDArray]:
        """First position and number of rows of every lane of some batches, int64 (batches × lanes,) both.

        `bounds` (batches + 1,) counts this rank's rows of the epoch before each batch, `firsts` (batches,) says where
        they begin. Lane l has every `count`-th row, from the first one on that is row l of a round over the streams.
        """
        before, size = bounds[:-1, None], np.diff(bounds)[:, None]
        offset = (np.arange(self.count) - before) % self.count
        return (firsts[:, None] + offset).ravel(), np.maximum(0, -((offset - size) // self.count)).ravel()


def endings(root: Node, leaves: set[Node]) -> list[int]:
    """How many nodes below `root`, itself included, end with each of `leaves`, which cover it, from left to right."""
    if root in leaves:
        return [0]
    left, right = (endings(half, leaves) for half in halves(root))
    right[-1] += 1
    return left + right


def _levels(merges: list[int]) -> list[int]:
    """The height of the stack before each leaf."""
    return [number - sum(merges[:number]) for number in range(len(merges))]
