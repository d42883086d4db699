"""Which numbers a dataset holds, or why they are none that can be trained on. For the child process (`probe`)."""

from __future__ import annotations

import h5py
import numpy as np

WANTED = "expected real numbers of 1 to 8 bytes"


def number_format(dataset: h5py.Dataset) -> tuple[np.dtype, str]:
    """The dtype as stored, byte order included; or what the dataset holds instead, with what to do."""
    dtype = dataset.dtype
    stored = dataset.id.get_type()
    if h5py.check_enum_dtype(dtype) is not None or dtype == np.bool_:
        stored = stored.get_super() if isinstance(stored, h5py.h5t.TypeEnumID) else stored
        dtype = np.dtype(np.uint8) if dtype == np.bool_ else np.dtype(dtype.str)
    if not (dtype.kind in "iuf" and dtype.subdtype is None and 1 <= dtype.itemsize <= 8):
        return dtype, _instead(dtype)
    same = stored.equal(h5py.h5t.py_create(dtype))
    if not same and not (stored.get_size() == 1 and dtype == np.uint8 and dataset.dtype == np.bool_):
        kind = "bits" if stored.get_class() == h5py.h5t.BITFIELD else "a number format of its own"
        return dtype, (
            f"holds {kind} (size {stored.get_size()}, read as {dtype}), expected IEEE floats or plain integers of 1 to "
            f"8 bytes; store it again as such, in Python for example: {_again('dataset[...].astype(dtype)')}"
        )
    return dtype, ""


def _instead(dtype: np.dtype) -> str:
    """What a dataset of something else holds."""
    if h5py.check_ref_dtype(dtype) is not None:
        return (
            f"holds references to other objects (cell arrays of MATLAB are such), {WANTED}; "
            "store the arrays that they name as one"
        )
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        return (
            f"holds strings, {WANTED}; store numbers, class labels for example as "
            f"{_again('np.unique(dataset[...], return_inverse=True)[1]')}"
        )
    if h5py.check_vlen_dtype(dtype) is not None or dtype.kind == "O":
        return f"holds rows of varying length, {WANTED} and as many in every row; store a two-dimensional dataset"
    if dtype.subdtype is not None:
        shape = dtype.subdtype[1]
        return f"holds an array type {shape} in every element, {WANTED}; store them as such: {_again('dataset[...]')}"
    if dtype.names is not None:
        fields = ", ".join(f"`{name}`" for name in dtype.names[:20])
        return (
            f"holds records with the fields {fields}, {WANTED}; store the columns as one two-dimensional dataset, for "
            "example with numpy.lib.recfunctions.structured_to_unstructured"
        )
    if dtype.kind == "c":
        return f"holds {dtype}, {WANTED}; store real and imaginary parts as columns of their own"
    if dtype.kind == "f":
        return f"holds {dtype}, {WANTED}; store them as such: {_again('dataset[...].astype(np.float64)')}"
    if dtype.kind in "Mm":
        return f"holds {dtype}, {WANTED}; store numbers, such as seconds: {_again('dataset[...].astype(np.int64)')}"
    return f"holds {dtype}, {WANTED}"


def _again(expression: str) -> str:
    return f"file[NEW] = {expression}"
