"""The transport `peer` on several hosts: ranks of a host add up their gradients in peer memory, the first of them goes
on with those of the other hosts by MPI, and what it has then is spread in the host. One launch and one sum a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numpy.typing import NDArray

from distmlp.comm.device_sums import Sum
from distmlp.comm.host_ranks import HostRanks, open_leaders
from distmlp.engine.gpu import Gpu
from distmlp.engine.peers import PeerSum, prove
from distmlp.engine.reduction import Reduction, sum_by

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.engine.fused_state import DeviceState


class HostsSum:
    """A `Sum`: in the order of the ranks within a host, then in the order of the hosts. The same bits everywhere."""

    def __init__(self, peers: PeerSum, between: Sum | None) -> None:
        """`between`: over the first ranks of the hosts; None on the others."""
        self._peers, self._between = peers, between
        self.name = f"peer memory in hosts, {between.name} between them" if between else "peer memory in hosts"
        self.seconds = 0.0

    def run(self, address: int, count: int) -> None:
        self._peers.run(address, count)
        if self._between:
            self._between.run(address, count)  # waits for the device itself
        self._peers.spread()

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        self._peers.start_outcome()
        with self._peers.inside():
            self._peers.tail(address, count, tail)
        self._peers.end_outcome()
        self.seconds = self._peers.seconds + (self._between.seconds if self._between else 0.0)

    def close(self) -> None:
        self._peers.close()
        if self._between:
            self._between.close()


def open_hosts(state: DeviceState, world: World, between: str, stall_timeout: str) -> tuple[Reduction, str]:
    """The sum over several hosts, tried, and a few words on it. Collective. `between`: mpi or staged.

    Raises AgreedError where it does not work.
    """
    gpu, leaders = Gpu(state.ledger), open_leaders(world)
    peers = PeerSum(state, HostRanks(world), inside=False)
    inner = world.agree(lambda: sum_by(between, state, gpu, leaders) if leaders else (None, ""), "peer between hosts")
    summation = HostsSum(peers, inner[0])
    what = "peer memory in hosts and MPI between them", "mpi, nccl or staged"
    note = prove(summation, peers, state, world, what, stall_timeout)
    return Reduction(state, summation), f"{len(world.hosts)} hosts, {between} between their first ranks; {note}"
