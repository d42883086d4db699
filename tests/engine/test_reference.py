"""The steps of the reference engine, on ranks that are threads: the same numbers and decisions on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from engine.fakes import FakeRows, FakeWorld, make_config, make_engine, make_network, run_ranks
from engine.uneven import check_uneven_batches

from distmlp.engine import Standardization, State
from distmlp.errors import AgreedError, DataError


def some_rows(count=30, features=4, outputs=2, weighted=False, seed=None):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 2, count) if weighted else None
    return FakeRows(rng.normal(size=(count, features)), rng.normal(size=(count, outputs)), weights)


def config_of(batch=8, streams=6, model=None, optimizer=None, **run):
    return make_config(
        [4, 7, 2], model, data={"train": "x", "batch": batch, "streams": streams}, optimizer=optimizer or {}, run=run
    )


def flats(state):
    """The bits of every flat buffer."""
    buffers = {"parameters": state.parameters, "ema": state.ema, **state.slots}
    return {name: buffer.tobytes() for name, buffer in buffers.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_uneven_batches_are_exact(size):
    """10 rows, global batch 4: rows per rank differ, the last batch is short, a rank has none of it."""
    counts = run_ranks(size, lambda world: check_uneven_batches(world))
    assert size < 3 or min(min(c) for c in counts) == 0  # some rank did meet a batch without rows


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("weighted", [False, True])
def test_any_rank_count_trains_alike(name, weighted):
    rows = some_rows(weighted=weighted)
    config = config_of(optimizer={"name": name, "clip_norm": 0.5, "weight_decay": 0.01}, ema_decay=0.9)
    wanted = None
    for size in (1, 2, 3, 6):

        def body(world):
            engine = make_engine(config, rows, world)
            losses = [engine.train(epoch, 0, np.full(4, 0.02)).losses for epoch in range(3)]
            return np.concatenate([*losses, engine.state().parameters, engine.state().ema])

        results = run_ranks(size, body)
        wanted = results[0] if wanted is None else wanted
        for result in results:
            np.testing.assert_array_equal(result, results[0])  # replicas are identical
            np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("streams", [6, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reproducible_ranks_gives_the_same_bits(streams, dtype):
    rows = some_rows(61, weighted=True)
    config = config_of(batch=16, streams=streams, reproducible="ranks")
    bits = set()
    for size in range(1, streams + 1):

        def body(world):
            engine = make_engine(config, rows, world, dtype=dtype)
            losses = [engine.train(epoch, 0, np.full(4, 0.02)).losses for epoch in range(2)]
            return np.concatenate(losses).tobytes() + engine.state().parameters.tobytes()

        bits.update(run_ranks(size, body))
    assert len(bits) == 1


def test_reproducible_ranks_is_the_same_training():
    rows, ends = some_rows(), []
    for reproducible in ("run", "ranks"):
        engine = make_engine(config_of(reproducible=reproducible), rows)
        engine.train(0, 0, np.full(4, 0.02))
        ends.append(engine.state().parameters)
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("depth", [1, 20])
@pytest.mark.parametrize("reproducible", ["run", "ranks"])
def test_one_collective_a_step(depth, reproducible):
    config = make_config(
        [4] + [5] * depth + [2], data={"train": "x", "batch": 8, "streams": 4}, run={"reproducible": reproducible}
    )

    def body(world):
        make_engine(config, some_rows(seed=1), world).train(0, 0, np.full(4, 0.01))
        return world.calls

    assert run_ranks(2, body) == [["all_reduce"] * 4] * 2


def poisoned(value, row=17):
    rows = some_rows(seed=3)
    rows.inputs[row, 1] = value
    return rows


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("reproducible", ["run", "ranks"])
@pytest.mark.parametrize("size", [1, 3])
def test_policy_stop_ends_before_the_weights_change(value, reproducible, size):
    """The batch with the bad row ends the stretch at the same step on every rank; weights are those before it."""
    config = config_of(reproducible=reproducible)
    rows = poisoned(value)

    def body(world):
        engine = make_engine(config, rows, world)
        report = engine.train(0, 0, np.full(4, 0.01))
        end = engine.state()
        engine = make_engine(config, rows, world)
        engine.train(0, 0, np.full(report.nonfinite, 0.01))
        np.testing.assert_array_equal(end.parameters, engine.state().parameters)
        return report.nonfinite, report.steps, report.skipped, end.step, np.isfinite(end.parameters).all()

    results = run_ranks(size, body)
    index = results[0][0]
    assert 17 in batch_rows(config, rows, index)
    assert results == [(index, index, 0, index, True)] * size


def batch_rows(config, rows, number):
    engine = make_engine(config, rows)
    return engine._feed.order.batch_rows(0, number, range(config.data.streams))


@pytest.mark.parametrize("size", [1, 3])
def test_policy_skip_leaves_out_the_batch(size):
    """After a skipped batch the state is as if that batch had not been there."""
    config = config_of(on_nonfinite="skip", ema_decay=0.5)
    rows = poisoned(np.nan)
    bad = next(number for number in range(4) if 17 in batch_rows(config, rows, number))

    def body(world):
        engine = make_engine(config, rows, world)
        report = engine.train(0, 0, np.full(4, 0.01))
        other = make_engine(config, rows, world)
        for number in range(4):
            if number != bad:
                other.train(0, number, np.full(1, 0.01))
        assert flats(engine.state()) == flats(other.state())
        return report.steps, report.skipped, report.nonfinite, engine.state().step, np.isnan(report.losses).tolist()

    assert run_ranks(size, body) == [(4, 1, None, 3, [number == bad for number in range(4)])] * size


def test_a_gradient_whose_square_overflows_counts_as_not_finite():
    """Else the second moment of adam becomes infinite and freezes those weights for good, unseen."""
    rows = some_rows(seed=3)
    rows.inputs[17] = 1e30
    rows.targets[:] = 0
    engine = make_engine(config_of(model={"loss": "mae"}), rows, dtype=np.float32)
    report = engine.train(0, 0, np.full(4, 0.01))
    assert report.nonfinite is not None
    assert all(np.isfinite(slot).all() for slot in engine.state().slots.values())


def test_diverging_training_stops_with_finite_weights():
    engine = make_engine(config_of(optimizer={"name": "sgd"}), some_rows(), dtype=np.float32)
    for epoch in range(20):
        report = engine.train(epoch, 0, np.full(4, 1e6))
        if report.nonfinite is not None:
            break
    assert report.nonfinite is not None
    assert np.isfinite(engine.state().parameters).all()


@pytest.mark.parametrize("reproducible", ["run", "ranks"])
def test_a_stop_asked_for_on_one_rank_ends_all_after_the_same_step(reproducible):
    config = config_of(reproducible=reproducible)

    def body(world):
        asked = iter([False, world.rank == 2, False, False])
        engine = make_engine(config, some_rows(seed=5), world, stop=lambda: next(asked))
        report = engine.train(0, 0, np.full(4, 0.01))
        return report.stopped, report.steps, engine.state().step

    assert run_ranks(3, body) == [(True, 2, 2)] * 3


@pytest.mark.parametrize("reproducible", ["run", "ranks"])
def test_a_rank_that_cannot_read_fails_all_with_its_message(reproducible):
    config = config_of(reproducible=reproducible)

    def body(world):
        fault = {"broken": ((0, 2),), "fault": DataError("shard-3.h5 rows 8 to 11: checksum")}
        engine = make_engine(config, some_rows(seed=5), world, **(fault if world.rank == 1 else {}))
        with pytest.raises(AgreedError, match=r"shard-3\.h5 rows 8 to 11") as caught:
            engine.train(0, 0, np.full(4, 0.01))
        return caught.value.exit_code, engine.state().step

    assert run_ranks(3, body) == [(3, 2)] * 3


def test_zero_weights_change_nothing():
    rows = some_rows()
    rows.weights = np.zeros(30)
    engine = make_engine(config_of(optimizer={"name": "adamw", "weight_decay": 0.1}), rows)
    before = engine.state()
    report = engine.train(0, 0, np.full(4, 0.01))
    np.testing.assert_array_equal(engine.state().parameters, before.parameters)
    assert (report.skipped, report.nonfinite, report.weights.tolist()) == (0, None, [0.0] * 4)
    assert engine.state().step == 0


def test_stretches_of_any_length_give_the_same_bits():
    """state → load in between, too: a resumed engine continues as if never stopped."""
    rows, config = some_rows(), config_of(optimizer={"name": "adam"}, ema_decay=0.9)
    whole = make_engine(config, rows, dtype=np.float32)
    whole.train(0, 0, np.full(4, 0.01))
    parts = make_engine(config, rows, dtype=np.float32)
    parts.train(0, 0, np.full(1, 0.01))
    resumed = make_engine(config, rows, dtype=np.float32)
    resumed.load(parts.state())
    resumed.train(0, 1, np.full(3, 0.01))
    assert flats(resumed.state()) == flats(whole.state())
    assert resumed.state().step == whole.state().step == 4


def test_state_is_a_copy_and_keeps_the_gaps_zero():
    config = config_of(optimizer={"name": "lamb", "weight_decay": 0.1})
    engine = make_engine(config, some_rows())
    engine.train(0, 0, np.full(4, 0.01))
    state = engine.state()
    state.parameters[:] = 7
    assert not (engine.state().parameters == 7).any()
    network = make_network(config)
    used = np.zeros(network.size, bool)
    for layer in network.layers:
        used[layer.weight] = used[layer.bias] = True
    state = engine.state()
    for flat in (state.parameters, *state.slots.values()):
        assert not flat[~used].any()
        assert flat[used].any()


def test_standardization_goes_in_and_comes_out():
    """Raw rows with a standardization train like standardized rows without; predictions are in raw units."""
    rows = some_rows()
    mean, deviation = np.array([5.0, -3, 0, 1e3]), np.array([2.0, 0.1, 1, 50])
    target_mean, target_deviation = np.array([100.0, -1]), np.array([10.0, 0.01])
    raw = FakeRows(rows.inputs * deviation + mean, rows.targets * target_deviation + target_mean)
    plain = make_engine(config_of(), rows)
    scaled = make_engine(
        config_of(), raw, standardization=Standardization((mean, deviation), (target_mean, target_deviation))
    )
    for engine in (plain, scaled):
        engine.train(0, 0, np.full(4, 0.01))
    np.testing.assert_allclose(scaled.state().parameters, plain.state().parameters, atol=1e-10)
    wanted = plain.predict(rows.inputs) * target_deviation + target_mean
    np.testing.assert_allclose(scaled.predict(raw.inputs), wanted, rtol=1e-6)
    mine, other = scaled.evaluate(raw.inputs, raw.targets, None), plain.evaluate(rows.inputs, rows.targets, None)
    assert mine.loss == pytest.approx(other.loss)
    np.testing.assert_allclose(mine.squared, other.squared * target_deviation**2, rtol=1e-6)
    np.testing.assert_allclose(mine.target, raw.targets.sum(axis=0))
    np.testing.assert_allclose(mine.target_squared, (raw.targets**2).sum(axis=0))


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "?"])
def test_raw_dtypes_standardize_exactly(dtype):
    """Large but narrow columns of wide dtypes keep their digits: the mean goes off before the rounding."""
    base = 2**40 if dtype in ("u8", "i8", "f8") else 2**30 if dtype in ("u4", "i4") else 0
    raw = (base + np.arange(8) % (2 if dtype == "?" else 8)).astype(dtype).reshape(4, 2)
    moments = raw.astype(float).mean(axis=0), np.maximum(raw.astype(float).std(axis=0), 1e-3)
    engine = make_engine(
        make_config([2, 2], {"init": "zeros"}), FakeRows(raw, raw), None, Standardization(moments, None), np.float32
    )
    state = engine.state()
    weight, _ = engine._network.views(state.parameters)[0]
    weight[...] = np.eye(2)
    engine.load(state)
    np.testing.assert_allclose(engine.predict(raw), (raw.astype(float) - moments[0]) / moments[1], atol=1e-6)


def naive_output(config, parameters, inputs):
    """tanh network in plain NumPy."""
    layers = make_network(config).views(parameters)
    for weight, bias in layers[:-1]:
        inputs = np.tanh(inputs @ weight + bias)
    return inputs @ layers[-1][0] + layers[-1][1]


@pytest.mark.parametrize("block", [1000, 7])
def test_evaluate_softmax(block, monkeypatch):
    monkeypatch.setattr("distmlp.engine.rows.ROW_BLOCK", block)
    rng = np.random.default_rng()
    config = config_of(model={"loss": "softmax_cross_entropy", "activation": "tanh"})
    inputs, labels, weights = rng.normal(size=(40, 4)), rng.integers(0, 2, 40), rng.uniform(0, 2, 40)
    engine = make_engine(config, FakeRows(inputs, labels))
    output = naive_output(config, engine.state().parameters, inputs)
    losses = np.log(np.exp(output).sum(axis=1)) - output[np.arange(40), labels]
    for targets in (labels, labels.astype(np.uint8), np.eye(2)[labels]):
        result = engine.evaluate(inputs, targets, weights)
        assert result.rows == 40
        assert result.weight == pytest.approx(weights.sum())
        assert result.loss == pytest.approx(weights @ losses)
        assert result.correct == pytest.approx(weights @ (output.argmax(axis=1) == labels))


def test_evaluate_binary_and_regression():
    rng = np.random.default_rng()
    inputs, targets = rng.normal(size=(40, 4)), rng.integers(0, 2, (40, 2)).astype(np.uint8)
    config = config_of(model={"loss": "binary_cross_entropy", "activation": "tanh"})
    engine = make_engine(config, FakeRows(inputs, targets))
    output = naive_output(config, engine.state().parameters, inputs)
    assert engine.evaluate(inputs, targets, None).correct == pytest.approx(((output > 0) == targets).mean(axis=1).sum())
    engine = make_engine(config_of(model={"activation": "tanh"}), FakeRows(inputs, targets))
    result, error = engine.evaluate(inputs, targets, None), output - targets
    np.testing.assert_allclose(result.squared, (error**2).sum(axis=0))
    assert result.absolute == pytest.approx(np.abs(error).sum())
    assert result.loss == pytest.approx((error**2).mean(axis=1).sum())


def test_evaluation_adds_up_over_any_split():
    rng = np.random.default_rng()
    inputs, targets = rng.normal(size=(21, 4)), rng.normal(size=(21, 2))
    engine = make_engine(config_of(), FakeRows(inputs, targets))
    whole = engine.evaluate(inputs, targets, None).as_array()
    parts = sum(engine.evaluate(inputs[s], targets[s], None).as_array() for s in (slice(5), slice(5, 5), slice(5, 21)))
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    assert whole[0] == 21


def test_averaged_weights_predict():
    rows = some_rows()
    engine = make_engine(config_of(ema_decay=0.5, model={"activation": "tanh"}), rows)
    state = engine.state()
    engine.load(State(state.parameters * 0, state.slots, state.parameters, 3))
    np.testing.assert_allclose(
        engine.predict(rows.inputs), naive_output(config_of(), state.parameters, rows.inputs), rtol=1e-6
    )


def test_predict_nothing_and_one():
    engine = make_engine(config_of(), some_rows())
    assert engine.predict(np.empty((0, 4))).shape == (0, 2)
    one = engine.predict(np.ones((1, 4), np.uint8))
    assert (one.shape, one.dtype) == ((1, 2), np.float32)


def test_batches_larger_than_a_block_of_rows(monkeypatch):
    rows, ends = some_rows(), []
    for block in (1024, 3):
        monkeypatch.setattr("distmlp.engine.rows.ROW_BLOCK", block)
        engine = make_engine(config_of(batch=16), rows)
        engine.train(0, 0, np.full(2, 0.01))
        ends.append(engine.state().parameters)
    np.testing.assert_allclose(ends[1], ends[0], rtol=0, atol=1e-12)


def test_nothing_moves_to_a_device():
    engine = make_engine(config_of(), some_rows(), FakeWorld())
    engine.train(0, 0, np.full(3, 0.01))
    assert engine.transfers() == {
        "host_to_device_bytes": 0,
        "device_to_host_bytes": 0,
        "kernel_launches": 0,
        "steps": 3,
    }
    engine.close()
