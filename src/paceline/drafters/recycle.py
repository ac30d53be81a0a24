"""A guess for the second row, which an exact engine computes anyway.

Remembers, for each token, what last came after it: in the text, and in the target's own words where
a draft was rejected: its row of logits says what would have followed (token recycling, arXiv
2408.08696). Free of cost and often wrong; one token at a time.
"""

from collections.abc import Sequence

from paceline.decoding.types import ComputedBlock, Drafter, Proposal

_SEEN_IN_TEXT = 1
_SEEN_IN_LOGITS = 0


class RecycleDrafter(Drafter):
    """Proposes one token: what followed the last token when it, or a guess of it, was last run."""

    name = "recycle"
    reads_logits = True

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._in_text: dict[int, int] = {}
        self._in_logits: dict[int, int] = {}
        self._indexed = 1

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """One token, or nothing when the last token was never seen before."""
        if not context:
            return Proposal((), self.name)
        for at in range(self._indexed, len(context)):
            self._in_text[context[at - 1]] = context[at]
        self._indexed = len(context)
        last = context[-1]
        if last in self._in_text:
            return Proposal((self._in_text[last],), self.name, _SEEN_IN_TEXT)
        if last in self._in_logits:
            return Proposal((self._in_logits[last],), self.name, _SEEN_IN_LOGITS)
        return Proposal((), self.name)

    def observe(self, computed: ComputedBlock) -> None:
        """Keep what the target would have said after the first token that did not stand."""
        if computed.kept < len(computed.tokens) == len(computed.logits):
            rejected = computed.tokens[computed.kept]
            self._in_logits[rejected] = int(computed.logits[computed.kept].argmax())
