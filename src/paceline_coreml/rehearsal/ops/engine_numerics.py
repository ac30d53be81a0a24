"""The Neural Engine's reported numerics, for the rounding "engine".

They were reported by Anemll (2026-10) for M5 and M6, and not compared with a Mac:

- silu is up to 1e-3 off near 0; the emulator uses linear pieces of width 1/8, with the same error;
- numbers that are subnormal in float16 become 0 (`rounding.to_half_flushed`);
- sums are in float16; the emulator adds groups of `products.GROUP` terms, then groups in float16.

Rows stay independent: a number depends only on its own terms, in an order given by their count.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from paceline_coreml.rehearsal.ops.elementwise import sigmoid
from paceline_coreml.rehearsal.ops.table import Array

_PIECE: Final = np.float32(1 / 8)
"""Width h of a linear piece of silu: h² / 8 times silu''(0) = 1/2 is 1e-3."""


def _silu(x: Array) -> Array:
    left = np.floor(x / _PIECE) * _PIECE
    low, high = _exact_silu(left), _exact_silu(left + _PIECE)
    value: Array = low + (x - left) / _PIECE * (high - low)
    return np.where(np.isfinite(x), value, x * sigmoid(x))


def _exact_silu(x: Array) -> Array:
    return x * sigmoid(x)


RUNS: Final[Mapping[str, Callable[..., Any]]] = {"silu": _silu}
"""Operations that the Neural Engine computes differently."""
