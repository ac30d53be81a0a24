"""The default policy: draft as much as pays, on this machine, for this text, and no more.

Three things decide: what a call of T rows costs here (measured), how likely each draft token is to
stand (a running estimate per drafter and match length), and what a second is worth (the rate of
tokens this request has been running at). A policy changes speed, never a token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.decoding.costs import CostTable
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Drafter, Proposal

_LONGEST_MATCH = 24
"""Matches longer than this are all as good."""

_MEMORY = 48.0
"""Draft tokens after which an observation counts half."""

_CARRIED = 12.0
"""How many draft tokens' worth of belief a request takes over from those before it."""

_RATE_MEMORY = 24.0
"""Steps over which the rate of tokens is averaged."""

_MATCH_BELIEF = 2.0
"""How many draft tokens' worth of evidence the prior of a match is."""

_ESTIMATE_BELIEF = 4.0
"""The same for a drafter's own estimate, which was fitted to much text."""

_UNSEEN_TEXT = 0.75
"""What a drafter's own estimate is multiplied by, before anything was seen: it was fitted to the
text that the drafter learned from, and is too high elsewhere (docs/decisions/auto-policy.md)."""

_CONTRADICTED = 0.4
"""The same for its first token, where a match proposes another one."""

_ESTIMATE_STEPS = 8
"""A drafter's own estimates are corrected in so many steps."""

_DEPTHS = 256
"""Tokens of context over which costs are taken to be the same."""

_PATIENCE = (4, 64)
"""Least and most steps after which a drafter that did not pay is asked again."""

_IN_VAIN = 0.02
"""Part of the tokens that asking again may cost at most, where it goes on not to pay."""

_ASKING_RATE = 0.25
"""Weight of the newest answer in what a drafter that takes time is expected to bring."""


def prior_probability(match: int) -> float:
    """How likely a draft token is to stand, before anything was seen, by length of match.

    Between what greedy and sampled answers showed on the suite (docs/decisions/auto-policy.md).
    """
    match = max(match, 1)
    return (match - 0.5) / (match + 2)


@dataclass(slots=True)
class Acceptance:
    """Running estimate of P(draft token stands | source, evidence).

    Evidence is what the drafter said: its own estimate, or the length of a match. When i drafts of
    a match stood, i more tokens match: so one table by length serves every place, and a long draft
    teaches it several times.
    """

    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """(source, match or step of the estimate) -> (weight seen, weight that stood), both decaying.
    """

    def probabilities(self, proposal: Proposal, *, contradicted: bool = False) -> list[float]:
        """For every token of a proposal, its probability given that those before it stood.

        `contradicted`: whether a match proposes another first token.
        """
        return [*self.one_by_one(proposal, contradicted=contradicted)]

    def one_by_one(self, proposal: Proposal, *, contradicted: bool = False) -> Iterator[float]:
        """The same, for who may not want them all."""
        for key, belief, prior in _evidence(proposal, len(proposal.tokens), contradicted):
            seen, stood = self.counts.get(key, (0.0, 0.0))
            yield (stood + belief * prior) / (seen + belief)

    def observe(
        self, proposal: Proposal, tokens: Sequence[int], *, contradicted: bool = False
    ) -> None:
        """Learn how a proposal did, verified or not, where `tokens` are what came instead.

        What is learnt of are the tokens that stood and the first that did not.
        """
        keep = 0.5 ** (1 / _MEMORY)
        judged = min(len(proposal.tokens), len(tokens))
        for i, (key, _, _) in enumerate(_evidence(proposal, judged, contradicted)):
            stands = proposal.tokens[i] == tokens[i]
            seen, stood = self.counts.get(key, (0.0, 0.0))
            self.counts[key] = (seen * keep + 1, stood * keep + stands)
            if not stands:
                break

    def discounted(self) -> "Acceptance":
        """A copy for the next request that new evidence soon outweighs."""
        scaled = {}
        for key, (seen, stood) in self.counts.items():
            scale = min(1.0, _CARRIED / seen)
            scaled[key] = (seen * scale, stood * scale)
        return Acceptance(scaled)


def _evidence(
    proposal: Proposal, length: int, contradicted: bool
) -> Iterator[tuple[tuple[str, int], float, float]]:
    """For each of the first `length` tokens: its key, and the weight and value of the prior."""
    source = proposal.source
    if proposal.probabilities:
        for at, probability in enumerate(proposal.probabilities[:length]):
            step = round(probability * _ESTIMATE_STEPS)
            if at == 0 and contradicted:
                # A matter of its own: the text at hand knows better, or it does not.
                yield (
                    (f"{source}, contradicted", step),
                    _ESTIMATE_BELIEF,
                    probability * _CONTRADICTED,
                )
            else:
                yield (source, step), _ESTIMATE_BELIEF, probability * _UNSEEN_TEXT
    else:
        for at in range(length):
            match = min(proposal.match + at, _LONGEST_MATCH)
            yield (source, match), _MATCH_BELIEF, prior_probability(match)


@dataclass(slots=True)
class _Asking:
    """Whether a drafter that takes time is worth its time."""

    tokens: float = 0.0
    """What its proposals lately let expect: tokens of a step, and the seconds to verify them."""
    seconds: float = 0.0
    asked: bool = False
    """Whether it ever was."""
    since: int = 0
    """Steps since it was last asked."""
    patience: int = _PATIENCE[0]
    """Steps after which it is asked again although it did not pay; more where it is dear."""

    def worth(self, rate: float, price: float, otherwise: float) -> bool:
        """Whether to ask now: at a price in tokens, where `otherwise` is to be had without."""
        self.since += 1
        gain = self.tokens - rate * self.seconds - price
        patience = max(self.patience, price / _IN_VAIN)
        return not self.asked or gain > otherwise or self.since >= patience

    def learn(self, tokens: float, seconds: float, *, paid: bool) -> None:
        """Note what it brought."""
        least, most = _PATIENCE
        self.patience = least if paid else min(2 * self.patience, most)
        weight = _ASKING_RATE if self.asked else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.asked = True
        self.since = 0


class Auto:
    """Picks the proposal and length with the greatest gain: E[tau] - rate * seconds.

    `rate` is tokens per second so far. Maximising tokens minus what their time would have brought
    otherwise is what maximises tokens per second in the long run (renewal-reward; Dinkelbach 1967
    for the ratio): on a sure thing it drafts further than the best ratio of that step alone would,
    and on a poor one it stops sooner. Not drafting is the choice of length 0, and a drafter that
    takes time is asked only when it is likely to bring more than its time is worth.
    """

    name = "auto"

    def __init__(
        self, max_block: int, cost: CostTable, acceptance: Acceptance, context: int = 0
    ) -> None:
        """Decide for one request.

        Args:
            max_block: the most rows in a block.
            cost: seconds per call by rows.
            acceptance: this request's estimate; it learns as the request runs.
            context: tokens of its prompt.
        """
        self._measured, self._most = cost, max_block
        self._depth = context // _DEPTHS
        self._table = cost.at_context(context)
        self._cost = self._costs()
        self._others: float | None = None  # tokens per second of those in the same call
        self._acceptance = acceptance
        self._asking: dict[str, _Asking] = {}
        self._tokens = 1.0
        self._seconds = self._cost[1]
        self._offered: list[tuple[Proposal, bool]] = []  # of the step under way; contradicted
        self._drafting = 0.0  # seconds of drafters asked since the last step

    @property
    def rate(self) -> float:
        """Tokens per second that this request has lately been running at."""
        return self._tokens / self._seconds

    def set_batch_load(self, seconds: float, row: float, rate: float) -> None:
        """Other requests are in the next call, and make `rate` tokens per second.

        A row is then paid for with everybody's time: what that is worth is what all make of it.

        Args:
            seconds: what the call takes with one row of this request.
            row: what each further row adds behind the context that was measured.
            rate: of the others together.
        """
        row += self._table.per_row - self._measured.per_row
        self._cost = [0.0, *(seconds + row * further for further in range(self._most))]
        self._others = rate

    def clear_batch_load(self) -> None:
        """Nobody else is in the next call."""
        if self._others is not None:
            self._others = None
            self._cost = self._costs()

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], room: int) -> Proposal:
        """The proposal with the greatest gain, cut where more drafts would lower it."""
        self._go_to(len(context))
        room = min(room, len(self._cost) - 2)
        rate = self.rate + (self._others or 0.0)
        best, most = NO_PROPOSAL, 1 - rate * self._cost[1]
        if room < 1:
            return best
        # Those that cost nothing first: what they find decides whether others are asked at all.
        costs = sorted(
            ((drafter.cost(room), drafter) for drafter in drafters), key=lambda pair: pair[0]
        )
        free = [drafter.propose(context, room) for seconds, drafter in costs if not seconds]
        matched = {each.tokens[0] for each in free if each.tokens and not each.probabilities}
        for at, (seconds, drafter) in enumerate(costs):
            price = rate * seconds
            asking = self._asking.setdefault(drafter.name, _Asking())
            if price and not asking.worth(rate, price, most):
                continue
            offered = free[at] if not price else drafter.propose(context, room)
            # One that takes time has seen more than the last few tokens: it is not doubted.
            contradicted = bool(
                not price and matched and offered.probabilities and offered.tokens[0] not in matched
            )
            self._offered.append((offered, contradicted))
            proposal, tokens = self._cut(offered, rate, contradicted=contradicted)
            takes = self._cost[len(proposal.tokens) + 1]
            gain = tokens - rate * takes
            if price:
                asking.learn(tokens, takes, paid=gain - price > most)
            self._drafting += seconds
            if gain > most:
                best, most = proposal, gain
        return best

    def observe(self, outcome: DecodeOutcome) -> None:
        """Learn how the guesses did, and how fast the request is going."""
        for offered, contradicted in self._offered:
            self._acceptance.observe(offered, outcome.tokens, contradicted=contradicted)
        self._offered = []
        keep = 0.5 ** (1 / _RATE_MEMORY)
        seconds = self._cost[len(outcome.proposal.tokens) + 1] + self._drafting
        self._tokens = self._tokens * keep + outcome.accepted + 1
        self._seconds = self._seconds * keep + seconds
        self._drafting = 0.0

    def _go_to(self, context: int) -> None:
        """Weigh by what calls cost behind so many tokens."""
        if context // _DEPTHS != self._depth:
            self._depth = context // _DEPTHS
            self._table = self._measured.at_context(context)
            if self._others is None:
                self._cost = self._costs()

    def _costs(self) -> list[float]:
        """Seconds of a call for this request alone, by its rows."""
        return [0.0, *(self._table(rows) for rows in range(1, self._most + 1))]

    def _cut(
        self, proposal: Proposal, rate: float, *, contradicted: bool = False
    ) -> tuple[Proposal, float]:
        """The beginning of a proposal with the greatest gain, and the tokens to expect of it."""
        stands = expected = tokens = 1.0
        length, most = 0, 1 - rate * self._cost[1]
        probabilities = self._acceptance.one_by_one(proposal, contradicted=contradicted)
        for at, probability in enumerate(probabilities, start=1):
            stands *= probability
            expected += stands
            gain = expected - rate * self._cost[at + 1]
            if gain > most:
                length, most, tokens = at, gain, expected
            # Each of those left brings less than the last, and no row makes a call cheaper.
            elif gain + stands * (len(proposal.tokens) - at) <= most:
                break
        return proposal.cut(length), tokens
