"""Time all-reduces over the ranks of a job, by themselves; rank 0 prints `[[way, bytes, µs], …]`.

Run as `python -m distmlp.tools.scaling_exchange BYTES [WAY…]` under a launcher: a child of `distmlp scaling`, so
that a way that crashes costs a table and not the report. Ways: `host` (our own sum of host buffers, through MPI),
`device MPI` (MPI's own on GPU memory), `NCCL`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from distmlp.comm.policy import guarded
from distmlp.comm.world import World, open_world

SIZES = (4096, 65536, 1 << 20, 16 << 20)
ROUNDS, SECONDS = 30, 0.2  # a size is timed over so many rounds, fewer where they would take longer than this

Exchange = Callable[[], None]  # one all-reduce, over when it returns


def time_exchange(world: World, exchange: Exchange) -> float:
    """Median µs of the slowest rank; collective, the same on every rank."""
    exchange()  # scratch memory and connections are made at the first use

    def once() -> float:
        world.barrier()
        started = time.perf_counter()
        exchange()
        return time.perf_counter() - started

    slowest = max(world.all_gather(once()))
    took = [once() for _ in range(max(3, min(ROUNDS, int(SECONDS / slowest))))]
    return 1e6 * max(world.all_gather(float(np.median(took))))


def host(world: World) -> Callable[[int], Exchange]:
    """The exchange of the reference engine and of `staged`, without the copies to and from the GPU."""

    def of_size(size_bytes: int) -> Exchange:
        buffer = np.zeros(size_bytes // 4, np.float32)
        return lambda: world.all_reduce(buffer)

    return of_size


def device_mpi(world: World) -> Callable[[int], Exchange]:
    """MPI's all-reduce of GPU memory. For a library that was seen to do it: others crash."""
    import cupy

    def of_size(size_bytes: int) -> Exchange:
        mine, total = cupy.zeros(size_bytes // 4, cupy.float32), cupy.zeros(size_bytes // 4, cupy.float32)
        cupy.cuda.get_current_stream().synchronize()
        return lambda: world.communicator.Allreduce(mine, total)

    return of_size


def nccl(world: World) -> Callable[[int], Exchange]:
    """NCCL's all-reduce, in place."""
    import cupy
    from cupy.cuda import nccl as library

    identity = world.broadcast(library.get_unique_id() if world.rank == 0 else None)
    communicator = library.NcclCommunicator(world.size, identity, world.rank)
    stream = cupy.cuda.Stream(non_blocking=True)

    def of_size(size_bytes: int) -> Exchange:
        buffer = cupy.zeros(size_bytes // 4, cupy.float32)
        cupy.cuda.get_current_stream().synchronize()

        def exchange() -> None:
            communicator.allReduce(
                buffer.data.ptr, buffer.data.ptr, buffer.size, library.NCCL_FLOAT32, library.NCCL_SUM, stream.ptr
            )
            stream.synchronize()

        return exchange

    return of_size


WAYS = {"host": host, "device MPI": device_mpi, "NCCL": nccl}


def main() -> int:
    """Time the ways named on the command line, at sizes around the gradient's own."""
    world = open_world()
    sizes = sorted({*SIZES, max(4, int(sys.argv[1]) // 4 * 4)})
    ways = sys.argv[2:] or ["host"]
    if ways != ["host"]:
        _take_gpu(world)
    results = [(way, size, time_exchange(world, exchange(size)))
               for way in ways for exchange in [WAYS[way](world)] for size in sizes]  # fmt: skip
    if world.rank == 0:
        print(json.dumps(results), flush=True)
    return 0


def _take_gpu(world: World) -> None:
    """This rank's own GPU, as a training run takes it."""
    import cupy

    from distmlp.comm.binding import bind

    cupy.cuda.Device(bind(world, share_gpu=False).ordinal).use()


if __name__ == "__main__":
    guarded(main)
