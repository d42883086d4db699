"""The configuration: what it refuses and how it says so, overrides, paths, TOML out and in."""

from __future__ import annotations

import json
import os
import tomllib

import pytest
from config_samples import CONTRACT, MINIMAL, document, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distmlp.config import RunConfig, sections
from distmlp.errors import ConfigError
from distmlp.interval import Interval


def refusal(*args, **changes):
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(document(**changes), *args)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_the_contracts_defaults_are_the_defaults():
    """Every key written out there has that default, but for those that a run must or may choose."""
    chosen = {"layers", "loss", "train", "validation", "output", "epochs"}
    defaults = RunConfig.parse(MINIMAL).to_dict()
    for section, keys in tomllib.loads(CONTRACT).items():
        for key, value in keys.items():
            if key not in chosen:
                assert defaults[section][key] == value, f"{section}.{key}"
    assert defaults["run"]["epochs"] == 10


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"model__hiden": [3]}, "model.hiden: unknown key; did you mean `hidden`?"),
        ({"optimizer__lerning_rate": 1.0}, "optimizer.lerning_rate: unknown key; did you mean `learning_rate`?"),
        ({"data__batch_size": 3}, "data.batch_size: unknown key; did you mean `batch`?"),
        ({"scedule__name": "step"}, "scedule: unknown key; did you mean `schedule`?"),
        ({"optimizer__name": "adm"}, "optimizer.name = 'adm': expected one of sgd, momentum"),
        ({"optimizer__name": "adm"}, "; did you mean adam?"),
        ({"model__activation": "rellu"}, "or a list of them; did you mean relu?"),
        ({"model__activation": ["relu2"]}, "model.activation[0] = 'relu2': expected one of relu, leaky_relu"),
        ({"model__activation": ["relu", "tanh"]}, "`activation` lists 2 names for 1 hidden layers"),
        ({"model__layers": [4, 0, 2]}, "model.layers[1] = 0: must be at least 1"),
        ({"model__layers": [4]}, "`layers` = [4] needs at least an input and an output width"),
        ({"model__layers": [3] * 66}, "65 layers; at most 64"),
        ({"model__layers": 5}, "model.layers = 5: expected a list"),
        ({"model__hidden": [3]}, "exactly one of `layers` (all widths) and `hidden`"),
        ({"data__train": ["a", 3]}, "data.train[1] = 3: expected a string"),
        ({"data__train": ""}, "data.train = '': names no file"),
        ({"data__train": []}, "data.train = []: names no file"),
        ({"data__train": {"a": 1}}, "data.train = {'a': 1}: expected a string or a list of them"),
        ({"data__streams": 1.5}, "data.streams = 1.5: expected a whole number"),
        ({"data__batch": True}, "data.batch = True: expected a whole number"),
        ({"data__batch": "64"}, "data.batch = '64': expected a whole number"),
        ({"data__batch": 16**6000}, "data.batch = a number of thousands of digits: must be at most"),
        ({"data__inputs": ""}, "data.inputs = '': must not be empty"),
        ({"optimizer__learning_rate": float("nan")}, "optimizer.learning_rate = nan: expected a finite number"),
        ({"optimizer__clip_norm": float("inf")}, "optimizer.clip_norm = inf: expected a finite number"),
        ({"run__precision": "float16"}, "run.precision = 'float16': expected one of fp32, tf32, bf16"),
        ({"run__epochs": 3, "run__steps": 4}, "give `epochs` or `steps`, not both (3 and 4)"),
        ({"run__epochs": 0}, "nothing to train: `epochs` and `steps` are 0"),
        ({"run__checkpoint_every": "5 parsecs"}, "run.checkpoint_every = '5 parsecs': expected a positive number and"),
        ({"run__validate_every": "1.5 epochs"}, "run.validate_every = '1.5 epochs': epochs come whole"),
        ({"run__stall_timeout": "3 epochs"}, "run.stall_timeout = '3 epochs': expected a time, such as \"10 minutes\""),
        ({"run__output": "a\0b"}, "run.output = 'a\\x00b': expected UTF-8 text without NUL characters"),
        ({"data__train": "bad\udcff.h5"}, "data.train = 'bad\\udcff.h5': expected UTF-8 text without NUL characters"),
        ({"data__train": ["a.h5", "b\0.h5"]}, "data.train = ['a.h5', 'b\\x00.h5']: expected UTF-8 text without NUL"),
        ({"run__shuffle": True}, "run.shuffle: unknown key"),
    ],
)
def test_a_refusal_names_key_value_and_what_was_expected(changes, wanted):
    lines = refusal("of a test", **changes)
    assert lines[0] == "configuration of a test:"
    assert len(lines) == 2, lines  # one line for one fault
    assert wanted in lines[1]


def bounds():
    """(section, key, a value beyond a bound) of every bound in the model."""
    for section, model in sections().items():
        for key, field in model.model_fields.items():
            for limit in field.metadata:
                for attribute, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
                    if hasattr(limit, attribute):
                        yield section, key, getattr(limit, attribute) + step


@pytest.mark.parametrize(("section", "key", "value"), [*bounds()])
def test_every_bound_is_kept_and_named(section, key, value):
    lines = refusal(**{f"{section}__{key}": value})
    assert len(lines) == 2
    assert lines[1].startswith(f"  {section}.{key} = {value}: must be ")


def test_all_faults_are_told_at_once():
    lines = refusal(model__init="x", data__batch=0, run__keep=0, optimizer__beta1=1.0)
    assert [line.split()[0] for line in lines[1:]] == ["model.init", "data.batch", "optimizer.beta1", "run.keep"]


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "softmax_cross_entropy"])
def test_cross_entropies_take_logits(loss):
    assert "must be identity" in refusal(model__loss=loss, model__output_activation="sigmoid")[1]


@pytest.mark.parametrize("bad", [{}, {"model": 3, "data": []}, {"model": {"layers": [1, 2]}}])
def test_missing_and_misshapen_sections(bad):
    with pytest.raises(ConfigError, match=r"\[data\]|data = \[\]"):
        RunConfig.parse(bad)


def test_the_constructor_checks_too():
    with pytest.raises(ValidationError):
        RunConfig(model={"layers": [1, 2]}, data={"train": "x", "batch": 0})
    assert RunConfig(model={"hidden": [64]}, data={"train": ["x"]}).model.hidden == (64,)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1 epoch", Interval(epochs=1)),
        ("500 steps", Interval(steps=500)),
        (" 2 epochs ", Interval(epochs=2)),
        ("1.5 minutes", Interval(seconds=90)),
        ("2 hours", Interval(seconds=7200)),
        ("90seconds", Interval(seconds=90)),
    ],
)
def test_intervals(text, wanted):
    assert Interval.parse(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "epoch", "0 steps", "-1 epoch", "1 day", "1.5 steps", "1 epoch 2", "9" * 400 + " steps"]
)
def test_bad_intervals(text):
    with pytest.raises(ValueError, match=r"expected|whole"):
        Interval.parse(text)


VARIETY = [
    document(),
    document(model__hidden=[], model__layers=[]),
    document(model__activation=["gelu"], data__train=["b.h5", "a.h5"], run__steps=7),
    document(data__inputs='x/"quoted"\\ ü\n', optimizer__learning_rate=3e-300, run__seed=(1 << 63) - 1),
]


@pytest.mark.parametrize("given_document", VARIETY, ids=str)
def test_toml_out_and_in_is_the_same(given_document):
    config = RunConfig.parse(given_document)
    text = config.to_toml()
    assert RunConfig.from_toml(text, "a checkpoint") == config
    assert RunConfig.from_toml(text, "").to_toml() == text
    written_out = tomllib.loads(text)
    for name, model in sections().items():
        missing = model.model_fields.keys() - written_out[name].keys()
        assert missing <= {"layers", "hidden", "epochs", "steps"}  # of two that exclude each other, one


def test_a_resolved_file_can_be_used_again(tmp_path):
    config = RunConfig.load(written(tmp_path / "a"))
    again = RunConfig.load(written(tmp_path / "b", config.to_toml()))
    assert again == config


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"[model\n", "not valid TOML"),
        (b"\xff\xfe[model]", "not UTF-8 text"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"[run]\nseed = " + b"9" * 5000, "not valid TOML"),
        (b"[run]\nseed = 0x" + b"9" * 5000, "run.seed = a number of thousands of digits"),
        (b"", r"\[model\]: this section is missing"),
    ],
    ids=["syntax", "utf-16", "deep", "digits", "hex", "empty"],
)
def test_files_that_are_no_configuration(tmp_path, content, wanted):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=wanted) as caught:
        RunConfig.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["missing.toml", ".", "a\0b"])
def test_paths_that_are_no_file(tmp_path, name):
    with pytest.raises(ConfigError, match="configuration"):
        RunConfig.load(f"{tmp_path}/{name}")


def test_with_layers():
    config = RunConfig.parse(document(model__hidden=[8, 6], model__layers=[], run__steps=5))
    resolved = config.with_layers(4, 3)
    assert (resolved.model.layers, resolved.model.hidden) == ((4, 8, 6, 3), None)
    assert resolved.run == config.run
    assert resolved.with_layers(9, 9) is resolved


def test_changes():
    one, two = RunConfig.parse(MINIMAL), RunConfig.parse(document(data__batch=7, run__steps=3))
    assert one.changes(one) == {}
    assert two.changes(one) == {"data.batch": (7, 1024), "run.epochs": (None, 10), "run.steps": (3, None)}


def mutations():
    """TOML texts near a valid one: lines lost, doubled or swapped, and pieces of text put in anywhere."""
    junk = ["=", "[", "]", '"', "[[x]]", "\n", "1e999", "-1", "{}", "nan", "0x" + "f" * 5000, "é", "\0", "[model]"]
    junk += ["inf", "9" * 30, '""', "[1, [2]]", "1979-05-27", "true", "#", "'''", ".", "layers", "\\u0000"]
    pieces = st.lists(st.tuples(st.integers(0, len(CONTRACT)), st.sampled_from(junk)), max_size=4)
    values = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(junk)), max_size=3)
    return st.tuples(pieces, values, st.lists(st.integers(0, 60), max_size=3))


def mutated(mutation):
    pieces, values, lost = mutation
    lines = CONTRACT.splitlines()
    for number, value in values:  # a value replaced
        line = number % len(lines)
        if "=" in lines[line]:
            lines[line] = lines[line].split("=")[0] + "= " + value
    text = "\n".join(line for number, line in enumerate(lines) if number not in lost)
    for place, piece in pieces:
        text = text[:place] + piece + text[place:]
    return text


def only_ever_a_config_error(mutation):
    try:
        config = RunConfig.from_toml(mutated(mutation), "mutated.toml")
    except ConfigError as error:
        text = str(error)
    else:
        text = "mutated.toml"
        assert RunConfig.from_toml(config.to_toml(), "") == config
        json.dumps(config.to_dict(), allow_nan=False)
    assert "mutated.toml" in text
    assert max(map(len, text.splitlines())) < 400


@given(mutations())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_files(mutation):
    only_ever_a_config_error(mutation)


@pytest.mark.full
@given(mutations())
@settings(max_examples=2000, deadline=None)
def test_mutated_files_in_full(mutation):
    only_ever_a_config_error(mutation)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    """Editors on Windows write one."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\nhidden = [3]\r\n[data]\r\ntrain = 'a.h5'\r\n")
    assert RunConfig.load(path).model.hidden == (3,)


def test_a_working_directory_that_has_gone(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nhidden = [3]\n[data]\ntrain = 'a.h5'\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in ({"output": "x"}, {"overrides": ["run.output=x"]}):
        with pytest.raises(ConfigError, match="relative to the working directory, which cannot be had"):
            RunConfig.load(path, **arguments)


def test_a_configuration_that_comes_down_a_pipe_and_one_that_never_comes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"\[model\]: this section is missing"):  # nobody writes to it
        RunConfig.load(tmp_path / "pipe")
    read, write = os.pipe()
    os.write(write, b"[model]\nhidden = [3]\n[data]\ntrain = 'a.h5'\n")
    os.close(write)
    assert RunConfig.load(f"/dev/fd/{read}").model.hidden == (3,)
    os.close(read)
    with pytest.raises(ConfigError, match="longer than 16,777,216 bytes"):
        RunConfig.load("/dev/zero")
    with pytest.raises(ConfigError, match="Is a directory"):
        RunConfig.load(tmp_path)


def test_no_output_directory_is_not_the_working_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.output"):
        RunConfig.load(written(tmp_path), output="")
