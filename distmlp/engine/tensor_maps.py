"""Descriptions of matrices for Hopper's tensor copies, made by the driver; see kernels/tensor_copies.cuh."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from distmlp.errors import SystemUnfitError

MAP_BYTES = 128
BOX_ROWS, BOX_COLUMNS = 32, 64  # as in tensor_copies.cuh
_BFLOAT16, _SWIZZLE_128, _L2_128 = 9, 3, 2  # CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion


def tensor_maps(matrices: list[tuple[int, int, int]]) -> NDArray:
    """Maps (matrices, 128) of bytes for bfloat16 matrices (address, rows, row length in elements, a multiple of 8)."""
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    maps = np.zeros(len(matrices) * MAP_BYTES + 64, np.uint8)
    first = -maps.ctypes.data % 64  # the driver wants them aligned
    for index, (address, rows, columns) in enumerate(matrices):
        fault = encode(
            ctypes.c_void_p(maps.ctypes.data + first + index * MAP_BYTES), _BFLOAT16, 2, ctypes.c_void_p(address),
            (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(2 * columns),
            (ctypes.c_uint32 * 2)(BOX_COLUMNS, BOX_ROWS), (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLE_128, _L2_128, 0,
        )  # fmt: skip
        if fault:
            raise SystemUnfitError(f"the driver refused the map of a matrix of {rows} rows of {columns}: error {fault}")
    return maps[first : first + len(matrices) * MAP_BYTES].reshape(-1, MAP_BYTES)
