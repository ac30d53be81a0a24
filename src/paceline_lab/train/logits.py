"""Hidden states from logits: what a head reads that drafts for any engine.

Logits are the last hidden state h times the output matrix W, so that those of some tokens S, a few
more than h has values, determine it: h = pinv(W_S) logits_S.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.drafters.mtp import Embeddings
from paceline.errors import InvalidRequest
from paceline.storage.int8 import quantized

Array = npt.NDArray[np.float32]

_SURPLUS = 4 / 3
"""Logits that are read, over values of a hidden state: more average rounding out."""

_RANK = 64
"""Values of the embedding of a token that is not drafted."""

_TOLERANCE = 0.02
"""Of the largest logit: those of a capped head, which is not linear, differ by more."""


class LogitsReader:
    """Computes hidden states from logits."""

    def __init__(self, head: Array, drafted: Sequence[int]) -> None:
        """Choose the tokens to read.

        `head` [c, d] are the rows of the target's output matrix for the tokens `drafted`.
        """
        count, width = head.shape
        self.drafted = np.array(drafted, np.int64)
        """[c]"""
        self._rows = spanning_rows(head, min(tokens_to_read(width), count))
        self._head = head
        inverse = np.linalg.pinv(head[self._rows].astype(np.float64))
        self.inverse: Array = inverse.T.astype(np.float32)
        """[n, d]: a state is the logits of `tokens` times it."""

    @property
    def tokens(self) -> list[int]:
        """The n tokens whose logits are read, ascending."""
        return [int(token) for token in self.drafted[self._rows]]

    def states(self, logits: Array) -> Array:
        """Logits of all tokens to draft [rows, c] -> hidden states [rows, d]."""
        states: Array = logits[:, self._rows] @ self.inverse
        return states

    def logits(self, states: Array) -> Array:
        """The inverse of `states`."""
        logits: Array = states @ self._head.T
        return logits

    def check(self, logits: Array) -> None:
        """Raise InvalidRequest if logits [rows, c] are more than states times a matrix."""
        difference = np.abs(self.logits(self.states(logits)) - logits).max()
        if not difference <= _TOLERANCE * max(np.abs(logits).max(), 1):
            raise InvalidRequest(
                "the target caps its logits or changes them in another way, so that a head cannot "
                "read them; expected a target whose logits are its hidden states times a matrix"
            )


def tokens_to_read(width: int) -> int:
    """How many tokens' logits determine hidden states of `width` values well."""
    return round(_SURPLUS * width)


def spanning_rows(head: Array, count: int) -> list[int]:
    """Indices, ascending, of `count` rows of a matrix [c, d] from which states follow well.

    The row that is longest after the directions of those before it are taken out is next
    (Gram-Schmidt with pivots); after d rows it begins anew. Fewer rows if they have a lower rank.
    """
    width = head.shape[1]
    squares = (head.astype(np.float64) ** 2).sum(axis=1)
    chosen: list[int] = []
    while len(chosen) < count:
        lengths = squares.copy()
        lengths[chosen] = -np.inf
        directions = np.zeros((width, width))
        least = 1e-9 * lengths.max()
        for known in range(min(count - len(chosen), width)):
            longest = int(lengths.argmax())
            if lengths[longest] <= least:
                break
            row = head[longest].astype(np.float64)
            for _ in range(2):  # once leaves rounding
                row -= (directions[:known] @ row) @ directions[:known]
            direction = row / np.sqrt(row @ row)
            directions[known] = direction
            lengths -= (head @ direction.astype(np.float32)) ** 2
            lengths[longest] = -np.inf
            chosen.append(longest)
        else:
            continue
        break
    return sorted(chosen)


def two_levels(embeddings: Array, drafted: Sequence[int]) -> Embeddings:
    """Embeddings [vocab, d] with few values for the tokens that are not in `drafted`.

    These are their largest principal components.
    """
    rest = np.delete(embeddings, drafted, axis=0)
    rank = min(_RANK, *rest.shape)
    _, vectors = np.linalg.eigh((rest.T @ rest).astype(np.float64))
    into = np.ascontiguousarray(vectors[:, -rank:], np.float32)
    return Embeddings(quantized(embeddings[drafted]), quantized(rest @ into), into)


def joined(levels: Embeddings, drafted: Sequence[int]) -> Array:
    """[vocab, d]: what a head with these embeddings sees."""
    common, rest = levels.drafted.floats(), levels.rest.floats()
    vocab = len(common) + len(rest)
    whole = np.empty((vocab, len(levels.into)), np.float32)
    is_rest = np.ones(vocab, np.bool_)
    is_rest[drafted] = False
    whole[drafted], whole[is_rest] = common, rest @ levels.into.T
    return whole
