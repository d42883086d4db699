"""Handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels, 10 classes, one fifth for validation.

Source: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998 (extra `demo`).
"""

from __future__ import annotations

import numpy as np
from building import Block, build, parser

from distmlp.comm.policy import guarded
from distmlp.comm.world import open_world
from distmlp.errors import SystemUnfitError
from distmlp.order import mix

VALIDATION_FRACTION = 0.2


def main() -> None:
    """Command line."""
    options = parser(__doc__, "digits").parse_args()
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemUnfitError("the digits come with scikit-learn: pip install 'distmlp[demo]'") from None
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.int64)
    held_out = mix(np.arange(len(labels)), 0) < VALIDATION_FRACTION * 2.0**32
    for part, chosen, shards in (("train", ~held_out, options.shards), ("validation", held_out, 1)):
        x, y = images[chosen], labels[chosen]

        def rows(start: int, stop: int, x: np.ndarray = x, y: np.ndarray = y) -> Block:
            return {"inputs": x[start:stop], "targets": y[start:stop]}

        build(options.out, part, len(y), shards, rows, open_world())


if __name__ == "__main__":
    guarded(main)
