"""The KV cache of a head for one sequence."""

from paceline.drafters.networks.context import ContextCache, S


class HeadCache(ContextCache[S]):
    """Row i has the hidden state of position i and the token of position i + 1.

    So a row depends on one token more than its position says: truncated to n tokens, a row at
    n - 1 is dropped with those after it, and a pending one loses the token after it.
    """

    def __init__(self, kv: S) -> None:
        super().__init__(kv)
        self.following: list[int] = []
        """The tokens after the pending rows; the last row's may not be known yet."""

    def copy(self, position: int) -> "HeadCache[S]":
        """An independent copy of what is before this position."""
        duplicate = HeadCache(self.kv.copy())
        duplicate.positions, duplicate.pending = list(self.positions), list(self.pending)
        duplicate.pending_start, duplicate.following = self.pending_start, list(self.following)
        duplicate.truncate(position)
        return duplicate

    def truncate(self, position: int) -> None:
        """Drop what depends on the tokens from this position on."""
        super().truncate(position)
        del self.following[max(position - 1 - self.pending_start, 0) :]
        if self.positions and self.positions[-1] == position - 1:
            self.positions.pop()
