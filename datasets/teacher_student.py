"""Teacher and student: targets are a random network's outputs plus noise of known strength, any number of rows.

The inputs are standard normal; the teacher has one hidden layer of tanh units. No student can reach a mean
squared error below `noise` squared on new rows: the noise floor.
"""

from __future__ import annotations

import numpy as np
from building import DRAW_ROWS, Block, build_both, draws, sized_parser

from distmlp.comm.policy import guarded

TEACHER = 1 << 32  # a block number beyond every block of rows


class Teacher:
    """`outputs = tanh(inputs @ first + shift) @ second`, scaled so that outputs have a variance of about 1."""

    def __init__(self, features: int, hidden: int, outputs: int, seed: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=[seed & 0xFFFFFFFFFFFFFFFF, TEACHER]))
        self.first = generator.normal(0.0, features**-0.5, (features, hidden))
        self.shift = generator.normal(0.0, 0.5, hidden)
        self.second = generator.normal(0.0, (0.45 * hidden) ** -0.5, (hidden, outputs))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Outputs (rows, outputs) without noise, of inputs (rows, features)."""
        return np.tanh(inputs @ self.first + self.shift) @ self.second


def main() -> None:
    """Command line."""
    made = sized_parser(__doc__, "teacher_student", 100_000, 10_000)
    made.add_argument("--features", type=int, default=16, help="(default: %(default)s)")
    made.add_argument("--hidden", type=int, default=16, help="units of the teacher (default: %(default)s)")
    made.add_argument("--outputs", type=int, default=2, help="(default: %(default)s)")
    made.add_argument("--noise", type=float, default=0.1, help="standard deviation (default: %(default)s)")
    options = made.parse_args()
    features, outputs = options.features, options.outputs
    teacher = Teacher(features, options.hidden, outputs, options.seed)

    def rows(start: int, stop: int) -> Block:
        shape = (DRAW_ROWS, features + outputs)
        random = draws(options.seed, start, stop, lambda generator: generator.normal(size=shape))
        inputs, noise = random[:, :features].astype(np.float32), random[:, features:]
        return {"inputs": inputs, "targets": (teacher(inputs) + options.noise * noise).astype(np.float32)}

    build_both(options, rows)


if __name__ == "__main__":
    guarded(main)
