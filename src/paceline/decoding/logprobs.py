"""Log probabilities in the model's own distribution: before penalties, bias, temperature."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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


def kl_divergences(expected: Logits, actual: Logits) -> npt.NDArray[np.float64]:
    """KL(expected || actual) of each row of logits, [n, vocab] -> [n], in nats."""
    expected_logs, actual_logs = _log_softmax(expected), _log_softmax(actual)
    divergences: npt.NDArray[np.float64]
    divergences = (np.exp(expected_logs) * (expected_logs - actual_logs)).sum(axis=1)
    return divergences


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs: npt.NDArray[np.float64]
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _top(row: np.ndarray, count: int, total: float) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    tokens = np.flatnonzero(row >= least)
    best = tokens[np.argsort(-row[tokens], kind="stable")][:count]
    return tuple((int(token), float(row[token]) - total) for token in best)
