"""Every command in the documents works: run where that needs no GPU and no cluster, else checked against the parser.

A block of shell lines whose first line is one of the comments in `NOT_HERE` is checked only; all others are run, in
the order of the document, in one directory that holds what a clone holds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PROJECT, clean_environment

from distmlp.config import sections
from distmlp.config_reference import with_table

DOCUMENTS = ("README.md", "slurm/README.md")
NOT_HERE = ("# from a fresh clone", "# on a GPU machine", "# on a cluster", "# cluster")
_PROGRAM = re.compile(r"\bdistmlp (?P<command>data (?:check|convert)|scaling|[a-z]+)\b(?P<rest>[^|;&]*)")
_SCRIPT = re.compile(r"\bslurm/(?P<name>train|scaling)\.sbatch\b(?P<rest>[^|;&]*)")


def blocks(document: str, language: str = "sh") -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", (PROJECT / document).read_text(encoding="utf-8"), re.DOTALL)


def is_run(block: str) -> bool:
    return not block.startswith(NOT_HERE)


RUN = [pytest.param(block, id=block.splitlines()[0]) for block in blocks("README.md") if is_run(block)]
CHECKED = [block for document in DOCUMENTS for block in blocks(document) if not is_run(block)]
LINES = [line for block in CHECKED for line in block.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builders, configurations and the digits in a directory of their own: the project stays as it is."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "datasets").mkdir()
    for path in (PROJECT / "datasets").iterdir():
        if path.is_file():
            shutil.copy(path, folder / "datasets" / path.name)
    subprocess.run([sys.executable, "datasets/digits.py"], cwd=folder, env=environment(), check=True)
    return folder


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment({"PATH": path})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("block", RUN)
def test_commands_run(block: str, clone: Path) -> None:
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=clone,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=170,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("block", blocks("README.md", "python"))
def test_python_runs(block: str, clone: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", block], cwd=clone, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", CHECKED)
def test_shell_is_valid(block: str) -> None:
    subprocess.run(["bash", "-n", "-c", block], check=True)


@pytest.mark.parametrize("line", LINES)
def test_commands_exist(line: str) -> None:
    for word in shlex.split(line):
        if re.fullmatch(r"(launch|slurm|datasets)/\S+", word):
            assert (PROJECT / word).exists(), word
    for command, rest in used_commands(line):
        known = options_of(command)
        words = shlex.split(rest)
        for option in (word for word in words if word.startswith("--")):
            assert option.partition("=")[0] in known, f"distmlp {command} has no {option}"
        for word in words:
            if match := re.fullmatch(r"([a-z]+)\.([a-z_0-9]+)=.+", word):
                assert match[2] in sections()[match[1]].model_fields, word


def used_commands(line: str) -> Iterator[tuple[str, str]]:
    """(command, its arguments) of every use of the program in a line, directly or through a batch script."""
    for match in _PROGRAM.finditer(line):
        yield match["command"], match["rest"]
    for match in _SCRIPT.finditer(line):
        yield match["name"], match["rest"]


_OPTIONS: dict[str, set[str]] = {}


def options_of(command: str) -> set[str]:
    """The options that `distmlp COMMAND --help` names."""
    if command not in _OPTIONS:
        words = [sys.executable, "-m", "distmlp", *command.split(), "--help"]
        result = subprocess.run(words, capture_output=True, text=True, env=environment())
        assert result.returncode == 0, f"distmlp {command}: {result.stderr}"
        _OPTIONS[command] = set(re.findall(r"--[a-z][a-z-]*", result.stdout))
    return _OPTIONS[command]


def test_table_of_keys_is_current() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert with_table(text) == text, "run `python -m distmlp.config_reference README.md`"


RESULTS = PROJECT / "tests" / "benchmarks" / "results"


@pytest.mark.parametrize("result", sorted(RESULTS.glob("h200*.json")), ids=lambda path: path.stem)
def test_benchmark_tables_are_those_of_the_results(result: Path) -> None:
    from benchmarks.report import told

    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    whole, shown = told(json.loads(result.read_text(encoding="utf-8")), result.stem)
    assert shown in text, "run tests/benchmarks/report.py"
    assert result.with_suffix(".md").read_text(encoding="utf-8") == whole + "\n", "run tests/benchmarks/report.py"


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        folder = (PROJECT / document).parent
        for target in re.findall(r"\]\(([^)#]+)\)", (PROJECT / document).read_text(encoding="utf-8")):
            assert (folder / target).exists(), f"{document}: {target}"


def test_exit_codes_are_those_of_the_program() -> None:
    from distmlp import errors

    table = set(
        map(int, re.findall(r"^\| (\d+) \|", (PROJECT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    )
    known = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert table == known | {0}
