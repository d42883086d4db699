"""The table of keys in README.md is the one that the model gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distmlp.config import sections
from distmlp.config_reference import BEGIN, END, reference_table, with_table

PROJECT = Path(__file__).parents[1]


def test_the_reference_names_every_key_once():
    table = reference_table()
    for model in sections().values():
        for key, field in model.model_fields.items():
            assert field.description, key
            assert f"| `{key}` |" in table
    assert table.count("\n| `") == sum(len(model.model_fields) for model in sections().values())


def test_the_readme_holds_the_reference_of_this_model():
    """Renew it with `python -m distmlp.config_reference README.md`."""
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert with_table(text) == text


def test_the_reference_is_written_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "distmlp.config_reference", str(path)], check=True, cwd=Path(__file__).parents[1]
    )
    assert path.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{reference_table()}{END}\nafter\n"
    with pytest.raises(ValueError, match="keys"):
        with_table("nothing here")
