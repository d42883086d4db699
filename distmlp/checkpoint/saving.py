"""Checkpoints to disk and back: complete or not at all, verified before use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from numpy.typing import NDArray

from distmlp.checkpoint.autopsy import explained
from distmlp.checkpoint.contents import (
    Checkpoint,
    attributes_of,
    content_sha256,
    expected_shapes,
    finite_or_none,
    interpret,
    tensors_of,
)
from distmlp.checkpoint.layout import Layout, write_layout
from distmlp.checkpoint.seal import SEAL_BYTES, Seal, Sealing, breakage
from distmlp.errors import CheckpointError
from distmlp.files import PIECE_BYTES, describe, open_regular, replace_file
from distmlp.network import Network


def save(path: str | Path, checkpoint: Checkpoint, network: Network) -> None:
    """Write a checkpoint to `path`, complete or not at all, on disk when this returns.

    Raises CheckpointError naming the path and, where the disk is full, the bytes needed and free.
    """
    path = Path(path)
    tensors = tensors_of(checkpoint, network)
    attributes = attributes_of(checkpoint)
    attributes["sha256"] = content_sha256(attributes, tensors)
    shapes = {name: (tensor.dtype.str, tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected_shapes(attributes, f"checkpoint {path}"):
        raise ValueError("the state to be saved has not the tensors that its configuration asks for")
    layout = write_layout(shapes, attributes, SEAL_BYTES)
    sealing = Sealing(
        Seal(checkpoint.step, finite_or_none(checkpoint.validation), layout.size_bytes), _pieces(layout, tensors)
    )
    try:
        replace_file(path, sealing, sealing.block)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: could not be written: {describe(error, path.parent, layout.size_bytes)}; "
            "checkpoints saved before are intact: mend the cause, then go on with --resume"
        ) from None


def load(path: str | Path, *, explain: bool = True) -> Checkpoint:
    """Read a checkpoint and verify all of it before any of it is used.

    Raises CheckpointError that says what is wrong. A file that is not as it was written is never
    interpreted in this process; with `explain` a child process tries to tell what is wrong inside.
    """
    path = Path(path)
    where = f"checkpoint {path}"
    try:
        with open_regular(path) as file:
            broken = breakage(file, where)
            if not broken:
                return interpret(file, where)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from None
    inside = explained(path) if explain else ""
    raise CheckpointError(
        f"{where}: {broken}{inside and f'; inside: {inside}'}; take another checkpoint, or a copy of it"
    )


def _pieces(layout: Layout, tensors: dict[str, NDArray]) -> Iterator[bytes | memoryview]:
    """The HDF5 part of the file from front to back."""
    position = SEAL_BYTES
    for name, offset in sorted(layout.offsets.items(), key=lambda item: item[1]):
        yield layout.structure(position, offset)
        data = tensors[name].data.cast("B")
        for start in range(0, data.nbytes, PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
        position = offset + data.nbytes
    yield layout.structure(position, layout.size_bytes)
