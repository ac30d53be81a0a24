"""The longest common prefix of two token sequences."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[np.integer]


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """Tokens before the first position at which the two differ. Fast for two arrays."""
    length = min(len(one), len(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        differing = np.flatnonzero(one[:length] != other[:length])
        return int(differing[0]) if len(differing) else length
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), length)
