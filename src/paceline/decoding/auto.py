"""The default policy: draft as much as pays, on this machine, for this text, and no more.

Three things decide: what a call of T rows costs here (measured), how likely each draft token is to
stand (a running estimate per drafter and match length), and what a second is worth (the rate of
tokens this request has been running at). A policy changes speed, never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.decoding.costs import CostTable
from paceline.decoding.types import NOTHING, Outcome, Proposal

_LONGEST_MATCH = 24
"""Matches longer than this are all as good."""

_MEMORY = 48.0
"""Draft tokens after which an observation counts half."""

_CARRIED = 12.0
"""How many draft tokens' worth of belief a request takes over from those before it."""

_RATE_MEMORY = 24.0
"""Steps over which the rate of tokens is averaged."""


def prior_chance(match: int) -> float:
    """How likely a draft token is to stand, before anything was seen, by length of match.

    Between what greedy and sampled answers showed on the suite (docs/decisions/auto-policy.md).
    """
    match = max(match, 1)
    return (match - 0.5) / (match + 2)


@dataclass(slots=True)
class Acceptance:
    """Running estimate of P(draft token stands | source, match length).

    A draft token's match length is the proposal's plus its place in the draft: when i drafts stood,
    i more tokens match. So one table by length serves every place, and a long draft teaches it
    several times.
    """

    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """(source, match) -> (weight seen, weight that stood), both decaying."""

    def chance(self, source: str, match: int) -> float:
        """The chance that a draft token with this match length stands."""
        match = min(match, _LONGEST_MATCH)
        seen, stood = self.counts.get((source, match), (0.0, 0.0))
        belief = 2.0
        return (stood + belief * prior_chance(match)) / (seen + belief)

    def chances(self, proposal: Proposal) -> list[float]:
        """For every token of a proposal, its chance given that those before it stood."""
        return [
            self.chance(proposal.source, proposal.match + i) for i in range(len(proposal.tokens))
        ]

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """Learn from a verified proposal: the accepted tokens, and the first that did not stand."""
        keep = 0.5 ** (1 / _MEMORY)
        for i in range(min(accepted + 1, len(proposal.tokens))):
            key = (proposal.source, min(proposal.match + i, _LONGEST_MATCH))
            seen, stood = self.counts.get(key, (0.0, 0.0))
            self.counts[key] = (seen * keep + 1, stood * keep + (i < accepted))

    def carried(self) -> "Acceptance":
        """A copy for the next request that new evidence soon outweighs."""
        scaled = {}
        for key, (seen, stood) in self.counts.items():
            scale = min(1.0, _CARRIED / seen)
            scaled[key] = (seen * scale, stood * scale)
        return Acceptance(scaled)


class Auto:
    """Picks the proposal and length with the greatest gain: E[tau] - rate * c(T).

    `rate` is tokens per second so far. Maximising tokens minus what their time would have brought
    otherwise is what maximises tokens per second in the long run (renewal-reward; Dinkelbach 1967
    for the ratio): on a sure thing it drafts further than the best ratio of that step alone would,
    and on a poor one it stops sooner. Not drafting is the choice of length 0.
    """

    name = "auto"

    def __init__(self, max_block: int, cost: CostTable, acceptance: Acceptance) -> None:
        """Decide for one request.

        Args:
            max_block: the most rows in a block.
            cost: seconds per call by rows.
            acceptance: this request's estimate; it learns as the request runs.
        """
        self._cost = [0.0, *(cost(t) for t in range(1, max_block + 1))]
        self._acceptance = acceptance
        self._tokens = 1.0
        self._seconds = self._cost[1]

    def limit(self) -> int:
        """As many drafts as the longest block holds: asking costs next to nothing."""
        return len(self._cost) - 2

    def choose(self, proposals: Sequence[Proposal]) -> Proposal:
        """The proposal with the greatest gain, cut where more drafts would lower it."""
        rate = self._tokens / self._seconds
        best = NOTHING
        most = 1 - rate * self._cost[1]
        for proposal in proposals:
            stands = expected = 1.0
            for length, chance in enumerate(self._acceptance.chances(proposal), start=1):
                stands *= chance
                expected += stands
                gain = expected - rate * self._cost[length + 1]
                if gain > most:
                    most = gain
                    best = proposal._replace(tokens=proposal.tokens[:length])
        return best

    def observe(self, outcome: Outcome) -> None:
        """Learn how the guesses did, and how fast the request is going."""
        if outcome.proposal.tokens:
            self._acceptance.observe(outcome.proposal, outcome.accepted)
        keep = 0.5 ** (1 / _RATE_MEMORY)
        self._tokens = self._tokens * keep + outcome.accepted + 1
        self._seconds = self._seconds * keep + self._cost[len(outcome.proposal.tokens) + 1]
