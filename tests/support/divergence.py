"""The divergence of two engines' logits."""

import numpy as np


def divergences(expected: np.ndarray, computed: np.ndarray) -> np.ndarray:
    """[rows]: KL divergence of each row's distribution [rows, tokens] from the expected one."""
    first, second = (
        shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        for rows in (expected, computed)
        for shifted in [rows.astype(np.float64) - rows.max(1, keepdims=True)]
    )
    result: np.ndarray = (np.exp(first) * (first - second)).sum(1)
    return result


def divergence(expected: np.ndarray, computed: np.ndarray) -> float:
    """The largest of the rows'."""
    return float(divergences(expected, computed).max())
