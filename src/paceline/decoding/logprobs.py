"""Log probabilities in the model's own distribution: before penalties, bias, temperature."""

from collections.abc import Callable

import numpy as np

from paceline.decoding.types import Logits, TokenLogprob


def token_logprob(
    row: Logits, token: int, top: int, name: Callable[[int], str] = lambda _: ""
) -> TokenLogprob:
    """Log probabilities of `token` and of the `top` most likely tokens.

    Args:
        row: [vocab] logits.
        token: the chosen token.
        top: number of other tokens.
        name: returns the text of a token.
    """
    wide = row.astype(np.float64)
    highest = wide.max()
    total = float(highest + np.log(np.exp(wide - highest).sum()))
    best = _top(wide, top, total)
    texts = tuple(name(other) for other, _ in best)
    return TokenLogprob(token, float(wide[token]) - total, best, name(token), texts)


def _top(row: np.ndarray, count: int, total: float) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(row))
    min_logit = np.partition(row, len(row) - count)[len(row) - count]
    tokens = np.flatnonzero(row >= min_logit)
    best = tokens[np.argsort(-row[tokens], kind="stable")][:count]
    return tuple((int(token), float(row[token]) - total) for token in best)
