"""Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28 pixels, 10 classes.

Source: H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, arXiv:1708.07747 (MIT licence), as packaged by Debian and
Ubuntu: `apt-get install dataset-fashion-mnist`. The pixels stay bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from building import Block, build, parser

from distmlp.comm.policy import guarded
from distmlp.comm.world import World, open_world
from distmlp.data.arrayfiles import idx_array
from distmlp.errors import DataError

PACKAGE = Path("/usr/share/datasets/fashion-mnist")


def load(path: Path) -> np.ndarray:
    """All values of one IDX file."""
    array = idx_array(path)
    return np.concatenate(list(array.blocks(8192)))


def convert(source: Path, prefix: str, out: Path, part: str, shards: int, world: World) -> None:
    """Images and labels of one part to shards."""
    images, labels = load(source / f"{prefix}-images-idx3-ubyte.gz"), load(source / f"{prefix}-labels-idx1-ubyte.gz")
    if images.shape != (len(labels), 28, 28) or labels.max() > 9:
        raise DataError(f"{source}: {images.shape} images and {labels.shape} labels, expected (N, 28, 28) and (N,)")

    def rows(start: int, stop: int) -> Block:
        return {"inputs": images[start:stop], "targets": labels[start:stop]}

    build(out, part, len(labels), shards, rows, world)


def main() -> None:
    """Command line."""
    made = parser(__doc__, "fashion")
    made.add_argument("--source", type=Path, default=PACKAGE, help="folder of the IDX files (default: %(default)s)")
    options = made.parse_args()
    if not options.source.is_dir():
        raise DataError(
            f"{options.source}: no such folder; install the package with `apt-get install dataset-fashion-mnist`, "
            "give --source with the four IDX files, or use datasets/digits.py"
        )
    world = open_world()
    convert(options.source, "train", options.out, "train", options.shards, world)
    convert(options.source, "t10k", options.out, "test", 1, world)


if __name__ == "__main__":
    guarded(main)
