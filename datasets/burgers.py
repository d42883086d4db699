"""Burgers' equation u_t + u u_x = v u_xx on -1 < x < 1, u(x, 0) = -sin(pi x): (x, t, log10 v) to u, exact.

The Cole-Hopf transformation turns it into the heat equation, whose solution is two integrals over Gaussians:
    u(x, t) = - I[sin(pi y) f(y)] / I[f(y)],  f(y) = exp(-cos(pi y) / (2 pi v)),  y = x - sqrt(4 v t) z,
with I the integral of exp(-z^2) over z, here by Gauss-Hermite quadrature.
Source: C. Basdevant et al.: Spectral and finite difference solutions of the Burgers equation, Computers & Fluids
14 (1986). The rows are exact to about 1e-8, so the error of a network is its own.
"""

from __future__ import annotations

import numpy as np
from building import DRAW_ROWS, Block, build_both, draws, sized_parser

from distmlp.comm.policy import guarded

NODES = 200
LOG_VISCOSITY = (-2.4, -1.0)  # 0.004 (a steep front at x = 0) to 0.1


def solution(x: np.ndarray, t: np.ndarray, viscosity: np.ndarray) -> np.ndarray:
    """u (rows,) at x, t >= 0 and viscosity > 0, each (rows,)."""
    nodes, weights = np.polynomial.hermite.hermgauss(NODES)  # (nodes,)
    y = x[:, None] - np.sqrt(4.0 * viscosity * t)[:, None] * nodes
    exponent = -np.cos(np.pi * y) / (2.0 * np.pi * viscosity[:, None])
    heat = weights * np.exp(exponent - exponent.max(axis=1, keepdims=True))  # the common factor cancels
    return -(heat * np.sin(np.pi * y)).sum(axis=1) / heat.sum(axis=1)


def main() -> None:
    """Command line."""
    options = sized_parser(__doc__, "burgers", 200_000, 20_000).parse_args()
    low, high = np.array([-1.0, 0.0, LOG_VISCOSITY[0]]), np.array([1.0, 1.0, LOG_VISCOSITY[1]])

    def rows(start: int, stop: int) -> Block:
        inputs = draws(options.seed, start, stop, lambda generator: generator.uniform(low, high, (DRAW_ROWS, 3)))
        inputs = inputs.astype(np.float32).astype(np.float64)  # u of the inputs as they are stored
        u = solution(inputs[:, 0], inputs[:, 1], 10.0 ** inputs[:, 2])
        return {"inputs": inputs.astype(np.float32), "targets": u[:, None].astype(np.float32)}

    build_both(options, rows)


if __name__ == "__main__":
    guarded(main)
