"""Token recycling: one draft token, for a second row that is nearly free.

For each token it keeps the last token after it: in the text, and in the logits of the first
rejected draft token, whose argmax would have followed it (arXiv 2408.08696). Free and often wrong.
"""

from collections.abc import Sequence

from paceline.decoding.types import ComputedBlock, Drafter, Proposal

_MATCH_IN_TEXT = 1
_MATCH_IN_LOGITS = 0


class RecycleDrafter(Drafter):
    """Proposes one token: the last successor of the context's last token."""

    name = "recycle"
    reads_logits = True

    def __init__(self) -> None:
        """Start with no successors."""
        self._in_text: dict[int, int] = {}
        self._in_logits: dict[int, int] = {}
        self._indexed = 1

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """One token; none if the last token has no known successor."""
        if not context:
            return Proposal((), self.name)
        for at in range(self._indexed, len(context)):
            self._in_text[context[at - 1]] = context[at]
        self._indexed = len(context)
        last = context[-1]
        if last in self._in_text:
            return Proposal((self._in_text[last],), self.name, _MATCH_IN_TEXT)
        if last in self._in_logits:
            return Proposal((self._in_logits[last],), self.name, _MATCH_IN_LOGITS)
        return Proposal((), self.name)

    def observe(self, computed: ComputedBlock) -> None:
        """Keep the target's argmax after the first rejected token."""
        if computed.kept < len(computed.tokens) == len(computed.logits):
            rejected = computed.tokens[computed.kept]
            self._in_logits[rejected] = int(computed.logits[computed.kept].argmax())
