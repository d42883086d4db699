"""The command line itself: help that answers at once, usage errors, exit codes."""

import resource
import subprocess
import sys

import pytest

from tests.launching import clean_environment, run_distmlp

COMMANDS = [
    [], ["train"], ["evaluate"], ["predict"], ["export"], ["inspect"], ["doctor"], ["bench"], ["scaling"], ["data"],
    ["data", "check"], ["data", "convert"],
]  # fmt: skip
# pydantic is missing here: newer typer brings it in by itself, in 20 ms
HEAVY = {"cupy", "mpi4py", "numpy", "h5py", "rich", "sklearn", "torch", "matplotlib"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys\nfrom distmlp.cli import app\n"
        f"app(args={[*command, '--help']!r}, prog_name='distmlp', standalone_mode=False)\n"
        f"print('LOADED', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert "Usage: distmlp" in done.stdout
    assert done.stdout.endswith("LOADED []\n")


def test_help_is_quick():
    """Contract: under 0.3 s on a machine of one's own; the bound leaves room for one shared with other tests."""
    assert min(_processor_seconds(["train", "--help"]) for _ in range(5)) < 0.6


def _processor_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run_distmlp(arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_print_once_under_a_launcher(arguments):
    alone, together = run_distmlp(arguments), run_distmlp(arguments, 3)
    assert (alone.returncode, together.returncode) == (0, 0)
    assert together.stdout == alone.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "RUN.toml"),
        (["train", "missing.toml"], "missing.toml"),
        (["train", "--bogus", "x.toml"], "--bogus"),
        (["nonsense"], "nonsense"),
        (["export", "x.h5", "y"], "--to"),
        (["scaling", "compare", "a"], "compare A B"),
    ],
)
@pytest.mark.parametrize("ranks", [0, 2])
def test_usage_errors_are_one_message_and_code_2(tmp_path, arguments, said, ranks):
    result = run_distmlp(arguments, ranks, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("distmlp: error:") == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["evaluate"], ["inspect"], ["export", "--to", "npz", "--", "OUT"]])
def test_a_missing_checkpoint_is_code_3(tmp_path, command):
    more = ["--data", "x.h5"] if command == ["evaluate"] else []
    place = ["gone.h5", *command[4:]] if command[0] == "export" else ["gone.h5"]
    result = run_distmlp([command[0], *place, *command[1:3], *more], cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    assert "gone.h5" in result.stderr
