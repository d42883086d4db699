"""The seal of a checkpoint: 512 bytes before the HDF5 part that say what it is and hold a digest of all of it.

HDF5 leaves a user block at the start of a file to its users. Ours holds one line of JSON, the SHA-256 of
that line and of everything after the block, and zeros. So damage is found before any HDF5 structure is
interpreted (libhdf5 was never meant to meet hostile bytes), a newer format is known by its number
whatever it looks like inside, and a directory of checkpoints is listed from 512 bytes of each.
`h5py`, `h5dump` and every other reader skip the block by themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from io import BufferedReader
from typing import Any

from distmlp.errors import CheckpointError
from distmlp.files import PIECE_BYTES

SEAL_BYTES = 512
FORMAT = "distmlp-checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Seal:
    """What the first line of a checkpoint says."""

    step: int
    validation: float | None  # validation loss measured at this very step
    size_bytes: int  # of the whole file
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def line(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode() + b"\n"

    def block(self, digest: str) -> bytes:
        """The 512 bytes at the start of the file."""
        return (self.line() + digest.encode() + b"\n").ljust(SEAL_BYTES, b"\0")


class Sealing:
    """Digest of a file in the making: iterate over it to get the pieces, then take `block`."""

    def __init__(self, seal: Seal, pieces: Iterable[bytes | memoryview]) -> None:
        self._seal, self._pieces = seal, pieces
        self._digest = hashlib.sha256(seal.line())

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield bytes(SEAL_BYTES)
        for piece in self._pieces:
            self._digest.update(piece)
            yield piece

    def block(self) -> bytes:
        return self._seal.block(self._digest.hexdigest())


def read_seal(file: BufferedReader, where: str) -> tuple[Seal, str]:
    """The seal of an open file and the digest it holds. Raises CheckpointError; reads 512 bytes."""
    file.seek(0)
    block = file.read(SEAL_BYTES)
    if not block:
        raise CheckpointError(f"{where}: the file is empty")
    if len(block) < SEAL_BYTES:
        raise CheckpointError(f"{where}: cut short: {len(block)} bytes; a checkpoint begins with {SEAL_BYTES}")
    line, _, rest = block.partition(b"\n")
    fields = _fields(line)
    if fields is None or fields.get("format") != FORMAT:
        kind = "an HDF5 file, but not a checkpoint of distmlp" if block.startswith(b"\x89HDF\r\n\x1a\n") else (
            "damaged at its start, or not a checkpoint of distmlp")  # fmt: skip
        raise CheckpointError(f"{where}: {kind}")
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise newer_format(where, version)
    try:
        seal = Seal(**fields)
        digest = rest.partition(b"\n")[0].decode("ascii")
        intact = type(seal.step) is int and type(seal.size_bytes) is int and seal.block(digest) == block
    except (TypeError, ValueError):
        intact = False
    if not intact:
        raise CheckpointError(f"{where}: damaged: its first {SEAL_BYTES} bytes are not as they were written")
    return seal, digest


def _fields(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def newer_format(where: str, version: int) -> CheckpointError:
    """The refusal of a checkpoint of a format this version does not know."""
    return CheckpointError(
        f"{where}: format_version {version} is newer than {FORMAT_VERSION}, the newest this version of distmlp reads; "
        "update distmlp"
    )


def breakage(file: BufferedReader, where: str) -> str:
    """What tells an open file from the one that was sealed; empty when nothing does.

    Reads all of it; raises what `read_seal` raises.
    """
    seal, expected = read_seal(file, where)
    actual = os.fstat(file.fileno()).st_size
    if actual != seal.size_bytes:
        return (
            f"{'cut short' if actual < seal.size_bytes else 'grown'}: {actual:,} bytes instead of {seal.size_bytes:,}"
        )
    digest = hashlib.sha256(seal.line())
    buffer = memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return "" if digest.hexdigest() == expected else "changed since it was written: the SHA-256 of its bytes differs"
