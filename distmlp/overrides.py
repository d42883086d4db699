"""`--set section.key=VALUE` on top of a configuration file, and what its paths are relative to."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from distmlp.config_messages import nearest
from distmlp.errors import ConfigError

_PATHS = (("data", "train"), ("data", "validation"), ("data", "scratch"), ("run", "output"))
_EXCLUSIVE = {
    ("model", "layers"): "hidden",
    ("model", "hidden"): "layers",
    ("run", "epochs"): "steps",
    ("run", "steps"): "epochs",
}


def absolute(path: str | Path) -> str:
    """`path` from the root. Raises ConfigError where the working directory has gone."""
    try:
        return str(Path(path).absolute())
    except OSError as error:
        raise ConfigError(
            f"{path}: relative to the working directory, which cannot be had: {error.strerror or error}; change to "
            "another directory, or give a path from the root"
        ) from None


def anchor_paths(document: dict[str, Any], folder: Path) -> None:
    """Make the paths in `document` absolute, relative ones from `folder`."""
    for section, key in _PATHS:
        keys = document.get(section)
        if isinstance(keys, dict) and key in keys:
            keys[key] = _anchored(keys[key], folder)


def _anchored(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value:
        return absolute(folder / value)
    if isinstance(value, list):
        return [_anchored(item, folder) for item in value]
    return value


def apply_override(document: dict[str, Any], override: str, sections: Collection[str]) -> None:
    """Put `section.key=VALUE` into `document`. The value itself is checked with the rest. Raises ConfigError."""
    name, equals, text = override.partition("=")
    section, dot, key = (part.strip() for part in name.partition("."))
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override}: expected section.key=VALUE, such as --set data.batch=256")
    if section not in sections:
        raise ConfigError(f"--set {override}: unknown section `{section}`{nearest(section, sections)}")
    value = _parse(text.strip())
    if (section, key) in _PATHS:
        value = _anchored(value, Path())
    keys = document.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigError(f"--set {override}: `{section}` is not a section in the configuration file")
    keys[key] = value
    if value != 0 and (other := _EXCLUSIVE.get((section, key))):  # the later word wins over the file's
        keys.pop(other, None)


def _parse(text: str) -> Any:
    """A TOML value; anything else is a string as it stands, and so are dates, which no key takes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    value = document.get("value")
    whole = len(document) == 1 and not isinstance(value, datetime.date | datetime.time)
    return value if whole else text
