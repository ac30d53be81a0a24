"""Counts what a drafter would have proposed and how much would have stood, without using it."""

from collections.abc import Sequence

from paceline.decoding.types import ComputedBlock, Drafter, Proposal


class Probe(Drafter):
    """Stands in for a drafter: asks it, proposes nothing, and compares its guess with the text.

    It asks as often as speculation would: a guess that stands for m tokens is followed by the next
    one m + 1 tokens on.
    """

    def __init__(self, drafter: Drafter, length: int) -> None:
        """Watch `drafter`, asking for up to `length` tokens at a time."""
        self.name = f"probe({drafter.name})"
        self.watched = drafter.name
        self.reads_logits = drafter.reads_logits
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self._drafter = drafter
        self._length = length
        self._guess: Sequence[int] = ()
        self._start = -1  # where the open guess begins; -1 when none is open

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Nothing; the guess is kept for counting."""
        self.settle(context)
        if self._start < 0:
            self._guess = self._drafter.propose(context, self._length).tokens
            self._start = len(context)
        return Proposal((), self.name)

    def observe(self, computed: ComputedBlock) -> None:
        """Pass it on."""
        self._drafter.observe(computed)

    def close(self) -> None:
        """Pass it on."""
        self._drafter.close()

    def settle(self, context: Sequence[int], *, ended: bool = False) -> None:
        """Count the open guess, if the text that follows it is known far enough (or has ended)."""
        if self._start < 0:
            return
        came = context[self._start : self._start + len(self._guess) + 1]
        stood = 0
        while stood < min(len(came), len(self._guess)) and came[stood] == self._guess[stood]:
            stood += 1
        if stood < len(came) or ended:
            self.steps += 1
            self.drafted += len(self._guess)
            self.accepted += stood
            self._start = -1

    def count(self, context: Sequence[int]) -> dict[str, int]:
        """What it would have had, now that the text has ended: steps, drafted and accepted."""
        self.settle(context, ended=True)
        return {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}
