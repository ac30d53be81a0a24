"""Longest-suffix lookup: the tokens after the longest suffix of the context that occurs earlier.

Like n-gram lookup without a maximum n. It searches this request's prompt and answer and, with an
`AnswerHistory`, earlier answers of the process (SuffixDecoding, arXiv 2411.04975).

The index is a suffix automaton that grows token by token and stores every substring's latest
position. It finds the longest suffix that occurs earlier in constant time, and is built in
amortized constant time per token (Blumer et al. 1985). Each state is a set of substrings that end
at the same positions; `link` leads to the set of the next shorter suffixes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.decoding.types import Drafter, Proposal

_MAX_UPDATES = 128
"""States whose latest position is updated per token. Real text needs about ten; only long runs of
one token need more, and there every position is as good."""


class Match(NamedTuple):
    """A suffix of some text that occurs in the automaton's text."""

    length: int
    next_at: int
    """Index of its continuation in the automaton's text."""


class SuffixAutomaton:
    """The automaton of `text`, which only grows."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [-1]  # last index of the state's latest occurrence
        self._last = 0  # the state of the whole text

    def append(self, token: int) -> None:
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
        """Return the longest suffix that occurs earlier in the text, at its latest position."""
        state = max(self._link[self._last], 0)
        return self.match_at(Cursor(state, self._length[state]))

    def advance(self, cursor: "Cursor", token: int) -> "Cursor":
        """Advance a cursor over another text by that text's next token."""
        state, length = cursor
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            # The link of a state that was split since then may be longer than the cursor.
            length = min(length, self._length[state])
        if token in self._next[state]:
            return Cursor(self._next[state][token], length + 1)
        return START

    def match_at(self, cursor: "Cursor") -> Match | None:
        """Return the latest occurrence of a cursor's suffix, or None if it is empty."""
        return Match(cursor.length, self._end[cursor.state] + 1) if cursor.length else None

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


class AnswerHistory:
    """Earlier answers of this process; the oldest are evicted when it is full."""

    def __init__(self, max_tokens: int = 200_000) -> None:
        self._max_tokens = max_tokens
        self._answers: list[list[int]] = []
        self.automaton = SuffixAutomaton()
        """Replaced by a new one when answers are evicted."""

    def add(self, answer: Sequence[int]) -> None:
        added = [list(answer)]
        self._answers += added
        if len(self.automaton.text) + len(answer) > self._max_tokens:
            # Evict half at once, so that the index is rarely rebuilt.
            while sum(map(len, self._answers)) > self._max_tokens // 2 and len(self._answers) > 1:
                self._answers.pop(0)
            self.automaton = SuffixAutomaton()
            added = self._answers
        for tokens in added:
            for token in tokens:
                self.automaton.append(token)
            # A unique separator, which no match and no proposal crosses: no token is negative.
            self.automaton.append(-len(self.automaton.text) - 1)


class SuffixDrafter(Drafter):
    """Proposes the continuation of the longest match, in the request or in earlier answers."""

    name = "suffix"

    def __init__(self, history: AnswerHistory | None = None) -> None:
        self._own = SuffixAutomaton()
        self._history = history or AnswerHistory()
        self._earlier = self._history.automaton
        self._cursor = START

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self._index(context)
        repeat = self._own.longest_repeat()
        earlier = self._earlier.match_at(self._cursor)
        if earlier and (repeat is None or earlier.length > repeat.length):
            tokens = self._earlier.text[earlier.next_at : earlier.next_at + limit]
            end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
            if end:
                return Proposal(tokens[:end], "earlier", earlier.length)
        if repeat is None:
            return Proposal((), self.name)
        tokens = continuation(context, repeat.next_at, limit)
        return Proposal(tokens, self.name, repeat.length)

    def _index(self, context: Sequence[int]) -> None:
        if self._earlier is not self._history.automaton:
            self._earlier, self._cursor = self._history.automaton, START
        for token in context[len(self._own.text) :]:
            self._own.append(token)
            self._cursor = self._earlier.advance(self._cursor, token)


def continuation(context: Sequence[int], start: int, limit: int) -> list[int]:
    """Return `limit` tokens of the context from `start`, which is in it.

    At the end of the context it continues with its own copy, like LZ77: a text with a period of
    k tokens is continued with that period.
    """
    tokens = list(context[start : start + limit])
    for at in range(limit - len(tokens)):
        tokens.append(tokens[at])
    return tokens
