"""Data-parallel training of multilayer perceptrons: a whole training step is one CUDA kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distmlp.comm.policy import guard_script

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "load", "train"]

if TYPE_CHECKING:
    from distmlp.config import RunConfig
    from distmlp.model import load
    from distmlp.training import train

_HOMES = {"RunConfig": "distmlp.config", "train": "distmlp.training", "load": "distmlp.model"}


def __getattr__(name: str) -> Any:  # what `import distmlp` costs must not include NumPy, pydantic or MPI
    if name in _HOMES:
        import importlib

        guard_script()  # before the import, which may be what fails on one rank of a user's script
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'distmlp' has no attribute {name!r}")
