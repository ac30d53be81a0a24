"""A suffix automaton that grows by one token at a time, and knows where things last stood.

It answers, for the text so far, "what is the longest ending that stood here before, and where?" in
constant time, and takes amortised constant time per token to build (Blumer et al. 1985). Every
state is a set of substrings that end at the same places; `link` leads to the next shorter set.
"""

from typing import NamedTuple

_WALK = 128
"""States whose last place is updated per token. Real text needs about ten; only long runs of one
token need more, and there every place is as good."""


class Match(NamedTuple):
    """An ending of some text that stands in the automaton's text."""

    length: int
    """Tokens that match."""
    next_at: int
    """Where what followed it starts in the automaton's text."""


class SuffixAutomaton:
    """The automaton of `text`, which only grows."""

    def __init__(self) -> None:
        """An empty text."""
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [-1]  # index of the last token of the state's latest place
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
        """The longest ending of the text that stands earlier in it, and its latest such place."""
        state = self._link[self._last]
        return self._match(state, self._length[state]) if state > 0 else None

    def advance(self, cursor: "Cursor", token: int) -> "Cursor":
        """Move a cursor that follows another text by that text's next token."""
        state, length = cursor
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            # A state that was split since the cursor came has a link that is longer than it.
            length = min(length, self._length[state])
        if token in self._next[state]:
            return Cursor(self._next[state][token], length + 1)
        return START

    def at(self, cursor: "Cursor") -> Match | None:
        """Where the ending that a cursor stands for was last, if it has any length."""
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
        """Note the text's present end as the latest place of all its endings.

        Done one token late, so that `longest_repeat` finds the place before the present one.
        """
        state, end = self._last, len(self.text) - 1
        for _ in range(_WALK):
            if state <= 0:
                break
            self._end[state] = end
            state = self._link[state]


class Cursor(NamedTuple):
    """How far another text's ending matches an automaton: a state, and a length within it."""

    state: int
    length: int


START = Cursor(0, 0)
"""Nothing matched yet."""
