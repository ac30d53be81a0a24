"""A suffix automaton that grows token by token and keeps each substring's latest position.

It finds the longest suffix of the text that occurs earlier, and where, in constant time, and takes
amortised constant time per token to build (Blumer et al. 1985). Each state is a set of substrings
that end at the same positions; `link` leads to the set of the next shorter suffixes.
"""

from typing import NamedTuple

_MAX_UPDATES = 128
"""States whose latest position is updated per token. Real text needs about ten; only long runs of
one token need more, and there every position is as good."""


class Match(NamedTuple):
    """A suffix of some text that occurs in the automaton's text."""

    length: int
    """Tokens that match."""
    next_at: int
    """Index of its continuation in the automaton's text."""


class SuffixAutomaton:
    """The automaton of `text`, which only grows."""

    def __init__(self) -> None:
        """Start with an empty text."""
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [-1]  # last index of the state's latest occurrence
        self._last = 0  # the state of the whole text

    def append(self, token: int) -> None:
        """Add one token."""
        self._mark_whole_text()
        nexts, links, lengths = self._next, self._link, self._length
        new = self._state(lengths[self._last] + 1, {}, len(self.text))
        state = self._last
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        if state < 0:
            links[new] = 0
        else:
            target = nexts[state][token]
            if lengths[target] == lengths[state] + 1:
                links[new] = target
            else:
                split = self._state(lengths[state] + 1, dict(nexts[target]), self._end[target])
                links[split] = links[target]
                while state >= 0 and nexts[state].get(token) == target:
                    nexts[state][token] = split
                    state = links[state]
                links[target] = links[new] = split
        self._last = new
        self.text.append(token)

    def longest_repeat(self) -> Match | None:
        """The longest suffix of the text that occurs earlier, at its latest such position."""
        state = self._link[self._last]
        return self._match(state, self._length[state]) if state > 0 else None

    def advance(self, cursor: "Cursor", token: int) -> "Cursor":
        """Advance a cursor over another text by that text's next token."""
        state, length = cursor
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            # The link of a state that was split meanwhile may be longer than the cursor.
            length = min(length, self._length[state])
        if token in self._next[state]:
            return Cursor(self._next[state][token], length + 1)
        return START

    def at(self, cursor: "Cursor") -> Match | None:
        """The latest occurrence of a cursor's suffix; None if it is empty."""
        return self._match(*cursor) if cursor.length else None

    def _match(self, state: int, length: int) -> Match:
        return Match(length, self._end[state] + 1)

    def _state(self, length: int, nexts: dict[int, int], end: int) -> int:
        self._length.append(length)
        self._next.append(nexts)
        self._end.append(end)
        self._link.append(-1)
        return len(self._length) - 1

    def _mark_whole_text(self) -> None:
        """Record the text's end as the latest position of all its suffixes.

        Done one token late, so that `longest_repeat` finds an earlier position.
        """
        state, end = self._last, len(self.text) - 1
        for _ in range(_MAX_UPDATES):
            if state <= 0:
                break
            self._end[state] = end
            state = self._link[state]


class Cursor(NamedTuple):
    """The longest suffix of another text that matches: a state, and a length within it."""

    state: int
    length: int


START = Cursor(0, 0)
"""Nothing matched yet."""
