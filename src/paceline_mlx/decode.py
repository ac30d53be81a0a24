"""Rows of a step's sequences that get logits, and the calls that compute them.

A long block is cut into parts (`RowRules`); parts of several sequences share a call. Invariant: the
parts of a sequence run in order, each in one call.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from paceline.engines.rows import RowRules
from paceline_mlx.hooks import Array
from paceline_mlx.model import LazyOutputs
from paceline_mlx.states import States
from paceline_mlx.step import on_device


class Decode:
    """Tokens of one sequence, cut into parts, and the calls that were made of them."""

    def __init__(self, states: States, tokens: Sequence[int], rules: RowRules) -> None:
        """`states`: the caches, which hold the tokens before; `rules`: of the parts."""
        self._states, self._start, self._least = states, states.held, rules.decode.least
        self._rows = on_device(tokens)
        self.parts = deque(rules.decode.split(len(tokens), states.held, rules.cuts))
        """Parts that no call was made of."""
        self.calls: list[LazyOutputs] = []

    @property
    def rows(self) -> int:
        """Rows of the next part in a call, padding included."""
        part = self.parts[0]
        return max(int(part.stop - part.start), self._least)

    def next(self) -> tuple[States, Array]:
        """Take the next part: the caches, which hold all before it, and its tokens."""
        part = self.parts.popleft()
        self._states.drop_padding(self._start + part.start)  # of a short call before a threshold
        return self._states, self._rows[part]


def grouped(decodes: Sequence[Decode], most: int) -> Iterator[list[Decode]]:
    """Groups whose next parts have at most `most` rows together; one alone may have more."""
    group: list[Decode] = []
    total = 0
    for decode in decodes:
        if group and total + decode.rows > most:
            yield group
            group, total = [], 0
        group.append(decode)
        total += decode.rows
    if group:
        yield group
