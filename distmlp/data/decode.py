"""Chunks as stored → their values. Deflate and shuffle without the HDF5 library and outside its lock."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable

import h5py
import numpy as np
from numpy.typing import NDArray

from distmlp.data.filters import available
from distmlp.data.layout import DEFLATE, NBIT, SCALEOFFSET, SHUFFLE, Filter, Layout

PREFIXED = {32008: 3}  # bitshuffle puts so many values of its own before the given ones whenever a dataset is made
KEPT_BYTES = 8 << 20  # of one of a thread's rooms; more is given back after use
_HDF5_LOCK = threading.Lock()
_ROOMS = threading.local()


class DamagedChunk(Exception):
    """The stored bytes do not decode to a chunk; the text says why."""


def room(name: str, size: int) -> NDArray:
    """Bytes (size,) that this thread uses again: new memory for every chunk is slow where many threads ask for it."""
    rooms: dict[str, NDArray] = _ROOMS.__dict__
    kept = rooms.get(name)
    if kept is None or len(kept) < size:
        kept = np.empty(size, np.uint8)
        if size <= KEPT_BYTES:
            rooms[name] = kept
    return kept[:size]


def decode(layout: Layout, stored: bytes | NDArray, mask: int, lasting: bool = True) -> NDArray:
    """Values (chunk shape, dtype as stored) of one chunk. `mask`: bit i set where filter i was left out.

    Unless `lasting` they hold until this thread's next call. Memory is bounded by the chunk's size, whatever the bytes
    claim. Raises DamagedChunk.
    """
    stages = [stage for position, stage in enumerate(layout.filters) if not mask >> position & 1]
    simple = all(
        stage.id == DEFLATE or (stage.id == SHUFFLE and stage.values[:1] in ((), (layout.dtype.itemsize,)))
        for stage in stages
    )
    if not simple:
        if stages[-1].id in (NBIT, SCALEOFFSET) and len(stored) < (least := _least_bytes(layout, stages[-1], stored)):
            raise DamagedChunk(f"{len(stored)} bytes, expected {least} at least ({stages[-1].name})")
        return _decode_by_hdf5(layout, stages, bytes(stored))
    data = np.frombuffer(stored, np.uint8)
    for left in reversed(range(len(stages))):
        size = layout.chunk_bytes if stages[left].id == DEFLATE else len(data)
        out = np.empty(size, np.uint8) if lasting and not left else room("odd" if left % 2 else "even", size)
        data = _inflate(data, out) if stages[left].id == DEFLATE else _unshuffle(data, layout.dtype.itemsize, out)
    if len(data) != layout.chunk_bytes:
        raise DamagedChunk(f"a chunk of {len(data)} bytes, expected {layout.chunk_bytes}")
    if lasting and not stages:
        data = data.copy()
    return data.view(layout.dtype).reshape(layout.chunk)


def _least_bytes(layout: Layout, stage: Filter, stored: bytes | NDArray) -> int:
    """What these two filters of HDF5 read of a chunk, without a look at where it ends: H5Zscaleoffset.c, H5Znbit.c."""
    elements, most = layout.chunk_bytes // layout.dtype.itemsize, 8 * layout.dtype.itemsize
    if stage.id == SCALEOFFSET:
        bits = int.from_bytes(bytes(stored[:4]), "little")  # of every element, behind a header of 21 bytes
        return 21 + -(-min(bits, most) * elements // 8)
    packed = len(stage.values) >= 7 and not stage.values[1] and stage.values[3] == 1  # plain numbers
    return -(-min(stage.values[6] if packed else most, most) * elements // 8)


def _inflate(data: NDArray, out: NDArray) -> NDArray:
    """`out`, or what of it is filled; bytes beyond it are an error."""
    if _uncompress is not None:
        done = ctypes.c_ulong(len(out))
        if _uncompress(out.ctypes.data, ctypes.byref(done), data.ctypes.data, len(data)) == 0:
            return out[: done.value]
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data.data, len(out) + 1)
    except zlib.error as error:
        raise DamagedChunk(f"its gzip data is damaged: {error}") from None
    if len(found) <= len(out) and not stream.eof:
        raise DamagedChunk("its gzip data ends early")
    return np.frombuffer(found, np.uint8)


def _find_uncompress() -> Callable[..., int] | None:
    """zlib's own function where the system has the library: it fills memory that is there, and the interpreter is free
    meanwhile; Python's module comes back to it for every piece of memory."""
    try:
        function = ctypes.CDLL("libz.so.1").uncompress
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulong), ctypes.c_void_p, ctypes.c_ulong)
    return function


_uncompress = _find_uncompress()


def _unshuffle(data: NDArray, itemsize: int, out: NDArray) -> NDArray:
    """Undo HDF5's shuffle: byte k of all elements, then byte k + 1 of all, …; a remainder is left as it is."""
    count = len(data) // itemsize
    if itemsize == 1 or count == 0:
        return data
    whole = count * itemsize
    planes, elements = data[:whole].reshape(itemsize, count), out[:whole].reshape(count, itemsize)
    for byte, plane in enumerate(planes):  # five times as fast as one transposed copy, and without the interpreter
        elements[:, byte] = plane
    out[whole:] = data[whole:]
    return out


def _decode_by_hdf5(layout: Layout, stages: list[Filter], stored: bytes) -> NDArray:
    """Let HDF5's own filters do it, on a one-chunk file in memory: the user's file stays closed."""
    with _HDF5_LOCK:
        try:
            with h5py.File("chunk", "w", driver="core", backing_store=False) as file:
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_chunk(layout.chunk)
                for stage in stages:
                    if not available(stage.id):
                        raise DamagedChunk(f"the filter {stage.id} ({stage.name}) is not installed on this host")
                    plist.set_filter(stage.id, stage.flags, stage.values[PREFIXED.get(stage.id, 0) :])
                expected = [stage.values for stage in stages if stage.id in (NBIT, SCALEOFFSET)]
                space = h5py.h5s.create_simple(layout.chunk)
                kind = h5py.h5t.py_create(layout.dtype, logical=True)
                dataset = h5py.Dataset(h5py.h5d.create(file.id, b"chunk", kind, space, plist))
                # These two work their parameters out from type and chunk; others in the file mean damage.
                plist = dataset.id.get_create_plist()
                if expected and expected[0] not in [tuple(plist.get_filter(k)[2]) for k in range(len(stages))]:
                    raise DamagedChunk("the parameters of its filter do not fit it")
                dataset.id.write_direct_chunk((0,) * len(layout.chunk), stored)
                return dataset[...]
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            names = ", ".join(stage.name for stage in stages)
            raise DamagedChunk(f"it does not decode ({names}): {' '.join(str(error).split())[:200]}") from None
