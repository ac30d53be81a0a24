"""n-gram lookup: the tokens after the latest occurrence of the context's last n tokens.

The drafter of the seed experiments and of most runtimes ("prompt lookup"). Its index holds the
prompt and grows with every token.
"""

from collections.abc import Sequence

from paceline.decoding.types import Drafter, Proposal
from paceline.drafters.suffix import continuation
from paceline.errors import InvalidRequest

MAX_MATCH = 16
"""Upper bound of `max_match`: each token of the context adds that many index entries."""

MAX_LENGTH = 64
"""Upper bound of `length`; no block is longer."""


class NgramDrafter(Drafter):
    """Proposes the continuation of the longest n-gram's latest occurrence.

    At the end of the text the continuation is its own copy, as in `suffix`.

    Raises InvalidRequest unless 1 <= min <= max <= MAX_MATCH and 1 <= length <= MAX_LENGTH.
    """

    name = "ngram"

    def __init__(self, *, min_match: int = 1, max_match: int = 4, length: int = 15) -> None:
        """Look up the last `max_match` tokens, then fewer, down to `min_match`.

        Args:
            min_match: tokens of the shortest n-gram.
            max_match: tokens of the longest n-gram.
            length: maximum tokens of a proposal.
        """
        if not 1 <= min_match <= max_match <= MAX_MATCH:
            raise InvalidRequest(
                f"ngram has min={min_match}, max={max_match}; expected 1 <= min <= max <= "
                f"{MAX_MATCH}"
            )
        if not 1 <= length <= MAX_LENGTH:
            raise InvalidRequest(f"ngram has length={length}; expected 1 to {MAX_LENGTH}")
        self._sizes = range(max_match, min_match - 1, -1)
        self._length = length
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        # Maps an n-gram to the start of its continuation; the last n-gram does not have one yet.
        for end in range(max(self._indexed, 1), len(context)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(context[end - size : end])] = end
        self._indexed = len(context)
        for size in self._sizes:
            start = self._after.get(tuple(context[-size:])) if size <= len(context) else None
            if start is not None:
                tokens = continuation(context, start, min(limit, self._length))
                return Proposal(tokens, self.name, size)
        return Proposal((), self.name)
