"""`--set section.key=VALUE`, and what paths are relative to."""

from __future__ import annotations

import pytest
from config_samples import CONTRACT, written

from distmlp.config import RunConfig
from distmlp.errors import ConfigError


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CONTRACT.replace('"shards/test-*.h5"', '["t1.h5", "/abs/t2.h5"]')
    written(tmp_path / "project", text)
    config = RunConfig.load("project/run.toml")
    assert config.data.train == str(tmp_path / "project/shards/train-*.h5")
    assert config.data.validation == (str(tmp_path / "project/t1.h5"), "/abs/t2.h5")
    assert config.run.output == str(tmp_path / "project/runs/fashion")


def test_paths_of_the_command_line_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "project")
    config = RunConfig.load("project/run.toml", ["data.train=x.h5", 'data.validation=["y.h5"]', "run.output=elsewhere"])
    assert config.data.train == str(tmp_path / "x.h5")
    assert config.data.validation == (str(tmp_path / "y.h5"),)
    assert config.run.output == str(tmp_path / "elsewhere")
    config = RunConfig.load("project/run.toml", ["run.output=elsewhere"], output="here")
    assert config.run.output == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("data.batch=256", "data", "batch", 256),
        (" data.batch = 256 ", "data", "batch", 256),
        ("optimizer.name=sgd", "optimizer", "name", "sgd"),
        ('optimizer.name="sgd"', "optimizer", "name", "sgd"),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("data.shuffle=false", "data", "shuffle", False),
        ("model.layers=[3, 4]", "model", "layers", (3, 4)),
        ("model.hidden=[]", "model", "hidden", ()),
        ("run.steps=7", "run", "steps", 7),
        ("run.checkpoint_every=10 minutes", "run", "checkpoint_every", "10 minutes"),
        ("data.inputs=a=b", "data", "inputs", "a=b"),
        ("data.inputs=2026-11-30", "data", "inputs", "2026-11-30"),
        ("data.inputs=x\nevil = 1", "data", "inputs", "x\nevil = 1"),
        ("data.inputs=[", "data", "inputs", "["),
    ],
)
def test_set(tmp_path, override, section, key, value):
    config = RunConfig.load(written(tmp_path), [override])
    assert getattr(getattr(config, section), key) == value


def test_of_two_keys_that_exclude_each_other_the_set_one_wins(tmp_path):
    config = RunConfig.load(written(tmp_path), ["model.hidden=[5]", "run.steps=3"])
    assert (config.model.layers, config.model.hidden) == ((), (5,))
    assert (config.run.epochs, config.run.steps) == (0, 3)
    config = RunConfig.load(written(tmp_path), ["run.steps=3", "run.epochs=0"])  # 0 is the word for "not given"
    assert (config.run.epochs, config.run.steps) == (0, 3)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("data.batch", "expected section.key=VALUE"),
        ("batch=3", "expected section.key=VALUE"),
        ("=3", "expected section.key=VALUE"),
        ("dta.batch=3", "unknown section `dta`; did you mean `data`?"),
        ("data.btch=3", "data.btch: unknown key; did you mean `batch`?"),
        ("data.batch=", "data.batch = '': expected a whole number"),
        ("data.batch=many", "data.batch = 'many': expected a whole number"),
        ("data.batch.x=3", "data.batch.x: unknown key"),
    ],
)
def test_bad_set(tmp_path, override, wanted):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path), [override])
    assert wanted in str(caught.value)


def test_set_into_a_section_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="`schedule` is not a section in the configuration file"):
        RunConfig.load(written(tmp_path, "schedule = 3\n"), ["schedule.name=step"])
