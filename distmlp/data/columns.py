"""The names that files give the columns of a dataset, so that shards with other orders of them are not mixed."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

ATTRIBUTES = ("columns", "column_names", "feature_names", "names")


def column_names(file: h5py.File, dataset: h5py.Dataset, name: str) -> list[str]:
    """From an attribute of the dataset, a dimension scale, or the neighbour that pandas writes; [] without any."""
    if dataset.ndim != 2:
        return []
    try:
        for found in _candidates(file, dataset, name):
            values = np.asarray(found)
            if values.shape == dataset.shape[1:] and values.dtype.kind in "SUO":
                return [value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist()]
    except Exception:  # names are not needed: whatever they are, the numbers may be good
        return []
    return []


def _candidates(file: h5py.File, dataset: h5py.Dataset, name: str) -> Any:
    width = dataset.shape[1:]
    for attribute in ATTRIBUTES:
        if attribute in dataset.attrs and dataset.attrs.get_id(attribute).shape == width:
            yield dataset.attrs[attribute]
    for scale in dataset.dims[1].values() if "DIMENSION_LIST" in dataset.attrs else ():
        if scale.shape == width:
            yield scale[...]
    neighbour = file.get(f"{name.removesuffix('_values')}_items") if name.endswith("_values") else None
    if isinstance(neighbour, h5py.Dataset) and neighbour.shape == width:
        yield neighbour[...]


def differ(names: tuple[str, ...], others: tuple[str, ...], where: str) -> str:
    """How two files' names of the same number of columns differ, or ""."""
    if not names or not others or names == others:
        return ""
    place = next(k for k, (one, other) in enumerate(zip(names, others, strict=True)) if one != other)
    what = "its columns in another order" if sorted(names) == sorted(others) else "other columns"
    return f"has {what} than {where}: column {place} is `{names[place]}`, there it is `{others[place]}`"
