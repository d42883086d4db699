"""The transport `peer`: the ranks of one host sum their gradients inside the step's kernel (kernels/peers.cuh).

Every rank opens a piece of its GPU's memory, its mailbox, to the others by CUDA IPC; MPI carries the handles. The
piece comes from plain `cudaMalloc`: memory of a pool would share its handle with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.comm.device_sums import Sum
from distmlp.comm.faults import name_ranks
from distmlp.comm.host_ranks import HostRanks
from distmlp.comm.peer_watch import PeerWatch
from distmlp.comm.transport_trial import describe, try_sums
from distmlp.engine import layout
from distmlp.engine.device_memory import allocate, pinned
from distmlp.engine.gpu import Gpu
from distmlp.engine.tally import TALLY
from distmlp.errors import SystemUnfitError
from distmlp.interval import Interval

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.engine.fused_state import DeviceState

T = TypeVar("T")
_runtime = cupy.cuda.runtime
PAGE = 2 << 20  # smaller allocations share pages, and with them handles
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
TRIAL_SECONDS = 5.0
_kept: list[cupy.cuda.MemoryPointer] = []  # mailboxes that other ranks may still have open


class PeerSum:
    """This rank's mailbox, the others' as it reaches them, and the kernel's exchange alone (a `Sum`, for trials)."""

    name = "peer memory"

    def __init__(self, state: DeviceState, world: World | HostRanks, inside: bool = True) -> None:
        """Collective. `inside`: steps sum inside their kernel, not between two launches.

        Raises AgreedError where the GPUs do not reach each other's memory.
        """
        self._inside = inside
        self._state, self._world, self._ledger = state, world, state.ledger
        self._count = state.network.size + TALLY
        special = state.plan.joined or state.plan.special
        tallies = state.plan.blocks * TALLY  # one a block of the general kernel
        self._stride = max(self._count + tallies, getattr(special, "peer_words", 0))  # floats of an inbox
        self._opened: list[int] = []
        self._gone = pinned(4).view(np.uint32)
        self._gone[0] = 0
        self._votes = pinned(layout.POST["votes"].itemsize).view(np.float32)
        self._post = pinned(layout.POST.itemsize).view(layout.POST)
        self.seconds = 0.0
        grids = world.all_gather((state.plan.blocks, special.blocks if special else 0))

        def compare() -> None:
            if len(set(grids)) > 1:  # a block hears of the same block on the other ranks
                raise SystemUnfitError("the ranks' GPUs differ in size; use --set run.transport=nccl or staged")

        world.agree(compare, "peer")
        handle = world.agree(self._make_mailbox, "peer")
        handles = world.all_gather(handle)  # all ranks are here: none uses an earlier mailbox any more
        _kept.clear()
        mailboxes = world.agree(lambda: self._open(handles), "peer")
        self._peers = np.zeros((), layout.PEERS)
        self._peers["mailbox"][: world.size] = mailboxes
        self._peers["gone"], self._peers["stride"] = self._gone.ctypes.data, self._stride
        self._peers["ranks"], self._peers["rank"] = world.size, world.rank
        self.watch = PeerWatch(world, self._tell_kernel)
        self.limit(TRIAL_SECONDS)

    def limit(self, seconds: float) -> None:
        """How long a kernel waits for the slowest rank before it gives up."""
        self._peers["limit_ns"] = round(seconds * 1e9)
        if self._inside:
            self._sum = self._state.join_peers(self._peers)
        else:
            self._sum, self._spread = self._state.share_peers(self._peers)

    def _make_mailbox(self) -> bytes:
        size = layout.POST.itemsize + 2 * self._world.size * self._stride * 4
        self._mailbox = allocate(-(-size // PAGE) * PAGE, "what the ranks send each other")
        stream = self._ledger.stream
        self._mailbox.memset_async(0xFF, size, stream)  # unwritten
        self._mailbox.memset_async(0, layout.POST.itemsize, stream)
        stream.synchronize()
        return _explained(lambda: _runtime.ipcGetMemHandle(self._mailbox.ptr))

    def _open(self, handles: list[bytes]) -> list[int]:
        def place(rank: int) -> int:
            if rank == self._world.rank:
                return self._mailbox.ptr
            self._opened.append(_explained(lambda: _runtime.ipcOpenMemHandle(handles[rank], LAZY_PEER_ACCESS)))
            return self._opened[-1]

        return [place(rank) for rank in range(len(handles))]

    def _tell_kernel(self) -> None:
        self._gone[0] = 1

    def run(self, address: int, count: int) -> None:
        """Sum the gradient buffer with the ranks; only there, and all of it."""
        self._sum()

    def inside(self) -> AbstractContextManager[None]:
        """Around what waits for the other ranks."""
        return self._world.inside("all_reduce")

    def spread(self) -> None:
        """Give all ranks what the first one has made of the sum."""
        self._spread()

    def tail(self, address: int, count: int, tail: NDArray) -> None:
        self._ledger.download(address + (count - tail.size) * 4, tail)

    def vote(self, stop: bool, failed: bool, seconds: float) -> None:
        """What this rank says in the exchanges of the launch to come. `seconds`: its time a step so far."""
        self._votes[:3] = stop, failed, seconds
        self._ledger.upload(self._mailbox.ptr + layout.offset(layout.POST, "votes"), self._votes)

    def outcome(self) -> NDArray:
        """The ranks' votes (stop, failed, seconds a step) summed in the last exchange, float32 (3,).

        Raises SystemUnfitError where the kernel gave up on a rank.
        """
        self._ledger.download(self._mailbox.ptr, self._post)
        return self.end_outcome()

    def start_outcome(self) -> None:
        """Queue the look at what came of it; `end_outcome` once something queued later is there."""
        self._ledger.start_download(self._mailbox.ptr, self._post)

    def end_outcome(self) -> NDArray:
        """As `outcome`."""
        post = self._post[0]
        self.seconds = float(post["waited_ns"]) * 1e-9
        if post["lost"]:
            if self.watch.gone:
                raise SystemUnfitError(
                    f"{self._name_gone()}: ended while the other ranks "
                    "waited for its gradients; checkpoints are intact, continue with --resume"
                )
            raise SystemUnfitError(
                f"a rank sent no gradients for {float(self._peers['limit_ns']) * 1e-9:.0f} s (run.stall_timeout); "
                "checkpoints are intact"
            )
        return post["totals"][:3].copy()

    def _name_gone(self) -> str:
        gone = sorted(self.watch.gone)
        if isinstance(self._world, HostRanks):
            return name_ranks(*self._world.name(gone))
        return name_ranks(gone, self._world.rank_hosts)

    def close(self) -> None:
        """Close what belongs to others. Own memory stays until all ranks must have done the same."""
        self.watch.close()
        for place in self._opened:
            _runtime.ipcCloseMemHandle(place)
        self._opened = []
        _kept.append(self._mailbox)
        self._gone, self._votes, self._post = self._gone.copy(), self._votes.copy(), self._post.copy()


def open_peers(state: DeviceState, world: World, stall_timeout: str) -> tuple[PeerSum, str]:
    """The exchange by peer memory, tried, and a few words on it. Collective. Raises AgreedError where it fails."""
    peers = PeerSum(state, world)
    what = "the GPUs do not reach each other's memory", "nccl or staged"
    return peers, prove(peers, peers, state, world, what, stall_timeout)


def prove(
    summation: Sum, peers: PeerSum, state: DeviceState, world: World, otherwise: tuple[str, str], stall_timeout: str
) -> str:
    """Try `summation`, which `peers` has a part in and which waits for `stall_timeout` from then on; a few words on it.

    Collective. Raises AgreedError where it fails, and closes it: `otherwise` is what does not work then, and by what
    transports to go on.
    """
    buffer, count = state.reduced
    outcomes = try_sums([summation], Gpu(state.ledger), world, state.arena.address(buffer), count)
    fault = "no answer in a trial" if any(world.all_gather(_lost(peers))) else outcomes[0].fault
    if fault:
        summation.close()

        def refuse() -> None:
            raise SystemUnfitError(
                f"{otherwise[0]}: {fault}; use --set run.transport={otherwise[1]}, and let `distmlp doctor` look at "
                "the GPUs' access to each other"
            )

        world.agree(refuse)
    peers.limit(Interval.parse(stall_timeout).seconds)
    return describe(outcomes, 0, count)


def _lost(peers: PeerSum) -> bool:
    try:
        peers.outcome()
    except SystemUnfitError:
        return True
    return False


def _explained(function: Callable[[], T]) -> T:
    """`function()`, with the errors of CUDA IPC as SystemUnfitError."""
    try:
        return function()
    except _runtime.CUDARuntimeError as error:
        raise SystemUnfitError(
            f"CUDA IPC does not work here ({error}): every rank must see the GPUs of its host's other ranks "
            "(CUDA_VISIBLE_DEVICES, containers with an IPC namespace each); --set run.transport=nccl or staged"
        ) from None
