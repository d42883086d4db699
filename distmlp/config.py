"""The configuration of a run: fields, defaults, checks; TOML in and out.

The model is the only place where keys, defaults and descriptions are written; the reference table of
README.md is made from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distmlp.config_file import read_document
from distmlp.config_messages import explain, short
from distmlp.errors import ConfigError
from distmlp.interval import Interval
from distmlp.overrides import absolute, anchor_paths, apply_override

Activation = Literal["relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "softplus", "sine", "identity"]
Loss = Literal["mse", "mae", "huber", "binary_cross_entropy", "softmax_cross_entropy"]
Init = Literal["he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "lecun_normal", "zeros"]
Width = Annotated[int, Field(ge=1, le=1 << 24)]
# Bounds that keep products of two within 64 bits, and the sample order's epoch within 32.
_MOST = 1 << 40
_MOST_STEPS = 1 << 32


def _is_utf8(text: str) -> bool:
    """Names of files and arguments that are not come with lone surrogates in place of their bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        """No text that could be neither a path nor written to a file."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and ("\0" in text or not _is_utf8(text)):
                raise ValueError("expected UTF-8 text without NUL characters")
        return value

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data: Any) -> Any:
        """Lists as tuples, which alone are immutable."""
        if not isinstance(data, dict):
            return data
        return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


class ModelConfig(_Section):
    """The network and its loss."""

    layers: tuple[Width, ...] = Field((), description="all widths, input and output included; or give `hidden`")
    hidden: tuple[Width, ...] | None = Field(
        None, description="widths of the hidden layers; input and output widths are read from the data"
    )
    activation: Activation | tuple[Activation, ...] = Field(
        "relu", description="of the hidden layers: one name, or a list with one per hidden layer"
    )
    output_activation: Activation = Field("identity", description="of the output layer")
    loss: Loss = Field("mse", description="the two cross-entropies take logits")
    huber_delta: float = Field(1.0, gt=0, description="where the Huber loss turns from square to linear")
    init: Init = Field("he_normal", description="initial weights; biases start at zero")

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if bool(self.layers) == (self.hidden is not None):
            given = f"`layers` = {short(self.layers)} and `hidden` = {short(self.hidden)}" if self.layers else "neither"
            raise ValueError(f"give exactly one of `layers` (all widths) and `hidden` (hidden widths), not {given}")
        if self.layers and len(self.layers) < 2:
            raise ValueError(f"`layers` = {short(self.layers)} needs at least an input and an output width")
        hidden = len(self.layers) - 2 if self.layers else len(self.hidden or ())
        if hidden + 1 > 64:
            raise ValueError(f"{hidden + 1} layers; at most 64 are supported")
        if not isinstance(self.activation, str) and len(self.activation) != hidden:
            raise ValueError(f"`activation` lists {len(self.activation)} names for {hidden} hidden layers")
        if "cross_entropy" in self.loss and self.output_activation != "identity":
            given = f"`output_activation` = {self.output_activation!r}"
            raise ValueError(f"{given}: must be identity, as `loss` {self.loss} takes logits")
        return self


class DataConfig(_Section):
    """Where the rows come from and how batches are made."""

    train: str | tuple[str, ...] = Field(description="glob or list of HDF5 shards, relative to this file")
    validation: str | tuple[str, ...] = Field("", description="the same for validation; empty: none")
    inputs: str = Field("inputs", min_length=1, description="dataset of the inputs; a path inside the file is allowed")
    targets: str = Field("targets", min_length=1, description="dataset of the targets or class labels")
    sample_weights: str = Field("", description="dataset of one weight a row; empty: all rows count 1")
    standardize: Literal["none", "inputs", "both"] = Field(
        "inputs", description="to mean 0 and deviation 1 of the training set; kept in the checkpoint"
    )
    batch: int = Field(
        1024, ge=1, le=_MOST, description="rows of a GLOBAL batch: training is the same at any number of ranks"
    )
    streams: int = Field(16, ge=1, le=1 << 20, description="lanes of the sample order; at least the number of ranks")
    shuffle: bool = Field(True, description="shuffle blocks, then rows within windows of blocks, anew every epoch")
    residence: Literal["auto", "device", "host", "stream"] = Field(
        "auto", description="where training rows are kept: GPU memory, host memory, or streamed from the files"
    )
    readers: int = Field(0, ge=0, le=256, description="reader threads per rank; 0: chosen from the CPUs of the rank")
    scratch: str = Field(
        "", description="folder on a local disk for streamed rows of compressed shards, decoded once; empty: none"
    )

    @field_validator("train")
    @classmethod
    def _not_empty(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or any(not v for v in value):
            raise ValueError("names no file")
        return value


class OptimizerConfig(_Section):
    """The update rule."""

    name: Literal["sgd", "momentum", "nesterov", "rmsprop", "adam", "adamw", "lamb"] = Field(
        "adam", description="update rule"
    )
    learning_rate: float = Field(1e-3, ge=0, description="base learning rate; see [schedule]")
    weight_decay: float = Field(0.0, ge=0, description="L2 term in the gradient; decoupled in adamw and lamb")
    clip_norm: float = Field(0.0, ge=0, description="largest norm of the whole gradient; 0: off")
    momentum: float = Field(0.9, ge=0, lt=1, description="of momentum and nesterov")
    beta1: float = Field(0.9, ge=0, lt=1, description="first-moment decay of adam, adamw, lamb")
    beta2: float = Field(0.999, ge=0, lt=1, description="second-moment decay of adam, adamw, lamb")
    rho: float = Field(0.99, ge=0, lt=1, description="square-gradient decay of rmsprop")
    epsilon: float = Field(1e-8, gt=0, description="added to the root in rmsprop, adam, adamw, lamb")


class ScheduleConfig(_Section):
    """The learning rate over the steps."""

    name: Literal["constant", "step", "cosine", "linear", "one_cycle"] = Field("constant", description="shape")
    warmup_steps: int = Field(0, ge=0, le=_MOST, description="linear rise to the base rate over so many steps")
    step_size: int = Field(1000, ge=1, le=_MOST, description="steps between the drops of `step`")
    factor: float = Field(0.1, gt=0, le=1, description="what each drop of `step` multiplies by")
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="fraction of the base rate at the end of cosine, linear, one_cycle"
    )
    peak_at: float = Field(0.3, gt=0, lt=1, description="where in the run one_cycle peaks")


class RunSection(_Section):
    """How the run goes and what it leaves behind."""

    epochs: int = Field(
        0, ge=0, le=_MOST_STEPS, description="passes over the data (default 10 where `steps` is not given)"
    )
    steps: int = Field(0, ge=0, le=_MOST_STEPS, description="optimizer steps, instead of `epochs`")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the initial weights and the sample order")
    engine: Literal["auto", "fused", "reference"] = Field("auto", description="auto: fused where there is a GPU")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="of the matrix products; master weights and sums are always float32"
    )
    transport: Literal["auto", "mpi", "staged", "nccl", "peer"] = Field("auto", description="the all-reduce")
    output: str = Field("run", min_length=1, description="directory of the results, relative to this file")
    checkpoint_every: str = Field("1 epoch", description='interval: "1 epoch", "500 steps" or "10 minutes"')
    keep: int = Field(3, ge=1, le=_MOST, description="newest checkpoints kept, besides the best")
    log_every: int = Field(50, ge=1, le=_MOST, description="steps between log lines")
    log_ranks: bool = Field(False, description="keep a log of every rank too, in `ranks/` of the output")
    validate_every: str = Field("1 epoch", description="interval between validations")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="at a non-finite loss or gradient: end the run, or leave out that batch (validation: those rows)",
    )
    early_stopping: int = Field(0, ge=0, le=_MOST, description="validations without improvement before the end; 0: off")
    ema_decay: float = Field(0.0, ge=0, lt=1, description="of an average of the weights beside them; 0: off")
    reproducible: Literal["run", "ranks"] = Field(
        "run", description="same bits from run to run, or also across rank counts"
    )
    share_gpu: bool = Field(False, description="let several ranks share one GPU")
    stall_timeout: str = Field("10 minutes", description="a rank silent for so long ends the job")
    tensorboard: bool = Field(False, description="write event files too (extra)")

    @field_validator("checkpoint_every", "validate_every")
    @classmethod
    def _interval(cls, value: str) -> str:
        Interval.parse(value)
        return value

    @field_validator("stall_timeout")
    @classmethod
    def _duration(cls, value: str) -> str:
        if not Interval.parse(value).seconds:
            raise ValueError('expected a time, such as "10 minutes"')
        return value

    @model_validator(mode="before")
    @classmethod
    def _length(cls, data: Any) -> Any:
        return {**data, "epochs": 10} if isinstance(data, dict) and not {"epochs", "steps"} & data.keys() else data

    @model_validator(mode="after")
    def _check(self) -> RunSection:
        if self.epochs and self.steps:
            raise ValueError(f"give `epochs` or `steps`, not both ({self.epochs} and {self.steps})")
        if not self.epochs and not self.steps:
            raise ValueError("nothing to train: `epochs` and `steps` are 0; give one of them a positive number")
        return self


class RunConfig(_Section):
    """Everything that defines a run.

    Build it from a file with `RunConfig.load`, or directly:
    `RunConfig(model={"hidden": [64]}, data={"train": "shards/*.h5"})`.
    Invalid values raise `ConfigError` (`load`, `parse`) or pydantic's `ValidationError` (constructor).
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    run: RunSection = RunSection()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = (), output: str | None = None) -> RunConfig:
        """Read a TOML file, apply `section.key=VALUE` overrides, check everything.

        Paths in the file are relative to the file; paths in `overrides` and `output` to the working
        directory. Raises ConfigError.
        """
        path = Path(path)
        document = read_document(path)
        anchor_paths(document, path.parent)
        for override in overrides:
            apply_override(document, override, sections())
        if output is not None:
            run = document.setdefault("run", {})
            if isinstance(run, dict):
                run["output"] = absolute(output) if output else ""
        return cls.parse(document, str(path))

    @classmethod
    def from_toml(cls, text: str, source: str) -> RunConfig:
        """Check TOML text, such as a checkpoint's `config`. Raises ConfigError."""
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise ConfigError(f"{source}: not valid TOML: {error or 'nested too deeply'}") from None
        return cls.parse(document, source)

    @classmethod
    def parse(cls, document: dict[str, Any], source: str = "") -> RunConfig:
        """Check a nested dictionary. Raises ConfigError naming every bad key, its value and its nearest known key."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            lines = "\n".join(f"  {line}" for line in explain(error, sections()))
            raise ConfigError(f"{' '.join(('configuration', source)).strip()}:\n{lines}") from None

    def to_toml(self) -> str:
        """The configuration with every default written out; `from_toml` reads it back to an equal one."""
        return tomli_w.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dictionary; keys that are not set are left out."""
        document = self.model_dump(mode="json", exclude_none=True)
        if not document["model"]["layers"]:
            del document["model"]["layers"]
        run = document["run"]
        run.pop("steps" if run["epochs"] else "epochs")
        return document

    def with_layers(self, inputs: int, outputs: int) -> RunConfig:
        """The same configuration with `hidden` replaced by all widths."""
        if self.model.hidden is None:
            return self
        document = self.to_dict()
        document["model"]["layers"] = [inputs, *document["model"].pop("hidden"), outputs]
        return RunConfig.parse(document)

    def changes(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """`section.key` → (value here, value in `other`) of every key that differs."""
        mine, theirs = dict(_leaves(self.to_dict())), dict(_leaves(other.to_dict()))
        return {
            key: (mine.get(key), theirs.get(key))
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        }


def sections() -> dict[str, type[BaseModel]]:
    """Section name → its model, in the order of the file."""
    return {
        "model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig,
        "run": RunSection,
    }  # fmt: skip


def _leaves(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, keys in document.items():
        for key, value in keys.items():
            yield f"{section}.{key}", value
