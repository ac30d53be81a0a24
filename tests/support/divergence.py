"""How far two engines' logits are apart."""

import numpy as np


def divergence(expected: np.ndarray, computed: np.ndarray) -> float:
    """Largest KL divergence of a row's distribution [rows, tokens] from the expected one."""
    first, second = (
        rows
        - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
        - rows.max(1, keepdims=True)
        for rows in (expected.astype(np.float64), computed.astype(np.float64))
    )
    return float((np.exp(first) * (first - second)).sum(1).max())
