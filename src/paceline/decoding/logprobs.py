"""Log probabilities in the model's own distribution: before penalties, bias, temperature."""

import numpy as np

from paceline.decoding.types import Logits, TokenLogprob


def token_logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """Log probabilities of `token` and of the `top` most likely tokens; row: [vocab] logits."""
    wide = row.astype(np.float64)
    highest = wide.max()
    total = float(highest + np.log(np.exp(wide - highest).sum()))
    return TokenLogprob(token, float(wide[token]) - total, _top(wide, top, total))


def _top(row: np.ndarray, count: int, total: float) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    tokens = np.flatnonzero(row >= least)
    best = tokens[np.argsort(-row[tokens], kind="stable")][:count]
    return tuple((int(token), float(row[token]) - total) for token in best)
