"""What holds for the project as a whole: its layout, its one version, and what its files may not name."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import PROJECT

import distmlp

TOP_LEVEL = {
    "CHANGELOG.md", "LICENSE", "README.md", "datasets", "distmlp", "launch", "pyproject.toml", "slurm", "tests",
}  # fmt: skip
MOST_LINES = 400  # not counting empty ones
# Home directories of a particular machine, and hosts that a clone elsewhere may not reach or should not need.
FOREIGN = re.compile(r"/root/|/home/\w|https?://[\w.]*(pypi|debian|npm)", re.IGNORECASE)


def tracked() -> list[Path]:
    """Every file of the project, as git knows it."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := PROJECT / name).is_file()]


def test_top_level_holds_only_what_was_asked_for() -> None:
    names = {path.relative_to(PROJECT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_source_files_are_short() -> None:
    lengths = {
        path.relative_to(PROJECT).as_posix(): sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line)
        for path in tracked()
        if path.suffix in {".py", ".cu", ".cuh"} and "distmlp" in path.relative_to(PROJECT).parts[:1]
    }
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Not even for type checking: whoever reads one module must not need to have read another that needs it."""
    modules = {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (PROJECT / "distmlp").rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {
                    full if (full := f"{node.module}.{a.name}") in modules else node.module for a in node.names
                }
            elif isinstance(node, ast.Import):
                imported |= {a.name for a in node.names}
    graph.pop("distmlp")  # gives users their names from everywhere
    graph = {name: (imported & graph.keys()) - {name} for name, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__) or path.stat().st_size > 400_000:
            continue
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
        found += [f"{path.relative_to(PROJECT)}:{n}" for n, line in enumerate(lines, 1) if FOREIGN.search(line)]
    assert found == []


def test_documents_that_are_named_exist() -> None:
    """A reader of a clone has nothing else."""
    names = {path.name for path in tracked()}
    for path in tracked():
        if path.suffix in (".py", ".md", ".cu", ".cuh", ".sh", ".sbatch", ".toml"):
            found = set(re.findall(r"\b[A-Z][A-Z-]+\.md\b", path.read_text(encoding="utf-8")))
            assert found <= {*names, "FILE.md"}, f"{path.relative_to(PROJECT)}: {found - names}"


def test_version_stands_in_one_place() -> None:
    configuration = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in configuration
    assert re.search(r"^version\s*=", configuration, re.MULTILINE) is None
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == distmlp.__version__  # type: ignore[index]


@pytest.mark.parametrize("name", ["launch/quickstart", "launch/test"])
def test_commands_can_be_run(name: str) -> None:
    assert os.access(PROJECT / name, os.X_OK)


@pytest.mark.parametrize("name", ["launch/setup.sh", "launch/quickstart", "launch/test", ".ci/run"])
def test_scripts_are_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(PROJECT / name)], check=True)


def test_quickstart_says_what_it_takes() -> None:
    result = subprocess.run([PROJECT / "launch" / "quickstart", "--help"], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0
    assert "--fresh" in result.stdout
    wrong = subprocess.run([PROJECT / "launch" / "quickstart", "--nonsense"], capture_output=True, text=True, cwd="/")
    assert wrong.returncode != 0
    assert "--nonsense" in wrong.stderr
