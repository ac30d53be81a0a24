"""Longest-suffix lookup: the tokens after the longest suffix of the context that occurs earlier.

Like n-gram lookup without a maximum n. It searches this request's prompt and answer and, with an
`AnswerHistory`, earlier answers of the process (SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Sequence

from paceline.decoding.types import Drafter, Proposal
from paceline.drafters.automaton import START, Match, SuffixAutomaton


class AnswerHistory:
    """Earlier answers of this process; the oldest are evicted when it is full."""

    def __init__(self, max_tokens: int = 200_000) -> None:
        """Keep at most about `max_tokens` tokens."""
        self._max_tokens = max_tokens
        self._answers: list[list[int]] = []
        self.automaton = SuffixAutomaton()
        """Replaced by a new one when answers are evicted."""

    def add(self, answer: Sequence[int]) -> None:
        """Add a finished answer."""
        self._answers.append(list(answer))
        if len(self.automaton.text) + len(answer) > self._max_tokens:
            # Evicts half at once, so that rebuilding is rare.
            while sum(map(len, self._answers)) > self._max_tokens // 2 and len(self._answers) > 1:
                self._answers.pop(0)
            self.automaton = SuffixAutomaton()
            added = self._answers
        else:
            added = self._answers[-1:]
        for tokens in added:
            for token in tokens:
                self.automaton.append(token)
            # A unique separator, which no match and no proposal crosses: no token is negative.
            self.automaton.append(-len(self.automaton.text) - 1)


class SuffixDrafter(Drafter):
    """Proposes the continuation of the longest match, in the request or in earlier answers."""

    name = "suffix"

    def __init__(self, history: AnswerHistory | None = None) -> None:
        """Search the request's own text and, if given, `history`."""
        self._own = SuffixAutomaton()
        self._history = history
        self._earlier = history.automaton if history else None
        self._cursor = START

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Up to `limit` tokens after the longest match; of equals, the one in the own text."""
        self._index(context)
        own = self._own.longest_repeat()
        earlier = self._earlier.at(self._cursor) if self._earlier else None
        if self._earlier and earlier and (own is None or earlier.length > own.length):
            tokens = self._earlier.text[earlier.next_at : earlier.next_at + limit]
            end = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
            if end:
                return Proposal(tokens[:end], "earlier", earlier.length)
        if own is None:
            return Proposal((), self.name)
        return Proposal(_copy(context, own, limit), self.name, own.length)

    def _index(self, context: Sequence[int]) -> None:
        """Index the new tokens, and match them against the history."""
        if self._history and self._earlier is not self._history.automaton:
            self._earlier, self._cursor = self._history.automaton, START
        for token in context[len(self._own.text) :]:
            self._own.append(token)
            if self._earlier:
                self._cursor = self._earlier.advance(self._cursor, token)


def _copy(context: Sequence[int], match: Match, limit: int) -> list[int]:
    """`limit` tokens of the match's continuation.

    At the end of the context it continues with its own copy, as LZ77 does: a text with a period of
    k tokens is continued with that period.
    """
    tokens = list(context[match.next_at : match.next_at + limit])
    for at in range(limit - len(tokens)):
        tokens.append(tokens[at])
    return tokens
