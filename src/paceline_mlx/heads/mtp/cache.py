"""The KV cache of a head for one sequence, and the rows that go into it."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from paceline_mlx.heads.context import ContextCache
from paceline_mlx.heads.parts import DeviceKV
from paceline_mlx.hooks import Array


class Rows(NamedTuple):
    """Rows to append to a head's cache."""

    tapped: Array
    """[n, taps * d]: the target's hidden states of n tokens."""
    tokens: Sequence[int]
    """The n tokens that follow them, each one position later."""
    start: int
    """Position of the first hidden state."""


class HeadCache(ContextCache):
    """Row i has the hidden state of position i and the token of position i + 1.

    So a row depends on one token more than its position says: truncated to n tokens, a row at
    n - 1 is dropped with those after it, and a pending one loses the token after it.
    """

    def __init__(self, kv: DeviceKV) -> None:
        super().__init__(kv)
        self.following: list[int] = []
        """The tokens after the pending rows; the last row's may not be known yet."""

    def copy(self, position: int) -> Self:
        """An independent copy of what is before this position."""
        duplicate = super().copy(position)
        duplicate.following = self.following[: max(position - 1 - self.pending_start, 0)]
        return duplicate

    def truncate(self, position: int) -> None:
        """Drop what depends on the tokens from this position on."""
        super().truncate(position)
        del self.following[max(position - 1 - self.pending_start, 0) :]
        if self.positions and self.positions[-1] == position - 1:
            self.positions.pop()
