"""HDF5 files in many formats, and damaged copies of them: a pure function of a number."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

ROWS, FEATURES = 300, 12
MARKS = (b"TREE", b"SNOD", b"HEAP", b"OHDR", b"FADB", b"FAHD", b"EAHD", b"EAIB", b"BTHD", b"BTLF")


def originals(folder: Path) -> list[Path]:
    """Good shards, one for each way in which HDF5 lays out rows and structure."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(ROWS, FEATURES)).astype("f4"), rng.integers(0, 7, ROWS)
    chunked = {"chunks": (64, 5)}
    kinds = {
        "contiguous": ("earliest", {}, {}),
        "contiguous-latest": ("latest", {}, {}),
        "gzip-btree1": ("earliest", {**chunked, "compression": "gzip", "shuffle": True}, {"chunks": (64,)}),
        "gzip-fixed-array": ("latest", {**chunked, "compression": "gzip"}, {"chunks": (64,)}),
        "extensible-array": ("latest", {**chunked, "maxshape": (None, FEATURES)}, {"maxshape": (None,)}),
        "btree2": ("latest", {**chunked, "maxshape": (None, None), "fletcher32": True}, {}),
        "lzf": ("earliest", {**chunked, "compression": "lzf", "fletcher32": True}, {}),
        "scaleoffset": ("earliest", {"chunks": (300, 12), "scaleoffset": 3}, {"chunks": (300,), "scaleoffset": 0}),
    }
    paths = []
    for number, (name, (version, options, target_options)) in enumerate(kinds.items()):
        path = folder / f"{name}.h5"
        with h5py.File(path, "w", libver=version) as file:
            file.create_dataset("real/inputs", data=inputs, **options)
            file["inputs"] = h5py.SoftLink("/real/inputs")
            file.create_dataset("targets", data=targets, **target_options)
            file["inputs"].attrs["unit"] = "metre"
            columns = [f"column {k}" for k in range(FEATURES)]
            file["inputs"].attrs["columns"] = columns if number % 2 else np.array(columns, "S")
            if number % 3 == 0:
                file["scale"] = np.array(columns, "S")
                file["scale"].make_scale("names")
                file["real/inputs"].dims[1].attach_scale(file["scale"])
            for more in range(12 if "latest" in version else 2):
                file.create_group(f"more{more}")
        paths.append(path)
    return paths


def mutate(original: bytes, number: int) -> bytes:
    """Copy `number` of a file, damaged in one of seven ways."""
    rng = np.random.default_rng(number)
    data = bytearray(original)
    kind = number % 7
    if kind == 0:  # a few bits anywhere
        for place in rng.integers(0, len(data), rng.integers(1, 9)):
            data[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:  # cut off
        del data[int(rng.integers(0, len(data))) :]
    elif kind == 2:  # a field of the superblock or of the first headers
        _overwrite(data, int(rng.integers(8, 256)), rng)
    elif kind == 3:  # a field of any structure: they all stand in the first kilobytes or behind the data
        places = [at for mark in MARKS for at in _occurrences(data, mark)]
        place = int(rng.choice(places)) if places else 0
        _overwrite(data, place + int(rng.integers(4, 200)), rng)
    elif kind == 4:  # a field of an old object header: versions and counts
        _overwrite(data, int(rng.integers(64, min(3000, len(data)))), rng)
    elif kind == 5:  # a lost sector
        place = int(rng.integers(0, len(data)))
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    else:  # one piece copied over another, as pointers and sizes that fit elsewhere
        size = int(rng.integers(4, 128))
        source, place = rng.integers(0, len(data) - size, 2)
        data[place : place + size] = data[source : source + size]
    return bytes(data)


def _occurrences(data: bytes | bytearray, mark: bytes) -> list[int]:
    places, at = [], data.find(mark)
    while at >= 0:
        places.append(at)
        at = data.find(mark, at + 1)
    return places


def _overwrite(data: bytearray, place: int, rng: np.random.Generator) -> None:
    size = int(rng.choice([1, 2, 4, 8]))
    extremes = [
        0,
        1,
        0xFF,
        0x7FFF,
        0xFFFF,
        0x7FFFFFFF,
        0xFFFFFFFF,
        1 << 40,
        (1 << 63) - 1,
        (1 << 64) - 1,
        len(data),
        place,
    ]
    value = int(extremes[rng.integers(len(extremes))]) if rng.random() < 0.7 else int(rng.integers(1 << 62))
    place = min(place, len(data) - size)
    data[place : place + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
