"""Rotary tables, from the frequencies that transformers computes for a config."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class RopeTables(NamedTuple):
    """Rotary cosines and sines, [positions, r] float32, times the family's attention scaling."""

    cos: Floats
    sin: Floats


def make_rope_tables(embedding: Any, positions: int) -> RopeTables:
    """Tables of a transformers rotary embedding for `positions`.

    `embedding` has `inv_freq` [r] and `attention_scaling`, a factor of cosines and sines. Angles
    are computed in float64: float32 is off by 1e-4 from position 2,000 on.
    """
    frequencies = embedding.inv_freq.double().numpy()
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    factor = float(embedding.attention_scaling)
    return RopeTables((cos * factor).astype(np.float32), (sin * factor).astype(np.float32))
