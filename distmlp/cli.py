"""The commands: each reads its arguments, calls one function and gives back its exit code.

Nothing heavy is imported here before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distmlp import __version__

app = typer.Typer(
    help="Train multilayer perceptrons on many GPUs: one kernel launch a step.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
data_app = typer.Typer(
    help="Look at shards, and make them from other formats.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(data_app, name="data")

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, or the output directory of a run.")]
Data = Annotated[str, typer.Option("--data", metavar="GLOB", help="HDF5 shards.")]
InputsName = Annotated[str, typer.Option("--inputs", metavar="NAME", help="Dataset of the inputs (as trained).")]
TargetsName = Annotated[str, typer.Option("--targets", metavar="NAME", help="Dataset of the targets.")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"distmlp {__version__}")
        raise typer.Exit


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The configuration.")],
    set_: Overrides = [],  # noqa: B006
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where the results go.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove an earlier run's results first.")] = False,
) -> int:
    """Train a network; under mpirun or srun, on all ranks."""
    from distmlp.comm.signals import StopRequest

    with StopRequest(announced=True):  # one that comes while all is being opened must not kill the job unsaved
        return _train(run, set_, output, resume, overwrite)


def _train(run: Path, set_: list[str], output: str | None, resume: bool, overwrite: bool) -> int:
    from distmlp.comm.world import open_world
    from distmlp.config import RunConfig
    from distmlp.training import train as run_training

    world = open_world(try_devices=True)
    config = world.agree(lambda: RunConfig.load(run, set_, output))
    run_training(config, resume=resume, overwrite=overwrite, world=world, report=True)
    return 0


@app.command()
def evaluate(checkpoint: Checkpoint, data: Data, inputs: InputsName = "", targets: TargetsName = "") -> int:
    """Print loss and metrics over shards as one JSON object."""
    from distmlp.model import run_evaluate

    return run_evaluate(checkpoint, data, inputs, targets)


@app.command()
def predict(
    checkpoint: Checkpoint,
    data: Data,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.h5", help="Where the predictions go.")],
    inputs: InputsName = "",
) -> int:
    """Write `predictions` (samples x outputs; class probabilities for softmax) in input order."""
    from distmlp.model import run_predict

    return run_predict(checkpoint, data, out, inputs)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", metavar="onnx|safetensors|npz", help="The format.")],
) -> int:
    """Write the network in another format, standardization included: raw inputs go in."""
    from distmlp.tools.export import run_export

    return run_export(checkpoint, to, out)


@app.command()
def inspect(checkpoint: Checkpoint) -> int:
    """Print what is inside a checkpoint: network, step, precision, versions, configuration."""
    from distmlp.tools.inspect import run_inspect

    return run_inspect(checkpoint)


@app.command()
def doctor(as_json: Json = False) -> int:
    """Say what this machine offers, which engine and transport `auto` would take, and what to do about the rest."""
    from distmlp.tools.doctor import run_doctor

    return run_doctor(as_json)


@app.command()
def bench(
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A preset, or a network as 9-64x2-3@128.")] = None,
    as_json: Json = False,
) -> int:
    """Time training steps of the network presets, beside the limit of the hardware."""
    from distmlp.tools.bench import run_bench

    return run_bench(preset, as_json)


@app.command()
def scaling(
    what: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN.toml | compare A B", help="A run to sweep; or two reports.")
    ] = None,
    ranks: Annotated[str, typer.Option(metavar="1,2,4", help="Rank counts.")] = "1,2",
    mode: Annotated[str, typer.Option(metavar="weak|strong|both", help="Batch per rank fixed, or global.")] = "both",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report goes.")] = Path("scaling"),
    from_: Annotated[list[Path], typer.Option("--from", metavar="DIR", help="Finished runs (repeatable).")] = [],  # noqa: B006
    set_: Overrides = [],  # noqa: B006
    launcher: Annotated[str, typer.Option(metavar="LINE", help="Launch line; default: mpirun, or srun in a job.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of a point, warm-up included; 0: chosen.")] = 0,
    target_loss: Annotated[float | None, typer.Option(metavar="LOSS", help="Report the time to this loss.")] = None,
) -> int:
    """Measure speedup and efficiency over rank counts and write a report, or compare two reports."""
    from distmlp.errors import ConfigError
    from distmlp.tools.scaling import run_scaling
    from distmlp.tools.scaling_report import run_compare

    words = what or []
    if words and str(words[0]) == "compare":
        if len(words) != 3:
            raise ConfigError("scaling compare: give the directories of two reports: distmlp scaling compare A B")
        return run_compare(words[1], words[2])
    if from_:
        from_, words = [*from_, *words], []
    if len(words) > 1:
        raise ConfigError(f"scaling: one RUN.toml at a time, got {', '.join(map(str, words))}")
    return run_scaling(
        words[0] if words else None, ranks, mode, out,
        from_=from_, set_=set_, launcher=launcher, steps=steps, target_loss=target_loss,
    )  # fmt: skip


@data_app.command("check")
def data_check(
    patterns: Annotated[list[str], typer.Argument(metavar="GLOB...", help="HDF5 shards.")],
    inputs: Annotated[str, typer.Option(metavar="NAME", help="Dataset of the inputs.")] = "inputs",
    targets: Annotated[str, typer.Option(metavar="NAME", help="Dataset of the targets; empty: none.")] = "targets",
    sample_weights: Annotated[str, typer.Option(metavar="NAME", help="Dataset of the sample weights.")] = "",
    run: Annotated[
        Path | None, typer.Option("--for", metavar="RUN.toml", help="Can they keep the network of this run busy?")
    ] = None,
) -> int:
    """Open, validate and summarise shards: rows, shapes, dtypes, NaN count, label range, chunking, filters."""
    from distmlp.data.commands import check_command

    code = check_command(patterns, inputs, targets, sample_weights)
    if run is None or code:
        return code
    from distmlp.data.commands import on_first_rank
    from distmlp.tools.busy import forecast

    return on_first_rank(lambda: print(forecast(run, patterns)) or 0)


@data_app.command("convert")
def data_convert(
    paths: Annotated[list[str], typer.Argument(metavar="SOURCE... OUT.h5", help="CSV, NPY, NPZ, IDX, Parquet, HDF5.")],
    rows_per_shard: Annotated[int, typer.Option(min=0, metavar="N", help="Rows of a shard; 0: one shard.")] = 0,
    inputs: Annotated[str, typer.Option(metavar="COLUMNS", help="Names or numbers, separated by commas.")] = "",
    targets: Annotated[str, typer.Option(metavar="COLUMNS", help="The same; default: the last column.")] = "",
    weights: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the sample weights.")] = "",
    labels: Annotated[bool, typer.Option("--labels", help="The target is a class label.")] = False,
    category: Annotated[
        list[str], typer.Option(metavar="COLUMN=A,B,...", help="Values of a categorical column, as 0, 1, ...")
    ] = [],  # noqa: B006
    missing: Annotated[str, typer.Option(metavar="drop|NUMBER", help="Missing values; default: refused.")] = "",
    header: Annotated[bool | None, typer.Option(help="Whether CSV files begin with names; default: seen.")] = None,
    validation: Annotated[float, typer.Option(min=0, max=1, help="Share of rows set apart for validation.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the choice of those rows.")] = 0,
    checksums: Annotated[bool, typer.Option("--checksums", help="Store one per block; reading verifies them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace shards of that name.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an interrupted conversion finished.")] = False,
) -> int:
    """Make shards from other formats, in constant memory, complete or absent; under mpirun, ranks share the shards."""
    from distmlp.data.commands import convert_command

    return convert_command(
        paths, rows_per_shard=rows_per_shard, inputs=inputs, targets=targets, weights=weights, labels=labels,
        category=category, missing=missing, header=header, validation=validation, seed=seed, checksums=checksums,
        overwrite=overwrite, resume=resume,
    )  # fmt: skip


def dispatch(arguments: list[str]) -> int:
    """Run the command in `arguments`; its exit code. Usage errors become ConfigError."""
    from distmlp.comm.policy import leave_to_first_rank
    from distmlp.errors import ConfigError

    if arguments[:1] in (["export"], ["inspect"]) and leave_to_first_rank():
        return 0
    try:
        return app(args=arguments, prog_name="distmlp", standalone_mode=False) or 0
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's usage errors, by shape: their class moved between releases
            context = getattr(error, "ctx", None)
            where = context.command_path if context else "distmlp"
            raise ConfigError(f"{where}: {error.format_message()} See `{where} --help`.") from None
        raise
