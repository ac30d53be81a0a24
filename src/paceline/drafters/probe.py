"""Counts the draft tokens a drafter would propose and have accepted, without using them."""

from collections.abc import Sequence

from paceline.decoding.types import ComputedBlock, Drafter, Proposal, common_prefix_length


class Probe(Drafter):
    """Wraps a drafter: proposes nothing, and compares the drafter's drafts with the text.

    It drafts as often as speculative decoding would: after m accepted tokens the next draft starts
    m + 1 tokens later.
    """

    def __init__(self, drafter: Drafter, length: int) -> None:
        self.name = f"probe({drafter.name})"
        self.watched = drafter.name
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self._drafter = drafter
        self._length = length
        self._draft: Sequence[int] = ()
        self._start = -1  # position of the open draft; -1: none is open

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self.count_open(context)
        if self._start < 0:
            self._draft = self._drafter.propose(context, self._length).tokens
            self._start = len(context)
        return Proposal((), self.name)

    def observe(self, computed: ComputedBlock) -> None:
        self._drafter.observe(computed)

    def close(self) -> None:
        self._drafter.close()

    def count_open(self, context: Sequence[int], *, ended: bool = False) -> None:
        """Count the open draft if the text shows how much of it is accepted (or has ended)."""
        if self._start < 0:
            return
        text = context[self._start : self._start + len(self._draft) + 1]
        accepted = common_prefix_length(text, self._draft)
        if accepted < len(text) or ended:
            self.steps += 1
            self.drafted += len(self._draft)
            self.accepted += accepted
            self._start = -1

    def count(self, context: Sequence[int]) -> dict[str, int]:
        """Return steps, drafted and accepted tokens of the whole text, which has ended."""
        self.count_open(context, ended=True)
        return {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}
