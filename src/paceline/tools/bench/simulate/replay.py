"""Known texts once more, without their model: what a drafter and a policy make of them.

In place of an engine stands the text itself, which says of each row what was picked there; all else
is the machine that real requests run on (`decoding.Generation`, the drafters, the policies). Knows
what calls cost only from a table. The rule: the steps are those that a real request with the same
options takes over the same tokens, one for one. Two things are beyond it: drafters that look at
what a model computes, and the clock: Kelly's rule, which reads one, is shown the table's seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from paceline import drafters as drafting
from paceline.decoding.auto import Acceptance
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Generation
from paceline.decoding.sampling import Sampling
from paceline.decoding.step import Counters, Step
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Best, Drafter, Policy, Proposal
from paceline.drafters import AnswerHistory, DrafterSpec, Own, Shared
from paceline.engines.profile import MAX_ROWS
from paceline.errors import InvalidRequest
from paceline.runtime.options import Request

LONGEST_MATCH = 24
"""Longer matches are counted as this."""

CHANCE_STEPS = 10
"""A drafter's own chances are counted in tenths."""

_DEPTHS = 64
"""Tokens of context over which costs are taken to be the same."""

_ANY_TOKEN = 1 << 62
_NO_ROWS = np.empty((0, 0), np.float32)
_NO_SCORES = np.empty(0, np.float32)

_ALONE = ("none", "ngram", "suffix", "table", "prediction")
"""Drafters to which a text is enough."""

_NEEDS = {"recycle": "the model's logits", "dflash": "the model's hidden states"}
"""What others need; most of them: calls of another model."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and the answer that came, as token ids, at least one of each."""

    id: str
    kind: str
    prompt: Sequence[int]
    answer: Sequence[int]
    most: int | None = None
    """The most tokens the answer might have had; it then ended at its last token, which is one
    that ends answers. None: it was cut where it ends."""
    prediction: Sequence[int] = ()
    """What the answer was expected to be, for the drafter `prediction`."""

    @property
    def ended_by(self) -> int | None:
        """The token that ended it, if one did."""
        if (
            self.most is None
            or self.most <= len(self.answer)
            or self.answer[-1] in self.answer[:-1]
        ):
            return None
        return self.answer[-1]


class SimulatedStep(NamedTuple):
    """A step after the prompt."""

    rows: int
    """Of the call."""
    context: int
    """Tokens before them."""
    step: Step


@dataclass(slots=True)
class EvidenceCounts:
    """How often tokens of drafts were compared with what came, and how often they stood."""

    by_match: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(source, tokens that matched before the guess) -> [compared, stood]."""
    by_chance: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(source, tenths of the chance that the drafter saw) -> [compared, stood]."""

    def count(self, proposal: Proposal, stood: int, came: int) -> None:
        """Count a draft of which `stood` tokens stood, where `came` tokens came."""
        source, match = proposal.source, proposal.match
        for at in range(min(len(proposal.tokens), came, stood + 1)):
            if proposal.probabilities:
                key = source, int(proposal.probabilities[at] * CHANCE_STEPS)
                found = self.by_chance.setdefault(key, [0, 0])
            else:
                # When i tokens of a draft stood, i more match.
                found = self.by_match.setdefault((source, min(match + at, LONGEST_MATCH)), [0, 0])
            found[0] += 1
            found[1] += at < stood

    def add(self, other: "EvidenceCounts") -> None:
        """Add what another has counted."""
        for mine, theirs in (
            (self.by_match, other.by_match),
            (self.by_chance, other.by_chance),
        ):
            for key, (compared, stood) in theirs.items():
                found = mine.setdefault(key, [0, 0])
                found[0] += compared
                found[1] += stood


@dataclass(slots=True)
class Simulation:
    """One recording by one drafter and policy."""

    recording: Recording
    counters: Counters
    evidence: EvidenceCounts
    seconds: float
    """What its calls after the prompt cost, by the table."""
    plain_seconds: float
    """What they cost without drafts."""
    draft_seconds: float
    """What drafters and policy took, by the clock of this process. The table knows nothing of it:
    it is next to nothing, and no two runs agree on it."""

    @property
    def decoded(self) -> int:
        """Tokens after the first, which the prompt's call brings."""
        return len(self.recording.answer) - 1

    @property
    def tokens_per_step(self) -> float:
        """The speed over plain decoding if all calls cost the same; 1.0 without calls."""
        return self.decoded / self.counters.steps if self.counters.steps else 1.0

    @property
    def speed_up(self) -> float:
        """The speed over plain decoding by the table; 1.0 without calls."""
        return self.plain_seconds / self.seconds if self.decoded else 1.0


def simulate(
    recordings: Sequence[Recording],
    request: Request,
    cost: CostTable,
    shared: Shared,
    *,
    carry: bool = False,
    watch: Callable[[int], None] = lambda _: None,
) -> Iterator[Simulation]:
    """Answer each recording again.

    Args:
        recordings: what was asked and answered.
        request: drafter, policy and block; all else in it is of no consequence here.
        cost: seconds of a call by rows.
        shared: what drafters have in common; earlier answers in it are forgotten.
        carry: the requests of one process, which learn from those before them; otherwise each is
            the first.
        watch: called with how many tokens of answers are done.

    Raises:
        InvalidRequest: the drafter cannot be simulated, or there is none such.
        ModelError: a drafter cannot be read.
    """
    check(request.drafter, shared)
    acceptance = Acceptance()
    shared.corpus = AnswerHistory()
    prices = _Prices(cost)
    done = 0
    for recording in recordings:
        expected = bool(recording.prediction)
        spec = request.drafter.resolve(shared.shipped, prediction=expected)
        own = Own(prediction=recording.prediction, prompt_length=len(recording.prompt))
        acceptance = acceptance.discounted() if carry else Acceptance()
        policy = request.policy_for(lambda: cost, acceptance, len(recording.prompt))
        yield _one(recording, drafting.create(spec, shared, own), policy, prices)
        if carry and spec.uses_earlier_answers:
            shared.corpus.add(recording.answer)
        done += len(recording.answer)
        watch(done)


def steps(
    recording: Recording, drafters: Sequence[Drafter], policy: Policy, cost: CostTable
) -> Iterator[SimulatedStep]:
    """The steps after the prompt. They depend on `cost` only where the policy looks at a clock."""
    generation = _generation(recording, drafters, policy)
    for _, each in _steps(generation, recording, _Prices(cost)):
        yield each


def check(spec: DrafterSpec, shared: Shared) -> None:
    """Find out whether the drafters of `spec` can do without a model.

    Raises:
        InvalidRequest: one cannot; the message says what it needs.
    """
    for part in spec.resolve(shared.shipped).parts:
        if part.kind not in _ALONE:
            needs = _NEEDS.get(part.kind, "calls of another model")
            raise InvalidRequest(
                f"drafter {part.kind} cannot be simulated: it needs {needs}, which a text has not; "
                f"expected {', '.join(_ALONE)}"
            )


class _Prices:
    """What calls cost by rows and context, looked up fast."""

    def __init__(self, cost: CostTable) -> None:
        self._cost = cost
        self._known: dict[int, list[float]] = {}

    def at_context(self, context: int) -> list[float]:
        """Seconds of a call by its rows, of which there is at least one."""
        depth = context // _DEPTHS
        if depth not in self._known:
            cost = self._cost.at_context(depth * _DEPTHS + _DEPTHS // 2)
            self._known[depth] = [0.0, *(cost(rows) for rows in range(1, MAX_ROWS + 1))]
        return self._known[depth]


def _one(
    recording: Recording, drafters: Sequence[Drafter], policy: Policy, prices: _Prices
) -> Simulation:
    generation = _generation(recording, drafters, policy)
    evidence = EvidenceCounts()
    seconds = plain = drafting_took = 0.0
    for took, (rows, context, step) in _steps(generation, recording, prices):
        price = prices.at_context(context)
        seconds += price[rows]
        plain += price[1] * len(step.tokens)
        drafting_took += took
        if step.drafted:
            evidence.count(step.proposal, step.matched, len(step.tokens))
    return Simulation(recording, generation.counters, evidence, seconds, plain, drafting_took)


def _generation(recording: Recording, drafters: Sequence[Drafter], policy: Policy) -> Generation:
    ended_by = recording.ended_by
    most = len(recording.answer) if ended_by is None or recording.most is None else recording.most
    ends = frozenset() if ended_by is None else frozenset([ended_by])
    return Generation(
        recording.prompt,
        vocab_size=_ANY_TOKEN,
        context_length=len(recording.prompt) + most,
        sampling=Sampling(),
        stopping=Stopping(stop_token_ids=ends),
        drafters=drafters,
        policy=policy,
        decode=lambda _: "",
        prefill_chunk=len(recording.prompt),
    )


def _steps(
    generation: Generation, recording: Recording, prices: _Prices
) -> Iterator[tuple[float, SimulatedStep]]:
    """The steps after the prompt, each with the seconds that drafting it took."""
    # Behind the end stands anything: no pick there is ever looked at.
    text = np.array([*recording.prompt, *recording.answer, *[0] * MAX_ROWS])
    while not generation.finished:
        prefilling = generation.prefilling
        began = perf_counter()
        block = generation.next_block()
        took = perf_counter() - began
        rows = len(block.tokens)
        context = generation.length
        first = context + rows - block.rows + 1
        best = Best(text[first : first + block.rows], _NO_SCORES)
        seconds = 0.0 if prefilling else prices.at_context(context)[rows]
        step = generation.accept(_NO_ROWS, best=best, seconds=seconds)
        if not prefilling:
            yield took, SimulatedStep(rows, context, step)
    generation.close()
