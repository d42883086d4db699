"""A configuration file: TOML text, from a file or a pipe."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from distmlp.errors import ConfigError

_MOST_BYTES = 16 << 20


def read_document(path: Path) -> dict[str, Any]:
    """The nested dictionary that the file holds, unchecked. Raises ConfigError."""
    try:
        return tomllib.loads(_read(path).decode("utf-8-sig"))  # editors on Windows write a mark
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror or error}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"configuration {path}: not valid TOML: {error or 'nested too deeply'}") from None


def _read(path: Path) -> bytes:
    """What a file holds, or a pipe such as a shell's `<(…)`; one that nobody writes to is empty, and not waited for.

    Raises OSError, and ValueError for what never ends.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.set_blocking(handle, True)
        content = b""
        while piece := os.read(handle, 1 << 20):
            content += piece
            if len(content) > _MOST_BYTES:
                raise ValueError(f"longer than {_MOST_BYTES:,} bytes")
        return content
    finally:
        os.close(handle)
