"""The Neural Engine's numerics, as far as others saw them, for the rounding "engine".

Reported by Anemll (2026-10) on M5 and M6; nothing here was compared with a Mac:

- silu is up to 1e-3 off near 0. Here it is a table of straight pieces of 1/8, which are as far off;
- numbers that are subnormal in float16 become 0 (`rounding.to_half_flushed`);
- sums are in float16. Here terms are added in groups of `products.GROUP`, and groups in float16.

Rows stay independent: a number depends on its own terms alone, in an order given by their count.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from paceline_coreml.rehearsal.ops.elementwise import sigmoid
from paceline_coreml.rehearsal.ops.table import Array

_PIECE: Final = np.float32(1 / 8)
"""Width h of a straight piece of silu: h² / 8 times silu''(0) = 1/2 is 1e-3."""


def _silu(x: Array) -> Array:
    left = np.floor(x / _PIECE) * _PIECE
    low, high = _exact_silu(left), _exact_silu(left + _PIECE)
    value: Array = low + (x - left) / _PIECE * (high - low)
    return np.where(np.isfinite(x), value, x * sigmoid(x))


def _exact_silu(x: Array) -> Array:
    return x * sigmoid(x)


RUNS: Final[Mapping[str, Callable[..., Any]]] = {"silu": _silu}
"""Operations that the Neural Engine computes otherwise."""
