"""The default policy: drafts as many tokens as raise this request's throughput.

Three inputs decide: the measured cost of a forward pass of T rows, the acceptance probability of
each draft token (a running estimate per drafter and match length), and the request's recent tokens
per second. Invariant: a policy changes speed, never a token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter, itemgetter
from typing import NamedTuple

from paceline.decoding.costs import CostTable
from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Drafter, Proposal

_MAX_MATCH = 24
"""Longer matches share one estimate."""

_HALF_LIFE = 48.0
"""Half-life of an observation, in draft tokens."""

_INHERITED_WEIGHT = 12.0
"""Weight, in draft tokens, of an estimate that a request inherits from earlier ones."""

_RATE_HALF_LIFE = 24.0
"""Half-life of a step in the tokens per second, in steps."""

_MATCH_WEIGHT = 2.0
"""Weight of a match's prior, in draft tokens."""

_ESTIMATE_WEIGHT = 4.0
"""Weight of a drafter's own estimate, in draft tokens: it was fitted to much text."""

_UNSEEN_TEXT = 0.75
"""Factor on a drafter's own estimate as a prior: the estimate was fitted to the drafter's training
text and is too high elsewhere (docs/decisions/auto-policy.md)."""

_CONTRADICTED = 0.4
"""Factor on the estimate for its first token if a match proposes a different one."""

_ESTIMATE_BINS = 8
"""A drafter's own estimates are rounded to multiples of 1 / 8 and corrected per bin."""

_CONTEXT_STEP = 64
"""Costs are updated whenever the context grows by this many tokens."""

_RETRY_STEPS = (4, 64)
"""Minimum and maximum steps until a costly drafter that lost time is tried again."""

_RETRY_SHARE = 0.02
"""Maximum share of the tokens that retries of a drafter may cost."""

_GAIN_WEIGHT = 0.25
"""Weight of the newest proposal in a costly drafter's expected gain."""


def prior_probability(match: int) -> float:
    """Return a draft token's acceptance probability by match length, before any observation.

    It lies between greedy and sampled responses on the suite (docs/decisions/auto-policy.md).
    """
    match = max(match, 1)
    return (match - 0.5) / (match + 2)


@dataclass(slots=True)
class Acceptance:
    """Running estimate of P(draft token accepted | source, evidence).

    Evidence is the drafter's own estimate or the length of a match. After i accepted tokens of a
    matched draft, i more tokens match. So one table by match length covers every position, and a
    long draft updates it several times.
    """

    counts: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """(source, match length or estimate bin) -> (weight seen, weight accepted), both decaying."""
    costly: dict[str, "_CostlyDrafter"] = field(default_factory=dict)
    """By drafter name: a request runs a head if earlier requests gained from it."""

    def probabilities(
        self, proposal: Proposal, others_agree: bool | None = None
    ) -> Iterator[float]:
        """For each token of a proposal, yield P(accepted | all tokens before it were accepted).

        `others_agree`: True if a free drafter of the other kind, matching or estimating, proposes
        the same first token; None if no such drafter proposes any.
        """
        for key, weight, prior in _evidence(proposal, len(proposal.tokens), others_agree):
            seen, accepted = self.counts.get(key, (0.0, 0.0))
            yield (accepted + weight * prior) / (seen + weight)

    def observe(
        self, proposal: Proposal, tokens: Sequence[int], others_agree: bool | None = None
    ) -> None:
        """Compare a proposal, verified or not, with the `tokens` that the target picked.

        The accepted tokens and the first rejected one count.
        """
        keep = 0.5 ** (1 / _HALF_LIFE)
        compared = min(len(proposal.tokens), len(tokens))
        for i, (key, _, _) in enumerate(_evidence(proposal, compared, others_agree)):
            accept = proposal.tokens[i] == tokens[i]
            seen, accepted = self.counts.get(key, (0.0, 0.0))
            self.counts[key] = (seen * keep + 1, accepted * keep + accept)
            if not accept:
                break

    def discounted(self) -> "Acceptance":
        """Return a copy for the next request, with its weights limited to `_INHERITED_WEIGHT`."""
        scaled = {}
        for key, (seen, accepted) in self.counts.items():
            scale = min(1.0, _INHERITED_WEIGHT / seen)
            scaled[key] = (seen * scale, accepted * scale)
        return Acceptance(scaled, {name: replace(one) for name, one in self.costly.items()})


def _evidence(
    proposal: Proposal, length: int, others_agree: bool | None
) -> Iterator[tuple[tuple[str, int], float, float]]:
    """For each of the first `length` tokens, yield its key and its prior's weight and value."""
    source = proposal.source
    if proposal.probabilities:
        for at, estimate in enumerate(proposal.probabilities[:length]):
            bin_ = round(estimate * _ESTIMATE_BINS)
            if at == 0 and others_agree is False:
                # Counted separately: here the match in this text may be the better predictor.
                key = f"{source}, contradicted", bin_
                yield key, _ESTIMATE_WEIGHT, estimate * _CONTRADICTED
            else:
                yield (source, bin_), _ESTIMATE_WEIGHT, estimate * _UNSEEN_TEXT
    else:
        for at in range(length):
            match = min(proposal.match + at, _MAX_MATCH)
            if at == 0 and others_agree:  # likelier, and counted separately
                key = f"{source}, agreed", match
                yield key, _MATCH_WEIGHT, (match + 0.5) / (match + 1.5)
            else:
                yield (source, match), _MATCH_WEIGHT, prior_probability(match)


def _others_agree(offered: Proposal, free: Sequence[Proposal]) -> bool | None:
    """Return whether free drafters of the other kind propose the same first token, or None."""
    estimated = bool(offered.probabilities)
    firsts = [
        proposal.tokens[0]
        for proposal in free
        if proposal.tokens and bool(proposal.probabilities) is not estimated
    ]
    return offered.tokens[0] in firsts if firsts and offered.tokens else None


class _Choice(NamedTuple):
    """A draft that may be verified, and its expected gain."""

    proposal: Proposal
    tokens: float
    """Expected tokens of the forward pass, E[tau]."""
    seconds: float
    """Duration of the forward pass."""
    gain: float
    """tokens - rate * seconds."""


_gain = attrgetter("gain")


@dataclass(slots=True)
class _CostlyDrafter:
    """Expected gain of a drafter whose proposals take time, and when to run it again."""

    tokens: float = 0.0
    """Running mean of the tokens per step that its proposals promise, verified in `seconds`."""
    seconds: float = 0.0
    length: float = 2.0
    """Running mean of the draft tokens worth verifying; it may propose a few more."""
    asked: bool = False
    steps: int = 0
    """Steps since it last ran."""
    retry: int = _RETRY_STEPS[0]
    """Steps until it is tried again although it lost time; more if it is expensive."""

    def should_ask(self, rate: float, price: float, otherwise: float) -> bool:
        """Return whether its expected gain at `price` beats `otherwise`, or a retry is due.

        `price` and `otherwise`, the best gain without it, are in tokens.
        """
        self.steps += 1
        gain = self.tokens - rate * self.seconds - price
        retry = max(self.retry, price / _RETRY_SHARE)
        return not self.asked or gain > otherwise or self.steps >= retry

    def learn(self, choice: _Choice, *, paid: bool) -> None:
        min_retry, max_retry = _RETRY_STEPS
        self.retry = min_retry if paid else min(2 * self.retry, max_retry)
        weight = _GAIN_WEIGHT if self.asked else 1.0
        self.tokens += weight * (choice.tokens - self.tokens)
        self.seconds += weight * (choice.seconds - self.seconds)
        self.length += weight * (len(choice.proposal.tokens) - self.length)
        self.asked = True
        self.steps = 0


class Auto:
    """Picks the proposal and length with the greatest gain: E[tau] - rate * seconds.

    `rate` is the recent tokens per second. Maximizing tokens minus the tokens that plain progress
    would bring in the same time maximizes tokens per second in the long run (renewal-reward;
    Dinkelbach 1967 for the ratio). A likely draft is longer than the best ratio of its own step
    would make it, an unlikely one shorter. Plain decoding is the choice of length 0. A costly
    drafter runs only if its expected gain exceeds the price of its time.
    """

    name = "auto"

    def __init__(
        self,
        max_block: int,
        cost: CostTable,
        acceptance: Acceptance,
        context: int = 0,
        *,
        latest: Callable[[], CostTable] | None = None,
    ) -> None:
        """Prepare for one request.

        Args:
            max_block: maximum rows of a block.
            cost: seconds per forward pass by rows.
            acceptance: this request's estimate; updated as the request runs.
            context: number of prompt tokens.
            latest: returns the latest costs; None: the costs at the start.
        """
        self._latest, self._measured, self._max_block = latest, cost, max_block
        self._context_step = context // _CONTEXT_STEP
        self._table = self._measured.at_context(context)
        self._cost = self._table.by_rows(max_block)
        self._batch_rate: float | None = None  # tokens per second of the other requests
        self._asks = True  # whether drafters run
        self._acceptance = acceptance
        self._tokens = 1.0
        self._seconds = self._cost[1]
        self._offered: list[tuple[Proposal, bool | None]] = []  # of this step
        self._draft_seconds = 0.0  # of drafters that ran since the last step
        self.gain = 0.0
        """Expected tokens of the latest draft beyond plain decoding, minus the value of its time,
        without the drafters' own time."""

    @property
    def rate(self) -> float:
        return max(self._tokens / self._seconds, 1 / self._cost[1])

    def set_batch_load(
        self, seconds: float, row: float, rate: float, *, drafts: bool = True
    ) -> None:
        """Share the next forward pass with requests that make `rate` tokens per second together.

        A row then delays all of them, so its time is valued at the rate of the whole batch.

        Args:
            seconds: duration of the forward pass with one row of this request.
            row: seconds per further row, at the context of the measurement.
            rate: tokens per second of the other requests.
            drafts: True if drafters run.
        """
        row += self._table.per_row - self._measured.per_row
        self._cost = [0.0, *(seconds + row * further for further in range(self._max_block))]
        self._batch_rate, self._asks = rate, drafts
        self.gain = 0.0

    def clear_batch_load(self) -> None:
        if self._batch_rate is not None:
            self._batch_rate, self._asks = None, True
            self._cost = self._table.by_rows(self._max_block)

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], limit: int) -> Proposal:
        """Return the proposal with the greatest gain, cut where more tokens would lower it.

        Free drafters run first. A costly one runs only if its mean gain, less its price, exceeded
        their best. At 10 tokens per second, with forward passes of 0.10 s, 0.02 s more per draft
        token, and a model that takes 0.03 s to draft:

            draft                P(accepted)   E[tau]  seconds  gain = E[tau] - 10 * seconds
            none                               1.00    0.10     0.00
            suffix  the          0.6           1.60    0.12     0.40
                    the cat      0.6 0.5       1.90    0.14     0.50   the best: cut here
                    the cat sat  0.6 0.5 0.3   1.99    0.16     0.39
            table   a            0.4           1.40    0.12     0.20
            model   skipped, if its proposals gained less than 0.50 + 10 * 0.03 on average
        """
        self._update_costs(len(context))
        limit = min(limit, self._max_block - 1) if self._asks else 0
        if limit < 1:
            return NO_PROPOSAL
        rate = self.rate + (self._batch_rate or 0.0)
        best = plain = self._choice(NO_PROPOSAL, rate, None)
        asked = sorted(((drafter.cost(limit), drafter) for drafter in drafters), key=itemgetter(0))
        free = [drafter.propose(context, limit) for seconds, drafter in asked if not seconds]
        for proposal in free:
            choice = self._choice(proposal, rate, _others_agree(proposal, free))
            best = max(best, choice, key=_gain)
        for seconds, drafter in asked[len(free) :]:
            price = rate * seconds
            costly = self._acceptance.costly.setdefault(drafter.name, _CostlyDrafter())
            if costly.should_ask(rate, price, best.gain):
                max_length = min(limit, 1 + ceil(1.5 * costly.length))
                # It reads more than the last few tokens: no match contradicts it.
                choice = self._choice(drafter.propose(context, max_length), rate, None)
                costly.learn(choice, paid=choice.gain - price > best.gain)
                best = max(best, choice, key=_gain)
                self._draft_seconds += seconds
        self.gain = best.gain - plain.gain
        return best.proposal

    def observe(self, outcome: DecodeOutcome) -> None:
        for offered, others_agree in self._offered:
            self._acceptance.observe(offered, outcome.tokens, others_agree)
        self._offered = []
        keep = 0.5 ** (1 / _RATE_HALF_LIFE)
        seconds = self._cost[len(outcome.proposal.tokens) + 1] + self._draft_seconds
        self._tokens = self._tokens * keep + outcome.accepted + 1
        self._seconds = self._seconds * keep + seconds
        self._draft_seconds = 0.0

    def _update_costs(self, context: int) -> None:
        if context // _CONTEXT_STEP != self._context_step:
            self._context_step = context // _CONTEXT_STEP
            self._measured = self._latest() if self._latest else self._measured
            self._table = self._measured.at_context(context)
            if self._batch_rate is None:
                self._cost = self._table.by_rows(self._max_block)

    def _choice(self, offered: Proposal, rate: float, others_agree: bool | None) -> _Choice:
        """Return a proposal's prefix with the greatest gain. All of it updates the estimates."""
        self._offered.append((offered, others_agree))
        all_accepted = expected = 1.0
        length, tokens, best_gain = 0, 1.0, 1 - rate * self._cost[1]
        probabilities = self._acceptance.probabilities(offered, others_agree)
        for at, probability in enumerate(probabilities, start=1):
            all_accepted *= probability
            expected += all_accepted
            gain = expected - rate * self._cost[at + 1]
            if gain > best_gain:
                length, tokens, best_gain = at, expected, gain
            # Each remaining token adds at most `all_accepted`; a row never makes a pass cheaper.
            elif gain + all_accepted * (len(offered.tokens) - at) <= best_gain:
                break
        return _Choice(offered.cut(length), tokens, self._cost[length + 1], best_gain)
