"""Properties of a real fluid: (temperature K, log10 of pressure Pa) to density, enthalpy, entropy, sound speed.

Carbon dioxide above its critical temperature, where no phase boundary is crossed, from the Span-Wagner
equation of state (J. Phys. Chem. Ref. Data 25, 1996) as evaluated by CoolProp (Bell et al., Ind. Eng. Chem. Res.
53, 2014; `pip install CoolProp`). Targets: log10 of density kg/m3, J/kg, J/(kg K), m/s.
"""

from __future__ import annotations

import numpy as np
from building import DRAW_ROWS, Block, build_both, draws, sized_parser

from distmlp.comm.policy import guarded
from distmlp.errors import SystemUnfitError

FLUID = "CarbonDioxide"
LOW, HIGH = np.array([310.0, 5.0]), np.array([600.0, 7.3])  # K, log10 Pa: 0.1 to 20 MPa


def main() -> None:
    """Command line."""
    options = sized_parser(__doc__, "realfluid", 100_000, 10_000).parse_args()
    try:
        from CoolProp.CoolProp import PropsSI
    except ImportError:
        raise SystemUnfitError("fluid properties come from CoolProp: pip install CoolProp") from None

    def rows(start: int, stop: int) -> Block:
        inputs = draws(options.seed, start, stop, lambda generator: generator.uniform(LOW, HIGH, (DRAW_ROWS, 2)))
        inputs = inputs.astype(np.float32).astype(np.float64)  # the properties of the inputs as they are stored
        temperature, pressure = inputs[:, 0], 10.0 ** inputs[:, 1]
        columns = [np.asarray(PropsSI(name, "T", temperature, "P", pressure, FLUID)) for name in ("D", "H", "S", "A")]
        columns[0] = np.log10(columns[0])
        return {"inputs": inputs.astype(np.float32), "targets": np.stack(columns, axis=1).astype(np.float32)}

    build_both(options, rows)


if __name__ == "__main__":
    guarded(main)
