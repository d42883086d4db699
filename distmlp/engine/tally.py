"""The tail behind the flat gradient, so that one all-reduce a step moves everything the ranks must agree on.

The buffer of a step is `Network.size` gradient elements, then `TALLY` numbers. Every rank fills in its own
part; after the sum all ranks hold the same numbers and take the same decisions.
"""

from __future__ import annotations

from numpy.typing import NDArray

from distmlp.network import Network

TALLY = 8  # elements behind the gradient; those not named below are zero

LOSS = 0  # weighted sum of the per-row losses
WEIGHT = 1  # sum of the sample weights
ROWS = 2
STOP = 3  # ranks that ask to stop after this step
FAILED = 4  # ranks that could not read their rows of the batch
SECONDS = 5  # a step, by the ranks' clocks
UNSURE = 6  # ranks that cannot say beforehand that their gradients are finite


class Sums:
    """Named views into one such buffer, `(network.size + TALLY,)`."""

    def __init__(self, network: Network, buffer: NDArray) -> None:
        self.buffer = buffer
        self.gradient, self.tally = buffer[: network.size], buffer[network.size :]
        self.layers = network.views(self.gradient)
