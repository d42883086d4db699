"""The HDF5 structure around the tensors of a checkpoint, written and read without touching the tensors' bytes.

Only hard-linked groups, contiguous datasets of known type and shape and a fixed set of root attributes
are written, and only those are accepted when reading: whatever else a file holds (links elsewhere,
external or virtual storage, filters, further members) it is refused, and nothing unexpected is followed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import h5py
import numpy as np
from h5py import h5a, h5d, h5l, h5o, h5p, h5s, h5t

from distmlp.errors import CheckpointError

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dataset path → dtype as NumPy writes it, shape

_TYPES = {"<f4": h5t.IEEE_F32LE, "<f8": h5t.IEEE_F64LE}
_TEXTS = ("format", "config", "versions", "history", "standardized", "sha256")
_COUNTS = (
    "format_version",
    "step",
    "epoch",
    "step_in_epoch",
    "seed",
    "updates",
    "skipped",
    "stale_validations",
    "rows",
)
_OPTIONAL = ("best", "validation", "epoch_loss", "epoch_weight")
_PAGE_BYTES = 4096


class _Pages(io.RawIOBase):
    """A sparse file in memory: only pages that were written take room."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[int, bytearray] = {}
        self.size = self.position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def truncate(self, size: int | None = None) -> int:
        self.size = self.position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        done = 0
        while done < len(data):
            number, start = divmod(self.position + done, _PAGE_BYTES)
            part = data[done : done + _PAGE_BYTES - start]
            self.pages.setdefault(number, bytearray(_PAGE_BYTES))[start : start + len(part)] = part
            done += len(part)
        self.position += done
        self.size = max(self.size, self.position)
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.between(self.position, self.position + len(view))
        self.position += len(view)
        return len(view)

    def between(self, start: int, stop: int) -> bytes:
        out = bytearray()
        while start < stop:
            number, skip = divmod(start, _PAGE_BYTES)
            page = self.pages.get(number) or bytes(_PAGE_BYTES)
            part = page[skip : skip + stop - start]
            out += part
            start += len(part)
        return bytes(out)


@dataclass
class Layout:
    """Where the tensors lie in a file, and the bytes around them."""

    offsets: dict[str, int] = field(default_factory=dict)  # dataset path → bytes from the start of the file
    size_bytes: int = 0
    _pages: _Pages = field(default_factory=_Pages)

    def structure(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, which must hold no tensor."""
        return self._pages.between(start, stop)


def write_layout(shapes: Shapes, attributes: dict[str, Any], user_block: int) -> Layout:
    """Lay out a file with these datasets and root attributes behind a user block (a power of two ≥ 512 bytes)."""
    layout = Layout()
    early = h5p.create(h5p.DATASET_CREATE)
    early.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5d.FILL_TIME_NEVER)
    early.set_obj_track_times(False)
    parents = h5p.create(h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    with h5py.File(layout._pages, "w", userblock_size=user_block) as file:
        for name, value in attributes.items():
            file.attrs[name] = np.int64(value) if isinstance(value, int) else value
        for name, (dtype, shape) in shapes.items():
            dataset = h5d.create(file.id, name.encode(), _TYPES[dtype], h5s.create_simple(shape), early, parents)
            layout.offsets[name] = dataset.get_offset()
    layout.size_bytes = layout._pages.size
    return layout


def read_layout(
    file: BinaryIO, where: str, size_bytes: int, expected: Callable[[dict[str, Any], str], Shapes]
) -> tuple[dict[str, Any], dict[str, int], Shapes]:
    """Attributes, offset of each dataset, and the shapes that `expected` derives from the attributes.

    `file` is open for reading and `size_bytes` long. The structure must be exactly what `expected` asks for.
    Raises CheckpointError.
    """
    try:
        with h5py.File(file, "r") as hdf5:
            attributes = _attributes(hdf5, where, size_bytes)
            shapes = expected(attributes, where)
            claimed = sum(
                np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object)) for dtype, shape in shapes.values()
            )
            if claimed > size_bytes:
                raise CheckpointError(
                    f"{where}: its configuration asks for {claimed:,} bytes of tensors; the file has {size_bytes:,}"
                )
            _check_members(hdf5.id, "", shapes, where)
            offsets = {name: _offset(hdf5, name, *shapes[name], size_bytes, where) for name in shapes}
            return attributes, offsets, shapes
    except CheckpointError:
        raise
    except MemoryError:
        raise CheckpointError(f"{where}: damaged HDF5 structure: claims more memory than there is") from None
    except Exception as error:  # whatever HDF5 and h5py make of a damaged structure
        raise CheckpointError(f"{where}: damaged HDF5 structure: {' '.join(str(error).split())[:200]}") from None


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


def _attributes(hdf5: h5py.File, where: str, size_bytes: int) -> dict[str, Any]:
    count = h5a.get_num_attrs(hdf5.id)
    known = {*_TEXTS, *_COUNTS, *_OPTIONAL}
    if count > len(known):
        raise CheckpointError(f"{where}: {count} attributes at the root; a checkpoint has at most {len(known)}")
    for name in (*_TEXTS, *_COUNTS):
        if not h5a.exists(hdf5.id, name.encode()):
            raise CheckpointError(f"{where}: attribute {name} is missing")
    attributes: dict[str, Any] = {}
    for index in range(count):
        attribute = h5a.open(hdf5.id, index=index)
        name, kind = attribute.name.decode("utf-8", "replace"), attribute.get_type()
        scalar = attribute.get_space().get_simple_extent_type() == h5s.SCALAR
        wanted = str if name in _TEXTS else int if name in _COUNTS else float
        fits = {str: isinstance(kind, h5t.TypeStringID) and kind.is_variable_str(),
                int: isinstance(kind, h5t.TypeIntegerID) and kind.get_size() <= 8,
                float: isinstance(kind, h5t.TypeFloatID) and kind.get_size() <= 8}  # fmt: skip
        if name not in known or not scalar or not fits[wanted] or attribute.get_storage_size() > size_bytes:
            raise CheckpointError(f"{where}: attribute {name[:40]}: unknown, or not a single {wanted.__name__}")
        value = hdf5.attrs[name]
        attributes[name] = wanted(value)
        if wanted is int and attributes[name] < 0:
            raise CheckpointError(f"{where}: attribute {name} is {value}; it cannot be negative")
    return attributes


def _check_members(group: Any, path: str, shapes: Shapes, where: str) -> None:
    """Compare the members of a group, and of the groups below, with those that `shapes` needs."""
    depth = path.count("/") + 1
    wanted = {name.split("/")[depth] for name in shapes if name.startswith(f"{path}/")}
    present = group.links
    if len(group) > len(wanted):
        extra = next((name for name in _first_names(group, len(wanted) + 1) if name not in wanted), "more members")
        raise CheckpointError(f"{where}: {path or '/'}: has {extra[:40]!r}, which does not belong there")
    if path and h5a.get_num_attrs(group):
        raise CheckpointError(f"{where}: {path}: has attributes, which do not belong there")
    for name in sorted(wanted):
        full = f"{path}/{name}"
        if not present.exists(name.encode()):
            raise CheckpointError(f"{where}: {full} is missing")
        if present.get_info(name.encode()).type != h5l.TYPE_HARD:
            raise CheckpointError(f"{where}: {full} is a soft or external link; links are refused")
        kind = h5o.get_info(group, name.encode()).type
        if kind != (h5o.TYPE_DATASET if full in shapes else h5o.TYPE_GROUP):
            raise CheckpointError(f"{where}: {full} should be a {'dataset' if full in shapes else 'group'}")
        if full not in shapes:
            _check_members(h5py.h5g.open(group, name.encode()), full, shapes, where)


def _first_names(group: Any, count: int) -> list[str]:
    return [group.get_objname_by_idx(index).decode("utf-8", "replace") for index in range(count)]


def _offset(hdf5: h5py.File, name: str, dtype: str, shape: tuple[int, ...], size_bytes: int, where: str) -> int:
    """Where a dataset's bytes lie in the file, after checking that they do."""
    dataset = h5d.open(hdf5.id, name.encode())
    properties = dataset.get_create_plist()
    plain = properties.get_layout() == h5d.CONTIGUOUS and not properties.get_external_count()
    if not plain or properties.get_nfilters():
        raise CheckpointError(f"{where}: {name}: external, virtual, chunked or filtered storage is refused")
    space, kind = dataset.get_space(), dataset.get_type()
    found = space.get_simple_extent_dims() if space.get_simple_extent_type() == h5s.SIMPLE else ()
    if found != shape or not kind.equal(_TYPES[dtype]):
        raise CheckpointError(
            f"{where}: {name}: {kind.dtype} {found}; its configuration asks for {np.dtype(dtype).name} {shape}"
        )
    offset = dataset.get_offset()
    length = dataset.get_storage_size()
    if offset is None or length != _bytes(dtype, shape):
        raise CheckpointError(f"{where}: {name}: holds no data, or too little")
    if offset + length > size_bytes:
        raise CheckpointError(f"{where}: {name}: lies beyond the end of the file")
    return offset
