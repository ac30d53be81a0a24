"""A head's cache for one sequence: keys and values, and hidden states not yet turned into them.

Invariant: each key is rotated to its token's position, so positions may have gaps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from paceline_mlx.caches import copy_without
from paceline_mlx.hooks import Array

PREFILL_CHUNK = 512


class NewRows(NamedTuple):
    tapped: Array
    """[n, taps * d]: the target's hidden states for n tokens."""
    start: int
    following: Sequence[int] = ()
    """For a `ChainCache`: the n tokens that follow them, each one position later."""


class HeadCache:
    """A cache that decoding only appends to and truncates."""

    def __init__(self, layers: int) -> None:
        self.layers = [KVCache() for _ in range(layers)]
        """Keys and values, [1, kv_heads, n, head_dim]; rows after the last position are invalid."""
        self.positions: list[int] = []
        self.pending: list[Array] = []
        """[n, taps * d] each: hidden states for later tokens, in order and without gaps."""
        self.pending_start = 0

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def pending_count(self) -> int:
        return sum(map(len, self.pending))

    def copy(self, position: int) -> Self:
        duplicate = type(self)(0)
        duplicate.layers = [copy_without(layer, 0) for layer in self.layers]
        duplicate.evaluate()
        duplicate.positions, duplicate.pending = list(self.positions), list(self.pending)
        duplicate.pending_start = self.pending_start
        duplicate.truncate(position)
        return duplicate

    def truncate(self, position: int) -> None:
        while self.positions and self.positions[-1] >= position:
            self.positions.pop()
        kept = max(position - self.pending_start, 0)
        parts, self.pending = self.pending, []
        for part in parts:
            if kept > 0:
                self.pending.append(evaluate(part[:kept]))
                kept -= len(part)

    def take_pending(self) -> NewRows | None:
        if not self.pending:
            return None
        rows = NewRows(mx.concatenate(self.pending), self.pending_start)
        self.pending = []
        return rows

    def drop_drafted(self) -> None:
        """Forget keys and values after the last position."""
        for layer in self.layers:
            layer.trim(layer.offset - len(self))

    def evaluate(self) -> None:
        evaluate([layer.state[:2] for layer in self.layers if layer.keys is not None])


class ChainCache(HeadCache):
    """A cache whose row i has the hidden state of position i and the token of position i + 1.

    So each row depends on the token after its position. Truncation to n tokens drops rows from
    n - 1 up, and a pending row at n - 1 loses its following token.
    """

    def __init__(self, layers: int = 1) -> None:
        super().__init__(layers)
        self.following: list[int] = []
        """Tokens that follow the pending rows; the last row's may not be known yet."""

    def copy(self, position: int) -> Self:
        duplicate = super().copy(position)
        duplicate.following = self.following[: max(position - 1 - self.pending_start, 0)]
        return duplicate

    def truncate(self, position: int) -> None:
        super().truncate(position)
        del self.following[max(position - 1 - self.pending_start, 0) :]
        if self.positions and self.positions[-1] == position - 1:
            self.positions.pop()

    def complete(self, token: int) -> None:
        """Record that `token` follows the last pending row."""
        if len(self.following) < self.pending_count:
            self.following.append(token)

    def take_pending(self) -> NewRows | None:
        """Return the pending rows whose next token is known, and clear all pending rows."""
        rows = super().take_pending()
        following, self.following = self.following, []
        if rows is None or not following:
            return None
        return NewRows(rows.tapped[: len(following)], rows.start, following)


def evaluate(arrays: Any) -> Any:
    """Start evaluation, without waiting: another thread cannot evaluate this thread's graph."""
    mx.async_eval(arrays)
    return arrays
