"""What may change between the parts of a run."""

from __future__ import annotations

import numpy as np
import pytest

from distmlp.checkpoint.resume import continue_run, is_fixed
from distmlp.config import RunConfig, sections
from distmlp.errors import ConfigError, DataError
from tests.checkpoint_samples import configuration, sample

FIXED = {
    "model.layers", "model.hidden", "model.activation", "model.output_activation", "model.loss", "model.huber_delta",
    "model.init", "data.batch", "data.streams", "data.shuffle", "data.standardize", "data.sample_weights",
    "optimizer.name", "run.seed",
}  # fmt: skip


def changed(**keys: object) -> RunConfig:
    document = configuration().to_dict()
    for key, value in keys.items():
        section, _, name = key.partition("__")
        document[section][name] = value
    return RunConfig.parse(document)


def test_the_fixed_keys_are_these():
    known = {f"{section}.{key}" for section, model in sections().items() for key in model.model_fields}
    assert {key for key in known if is_fixed(key)} == FIXED


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__layers", [5, 8, 3]),
        ("model__activation", "tanh"),
        ("model__loss", "mae"),
        ("data__batch", 32),
        ("data__streams", 4),
        ("data__shuffle", False),
        ("data__standardize", "none"),
        ("optimizer__name", "sgd"),
        ("run__seed", 1),
    ],
)
def test_a_fixed_key_is_refused_with_both_values(key, value):
    name = key.replace("__", ".")
    old = dict(configuration().changes(changed(**{key: value})))[name][0]
    with pytest.raises(ConfigError) as caught:
        continue_run(sample(), changed(**{key: value}), 100)
    assert f"{name}: {old!r} in the checkpoint, {value!r} now" in str(caught.value)


def test_all_refused_keys_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)data\.batch.*run\.seed"):
        continue_run(sample(), changed(data__batch=1, run__seed=1), 100)


def test_what_may_change_is_told_and_noted():
    saved = sample()
    now = changed(optimizer__learning_rate=0.5, data__train="elsewhere/*.h5", run__epochs=20)
    changes = continue_run(saved, now, 100)
    assert changes["optimizer.learning_rate"] == (1e-3, 0.5)
    assert changes.keys() == {"optimizer.learning_rate", "data.train", "run.epochs"}
    assert saved.config == now
    assert saved.history == [{"step": 18, "changes": {key: list(pair) for key, pair in changes.items()}}]


def test_nothing_changed():
    saved = sample()
    assert continue_run(saved, configuration(), 100) == {}
    assert saved.history == []


def test_other_rows_are_refused():
    with pytest.raises(DataError, match="99 rows, 100 when"):
        continue_run(sample(), configuration(), 99)


def test_an_average_can_be_begun_and_dropped():
    saved = sample()
    continue_run(saved, changed(run__ema_decay=0.9), 100)
    np.testing.assert_array_equal(saved.state.ema, saved.state.parameters)
    assert saved.state.ema is not saved.state.parameters
    continue_run(saved, configuration(), 100)
    assert saved.state.ema is None
