"""The commands: each reads its arguments, calls one function and gives back its exit code.

Nothing heavy is imported here before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"distmlp {__version__}")
        raise typer.Exit


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The configuration.")],
    set_: Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key.")] = [],  # noqa: B006
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where the results go.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest good checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove an earlier run's results first.")] = False,
) -> int:
    """Train a network; under mpirun or srun, on all ranks."""
    from distmlp.comm.world import open_world
    from distmlp.config import RunConfig
    from distmlp.training import train as run_training

    world = open_world()
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


def main(arguments: list[str] | None = None) -> NoReturn:
    """The program `distmlp`: ends the process with the exit code of the command."""
    from distmlp.comm.policy import guarded

    guarded(lambda: _dispatch(sys.argv[1:] if arguments is None else arguments))


def _dispatch(arguments: list[str]) -> int:
    from distmlp.errors import ConfigError

    try:
        return app(args=arguments, prog_name="distmlp", standalone_mode=False) or 0
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's usage errors, by shape: their class moved between releases
            context = getattr(error, "ctx", None)
            where = context.command_path if context else "distmlp"
            raise ConfigError(f"{where}: {error.format_message()} See `{where} --help`.") from None
        raise
