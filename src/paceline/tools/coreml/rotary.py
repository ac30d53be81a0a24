"""Rotary tables, from the frequencies that transformers itself computes for a config."""

from typing import Any

import numpy as np

from paceline.tools.coreml.family import Tables


def rotary_tables(embedding: Any, positions: int) -> Tables:
    """What a rotary embedding of transformers gives for `positions`, once for all.

    `embedding` has `inv_freq` [r] and `attention_scaling`, which cosines and sines are multiplied
    with. Angles are computed in float64: float32 is off by 1e-4 from a position of 2,000 on.
    """
    frequencies = embedding.inv_freq.double().numpy()
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    factor = float(embedding.attention_scaling)
    return Tables((cos * factor).astype(np.float32), (sin * factor).astype(np.float32))
