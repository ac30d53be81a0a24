"""Longest-suffix lookup: what followed the longest ending of the context that stood before.

Like n-gram lookup without a longest n. It looks in this request's own prompt and answer and, when
given an `AnswerHistory`, in earlier answers of the process (SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Sequence

from paceline.decoding.types import Drafter, Proposal
from paceline.drafters.automaton import START, Match, SuffixAutomaton


class AnswerHistory:
    """Earlier answers of this process, newest kept when it is full."""

    def __init__(self, max_tokens: int = 200_000) -> None:
        """Keep about the last `max_tokens` tokens of answers."""
        self._max_tokens = max_tokens
        self._answers: list[list[int]] = []
        self.automaton = SuffixAutomaton()
        """Replaced by a new one when old answers are dropped."""

    def add(self, answer: Sequence[int]) -> None:
        """Add a finished answer."""
        self._answers.append(list(answer))
        if len(self.automaton.text) + len(answer) > self._max_tokens:
            # Half is dropped at once, so that rebuilding is rare.
            while sum(map(len, self._answers)) > self._max_tokens // 2 and len(self._answers) > 1:
                self._answers.pop(0)
            self.automaton = SuffixAutomaton()
            added = self._answers
        else:
            added = self._answers[-1:]
        for tokens in added:
            for token in tokens:
                self.automaton.append(token)
            # No token is negative: a border that no match and no proposal crosses.
            self.automaton.append(-len(self.automaton.text) - 1)


class SuffixDrafter(Drafter):
    """Proposes what followed the longest match, from the request itself or from a corpus."""

    name = "suffix"

    def __init__(self, corpus: AnswerHistory | None = None) -> None:
        """Look in the request's own text and, when given, in `corpus`."""
        self._own = SuffixAutomaton()
        self._corpus = corpus
        self._earlier = corpus.automaton if corpus else None
        self._cursor = START

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What followed the longest match, up to `limit` tokens; on a tie, in the own text."""
        self._catch_up(context)
        own = self._own.longest_repeat()
        earlier = self._earlier.at(self._cursor) if self._earlier else None
        if self._earlier and earlier and (own is None or earlier.length > own.length):
            tokens = self._earlier.text[earlier.next_at : earlier.next_at + limit]
            border = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
            if border:
                return Proposal(tokens[:border], "earlier", earlier.length)
        if own is None:
            return Proposal((), self.name)
        return Proposal(_copy(context, own, limit), self.name, own.length)

    def _catch_up(self, context: Sequence[int]) -> None:
        """Index what is new, and follow it through the corpus."""
        if self._corpus and self._earlier is not self._corpus.automaton:
            self._earlier, self._cursor = self._corpus.automaton, START
        for token in context[len(self._own.text) :]:
            self._own.append(token)
            if self._earlier:
                self._cursor = self._earlier.advance(self._cursor, token)


def _copy(context: Sequence[int], match: Match, limit: int) -> list[int]:
    """`limit` tokens from where the match's continuation starts.

    Where it runs into the end of the context it goes on with its own copy, as LZ77 does: a text in
    a period of k tokens is continued in that period.
    """
    tokens = list(context[match.next_at : match.next_at + limit])
    for at in range(limit - len(tokens)):
        tokens.append(tokens[at])
    return tokens
