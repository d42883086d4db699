"""Random networks and batches, the same for the same seed: speed is not to hang on the shapes a kernel was tuned on."""

from __future__ import annotations

import numpy as np

from distmlp.tools.bench import Preset, find_preset

MOST_US = 1500.0  # a step's limit: larger problems would take the whole time
WIDTHS, ENDS, BATCHES = (16, 2048), (2, 1024), (16, 65536)


def draw_shapes(count: int, seed: int) -> list[Preset]:
    """`count` problems: one to eight hidden layers, sizes spread evenly over their logarithms.

    Half of them have hidden layers of one width, in half of those a multiple of 64; the others a width for every
    layer. Batches are powers of two in half of the problems.
    """
    random = np.random.default_rng(seed)

    def size(bounds: tuple[int, int]) -> int:
        return int(np.exp(random.uniform(np.log(bounds[0]), np.log(bounds[1] + 1))))

    shapes: dict[str, Preset] = {}
    while len(shapes) < count:
        depth = int(random.integers(1, 9))
        if random.random() < 0.5:
            width = size(WIDTHS)
            hidden = [width if random.random() < 0.5 else max(64, round(width / 64) * 64)] * depth
        else:
            hidden = [size(WIDTHS) for _ in range(depth)]
        batch = size(BATCHES)
        if random.random() < 0.5:
            batch = 1 << round(np.log2(batch))
        widths = "-".join(map(str, (size(ENDS), *hidden, size(ENDS))))
        shape = find_preset(f"{widths}@{batch}")
        if shape.limit_us <= MOST_US:
            shapes[shape.name] = shape
    return list(shapes.values())
