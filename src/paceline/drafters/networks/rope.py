"""Frequencies of RoPE, plain or scaled as in Llama 3.1."""

from dataclasses import dataclass

import numpy as np

from paceline.drafters.networks.tensors import Array


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Scaling that divides low frequencies by `factor`, and keeps high ones.

    A frequency is low if it makes fewer than `low_freq_factor` turns in the context of
    `original_max_position_embeddings` tokens, and high above `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def frequencies(dims: int, theta: float, scaling: Llama3Rope | None = None) -> Array:
    """[dims / 2] float32, in radians per position.

    Scaled as `_compute_llama3_parameters` of transformers: between low and high, by a mean that
    moves with the number of turns.
    """
    half = np.arange(0, dims, 2, dtype=np.float32) / dims
    plain: Array = (1 / np.float32(theta) ** half).astype(np.float32)
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    scaled: Array = (plain * (kept + (1 - kept) / scaling.factor)).astype(np.float32)
    return scaled
