"""Which HDF5 filters can be run here. Compressors beyond HDF5's own come with the package hdf5plugin, if at all."""

from __future__ import annotations

import importlib
from contextlib import suppress

import h5py


def available(number: int) -> bool:
    """Whether the filter `number` can be run, after loading hdf5plugin where that is needed and installed."""
    if not h5py.h5z.filter_avail(number):
        with suppress(ImportError, OSError):
            importlib.import_module("hdf5plugin")  # registers its filters with the library
    return bool(h5py.h5z.filter_avail(number))
