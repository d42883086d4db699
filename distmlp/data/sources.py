"""Which files a pattern means. Pure apart from looking at the file system."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from distmlp.errors import DataError


def expand(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """The files of one or several glob patterns, sorted by path, each once.

    A path that exists is taken as it is, whatever characters it holds. Raises DataError naming every
    pattern that matches nothing.
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            problems.append(f"{pattern}: {_why_nothing(pattern)}")
        found.update(os.path.abspath(match) for match in matches)
    if problems:
        raise DataError("\n".join(problems))
    return tuple(sorted(found))


def _why_nothing(pattern: str) -> str:
    folder = os.path.dirname(pattern) or "."
    kind = "this pattern matches no file" if glob.has_magic(pattern) else "no such file"
    if glob.has_magic(folder):
        return f"{kind}; give the path of HDF5 shards, or a pattern such as shards/train-*.h5"
    while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if folder != (os.path.dirname(pattern) or "."):
        return f"{kind}: the folder does not exist (only {folder or '.'} does)"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"{kind}: {(error.strerror or str(error)).lower()}"
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{kind}; the folder holds {shown or 'nothing'}"
