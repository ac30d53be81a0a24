"""The drafter of one request. Its network, which all requests share, computes where it likes."""

from collections.abc import Sequence
from typing import Any

from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters.dflash.network import LONG, Context, Network


class DFlashDrafter(Drafter):
    """Drafts a block in one pass, for one request."""

    name = "dflash"

    def __init__(self, network: Network, context: Context[Any]) -> None:
        """Draft with `network`; `context` holds what is known of the sequence already."""
        self._network = network
        self._context = context
        self._asked_at = -1
        self._last = Proposal((), self.name)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The block after the last token; nothing before the target was seen at work."""
        known = self._context
        if not (known.waiting or len(known)):
            return Proposal((), self.name)
        if self._asked_at != len(context):
            features = self._network.joined(known.waiting)
            known.waiting = []
            tokens, chances = self._network.draft(
                known, context[-1], len(context) - 1, features, known.waits_from
            )
            self._last = Proposal(tokens, self.name, 0, chances)
            self._asked_at = len(context)
        return self._last.cut(limit)

    def observe(self, computed: ComputedBlock) -> None:
        """Keep the features of the rows that are part of the sequence now."""
        if not computed.taps or not computed.kept:
            return
        known = self._context
        count = known.wait
        # A long prompt is read as it comes; and so is what stands before a gap.
        if count > LONG or (count and known.waits_from + count != computed.start):
            self._network.read(known, self._network.joined(known.waiting), known.waits_from)
            known.waiting = []
        if not known.waiting:
            known.waits_from = computed.start
        known.waiting.append(self._network.features(computed.taps, computed.kept))

    def cost(self, limit: int) -> float:
        """What a block takes, however little of it is wanted."""
        return self._network.cost(len(self._context) + self._context.wait)
