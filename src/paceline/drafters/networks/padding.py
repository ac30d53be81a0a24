"""Padding of a network's calls in OpenVINO, so that they have few shapes."""

from typing import Any

import numpy as np
import numpy.typing as npt

_EXACT_ROWS = 8
"""Calls of at most this number of rows are not padded: after a block, every row costs time."""


def padded_size(rows: int) -> int:
    """Rows of a call that has `rows` >= 1 of them, with padding.

    Up to 8 as they are, then the next of 12, 16, 24, 32, 48, ... 512. OpenVINO keeps memory for
    every shape that it has run: half a megabyte a shape with a tiny head. Its
    CPU_RUNTIME_CACHE_CAPACITY=0 leaves half of that.
    """
    if rows <= _EXACT_ROWS:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


def padded_rows(rows: npt.NDArray[Any], padding: int) -> npt.NDArray[Any]:
    """Rows [n, ...] with `padding` rows of zeros after them."""
    if not padding:
        return rows
    return np.concatenate([rows, np.zeros((padding, *rows.shape[1:]), rows.dtype)])
