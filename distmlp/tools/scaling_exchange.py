"""Time all-reduces of host buffers over the ranks of a job; rank 0 prints `[[bytes, µs], …]`.

Run as `python -m distmlp.tools.scaling_exchange GRADIENT_BYTES` under a launcher: a child of `distmlp scaling`.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from distmlp.comm.policy import guarded
from distmlp.comm.world import World, open_world

SIZES = (4096, 65536, 1 << 20, 16 << 20)
ROUNDS, SECONDS = 30, 0.2  # a size is timed over so many rounds, fewer where they would take longer than this


def time_all_reduces(world: World, sizes: list[int]) -> list[tuple[int, float]]:
    """`(bytes, median µs)` of float32 sums of these sizes; collective, the same on every rank."""
    results = []
    for size in sizes:
        buffer = np.ones(size // 4, np.float32)
        world.all_reduce(buffer)  # scratch memory and connections are made at the first use
        world.barrier()
        started = time.perf_counter()
        world.all_reduce(buffer)
        once = max(world.all_gather(time.perf_counter() - started))
        took = []
        for _ in range(max(3, min(ROUNDS, int(SECONDS / once)))):
            buffer.fill(1.0)
            world.barrier()
            started = time.perf_counter()
            world.all_reduce(buffer)
            took.append(time.perf_counter() - started)
        results.append((size, 1e6 * max(world.all_gather(float(np.median(took))))))
    return results


def main() -> int:
    """Time the sizes of interest around the gradient's own."""
    world = open_world()
    sizes = sorted({*SIZES, max(4, int(sys.argv[1]) // 4 * 4)})
    results = time_all_reduces(world, sizes)
    if world.rank == 0:
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    guarded(main)
