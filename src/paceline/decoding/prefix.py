"""The longest common prefix of two token sequences."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[np.integer]


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """Tokens before the first position at which the two differ."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differing[0]) if len(differing) else length
