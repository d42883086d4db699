"""Plot what a trained regression predicts against the truth: python datasets/plot.py RUN SHARDS [--out FILE.png].

RUN is the output directory of a run or a checkpoint, SHARDS a glob of validation shards (extra `demo`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from distmlp import load
from distmlp.comm.policy import guarded
from distmlp.comm.world import open_world
from distmlp.data.shards import Shards
from distmlp.errors import ConfigError, SystemUnfitError

ROWS = 5000  # points of the plot


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    made.add_argument("run", type=Path)
    made.add_argument("shards")
    made.add_argument("--out", type=Path, default=Path("prediction.png"), help="(default: %(default)s)")
    options = made.parse_args()
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemUnfitError("plots need matplotlib: pip install 'distmlp[demo]'") from None
    model = load(options.run)
    loss = model.config.model.loss
    if "cross_entropy" in loss:
        raise ConfigError(f"{options.run}: trained with {loss}; a plot against the truth is for regression")
    names = model.config.data
    shards = Shards.open(names, open_world(), patterns=options.shards, loss=loss, layers=model.config.model.layers)
    rows = shards.read(0, min(ROWS, shards.rows))
    truth, prediction = rows.targets, model.predict(rows.inputs)

    figure = Figure(figsize=(4 * shards.outputs, 4), layout="constrained")
    for column, axes in enumerate(figure.subplots(1, shards.outputs, squeeze=False)[0]):
        x, y = truth[:, column], prediction[:, column]
        axes.plot(x, y, ".", markersize=2)
        axes.plot([x.min(), x.max()], [x.min(), x.max()], linewidth=1, color="black")
        error = float(np.sqrt(np.mean((y - x) ** 2)))
        axes.set(title=f"output {column}: rmse {error:.3g}", xlabel="truth", ylabel="prediction")
        print(f"output {column}: rmse {error:.6g}, of a deviation of {x.std():.6g}")
    figure.savefig(options.out, dpi=120)
    print(options.out)


if __name__ == "__main__":
    guarded(main)
