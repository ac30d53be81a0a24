"""How likely a token was in the model's own distribution: before penalties, bias, temperature."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.decoding.types import Logits


class TokenLogprob(NamedTuple):
    """A token, and how likely it and others were where it stands."""

    token: int
    logprob: float
    """Natural logarithm of its probability."""
    top: Sequence[tuple[int, float]] = ()
    """The most likely tokens with theirs, best first; of equals the lower id."""


def token_logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """What a row of logits [vocab] says of `token`, and its `top` most likely tokens."""
    wide = row.astype(np.float64)
    highest = wide.max()
    total = float(highest + np.log(np.exp(wide - highest).sum()))
    return TokenLogprob(token, float(wide[token]) - total, _most(wide, top, total))


def _most(row: np.ndarray, count: int, total: float) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    tokens = np.flatnonzero(row >= least)
    best = tokens[np.argsort(-row[tokens], kind="stable")][:count]
    return tuple((int(token), float(row[token]) - total) for token in best)
