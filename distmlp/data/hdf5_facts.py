"""The HDF5 library of this environment: versions, file locking, filters. For reports."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

FILTERS = {
    "gzip": 1, "shuffle": 2, "fletcher32": 3, "szip": 4, "scale-offset": 6, "lzf": 32000, "blosc": 32001,
    "lz4": 32004, "bitshuffle": 32008, "zstd": 32015, "blosc2": 32026,
}  # fmt: skip


def describe_library() -> dict[str, Any]:
    """`h5py hdf5 filters locking`, or `error` where h5py does not load.

    `locking`: `variable` (HDF5_USE_FILE_LOCKING), and `works_here`, whether the file system of the working
    directory grants locks ("" where it does, else the error's name).
    """
    locking = {"variable": os.environ.get("HDF5_USE_FILE_LOCKING"), "works_here": _try_lock()}
    try:
        import h5py
    except Exception as error:  # a broken HDF5 library raises ImportError, OSError or ValueError
        return {"error": f"{type(error).__name__}: {error}", "locking": locking}
    return {
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
        "filters": [name for name, number in FILTERS.items() if h5py.h5z.filter_avail(number)],
        "plugin_path": os.environ.get("HDF5_PLUGIN_PATH"),
        "locking": locking,
    }


def _try_lock() -> str:
    import fcntl

    try:
        with tempfile.TemporaryFile(dir=".") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""
