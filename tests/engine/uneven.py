"""Ten rows in batches of four against twenty lines of NumPy: run by ranks that are threads and by real ones."""

from __future__ import annotations

import numpy as np
from engine.fakes import FakeRows, make_config, make_engine, make_network

from distmlp.order import Order

RATE, MOMENTUM, EPOCHS = 0.05, 0.9, 3


def check_uneven_batches(world) -> list[int]:
    """Compare loss and all weights after every step, to 1e-12; returns this rank's rows of each batch."""
    rng = np.random.default_rng(11)
    rows = FakeRows(rng.normal(size=(10, 3)), rng.normal(size=(10, 2)), rng.uniform(0.5, 2, 10))
    config = make_config(
        [3, 5, 2],
        {"activation": "tanh"},
        data={"train": "x", "batch": 4, "streams": 5},
        optimizer={"name": "momentum", "momentum": MOMENTUM},
    )
    engine = make_engine(config, rows, world)
    wanted = plain_training(config, rows)
    counts = []
    for epoch in range(EPOCHS):
        epoch_loss = 0.0
        for number in range(3):
            report = engine.train(epoch, number, np.array([RATE]))
            loss, weight, layers = next(wanted)
            np.testing.assert_allclose(report.losses, [loss], rtol=1e-12)
            np.testing.assert_allclose(report.weights, [weight], rtol=1e-12)
            for mine, other in zip(make_network(config).views(engine.state().parameters), layers, strict=True):
                np.testing.assert_allclose(mine[0], other[0], rtol=1e-12, atol=1e-15)
                np.testing.assert_allclose(mine[1], other[1], rtol=1e-12, atol=1e-15)
            epoch_loss += report.losses[0] * report.weights[0]
            counts.append(len(engine._feed.batch(epoch, number).inputs))
        assert np.isclose(epoch_loss / rows.weights.sum(), next(wanted), rtol=1e-12)
    return counts


def plain_training(config, rows):
    """Yield (loss, sum of weights, layers) after every step, and the mean loss after every epoch."""
    order = Order(10, 5, 4, config.run.seed, config.data.shuffle)
    network = make_network(config)
    (w1, b1), (w2, b2) = network.views(network.initial(config.run.seed, config.model.init, np.float64))
    speed = [np.zeros_like(p) for p in (w1, b1, w2, b2)]
    for epoch in range(EPOCHS):
        total = 0.0
        for number in range(3):
            chosen = order.batch_rows(epoch, number, range(5))
            x, t, w = rows.inputs[chosen], rows.targets[chosen], rows.weights[chosen, None] / rows.weights[chosen].sum()
            h = np.tanh(x @ w1 + b1)
            error = h @ w2 + b2 - t
            loss = (w * error**2).sum() / 2
            dy = w * error  # derivative of the mean over 2 outputs
            dh = dy @ w2.T * (1 - h**2)
            for p, v, g in zip((w1, b1, w2, b2), speed, (x.T @ dh, dh.sum(0), h.T @ dy, dy.sum(0)), strict=True):
                v[...] = MOMENTUM * v + g
                p -= RATE * v
            total += loss * rows.weights[chosen].sum()
            yield loss, rows.weights[chosen].sum(), [(w1, b1), (w2, b2)]
        yield total / rows.weights.sum()
