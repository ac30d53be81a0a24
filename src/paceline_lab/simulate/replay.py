"""Replays recorded texts through drafters and policies, without the model.

The recorded text replaces the engine: it has the token sampled at each row. All else is the code of
real requests: `decoding.Generation`, the drafters, the policies. A table has the cost of passes.

    recorded  the, cat, sat, on, a
    block     [the, cat, sat, by]    the last token and a draft of three
    picks      cat, sat, on,  a      the recorded token after every row, in place of the model's
    kept       cat, sat, on          two draft tokens accepted, then the bonus token

Invariant: the steps equal, one for one, those of a real request with the same options over the same
tokens. There are two exceptions: drafters that need a model cannot be simulated, and Kelly's rule,
which reads the clock, gets the table's seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np

from paceline import drafters as drafting
from paceline.decoding.auto import Acceptance
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Generation, Rules, Speculation, Target
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Best, Counters, Drafter, Policy, Step
from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DrafterSpec,
    KeptText,
    RequestContext,
    Table,
)
from paceline.drafters.kept import due
from paceline.drafters.table import KIND as TABLE
from paceline.drafters.table import TableFacts
from paceline.engines.costs import MAX_ROWS
from paceline.errors import InvalidRequest
from paceline.models import Progress, resolve_drafter
from paceline.options import Options
from paceline.runtime.request import Request
from paceline.runtime.request import check as check_options
from paceline.storage.manifest import read_manifest

_CONTEXT_BIN = 64
"""Tokens of context over which costs count as equal."""

CallCosts = Callable[[int], Sequence[float]]

_ANY_TOKEN = 1 << 62
_NO_ROWS = np.empty((0, 0), np.float32)
_NO_SCORES = np.empty(0, np.float32)

_ALONE = ("none", "ngram", "suffix", "table", "kept", "prediction")
"""Drafters that need only the tokens."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and its recorded answer: token ids, neither of them empty."""

    id: str
    kind: str
    prompt: Sequence[int]
    answer: Sequence[int]
    max_tokens: int | None = None
    """Limit of an answer that ended before it: its last token is a stop token. None: the answer
    reached its limit."""
    prediction: Sequence[int] = ()
    """Expected answer, for the drafter `prediction`."""

    @property
    def ended_by(self) -> int | None:
        """The stop token that ended the answer, if there is one."""
        if (
            self.max_tokens is None
            or self.max_tokens <= len(self.answer)
            or self.answer[-1] in self.answer[:-1]
        ):
            return None
        return self.answer[-1]


class SimulatedStep(NamedTuple):
    rows: int
    """Rows of the forward pass."""
    context: int
    """Tokens in the KV cache before it."""
    step: Step


@dataclass(slots=True)
class Simulation:
    """One recording with one drafter and policy."""

    recording: Recording
    counters: Counters
    seconds: float
    """Cost of its forward passes after prefill, by the table."""
    plain_seconds: float
    """The same cost for plain decoding."""
    draft_seconds: float
    """Time of drafters and policy in this process. `seconds` excludes it, because it is tiny and
    differs between runs."""

    @property
    def decoded(self) -> int:
        """The number of tokens after the first, which is from prefill."""
        return len(self.recording.answer) - 1

    @property
    def speed_up(self) -> float:
        """The speed over plain decoding by the table; 1.0 without forward passes."""
        return self.plain_seconds / self.seconds if self.decoded else 1.0


def simulate(
    recordings: Sequence[Recording],
    request: Request,
    cost: CostTable,
    shared: DrafterResources,
    *,
    carry: bool = False,
    watch: Callable[[int], None] = lambda _: None,
) -> Iterator[Simulation]:
    """Replay all recordings.

    Args:
        recordings: prompts and answers.
        request: drafter, policy and block; the rest is ignored.
        cost: seconds of a forward pass by rows.
        shared: resources of the drafters; its history of answers is cleared.
        carry: the recordings are requests of one process: they learn from earlier ones, and the
            drafter `kept` drafts from their answers; otherwise each one is the first.
        watch: called with the number of answer tokens that are done.

    Raises:
        InvalidRequest: there is no such drafter, or it cannot be simulated.
        ModelError: a drafter cannot be read.
    """
    check(request.drafter, shared)
    acceptance = Acceptance()
    shared.history = AnswerHistory()
    costs = costs_by_context(cost)
    done = counted = 0
    kept: KeptText | None = None
    for at, recording in enumerate(recordings):
        expected = bool(recording.prediction)
        spec = request.drafter.resolve(shared.shipped, prediction=expected)
        context = RequestContext(
            prediction=recording.prediction, prompt_length=len(recording.prompt), kept=kept
        )
        acceptance = acceptance.discounted() if carry else Acceptance()
        policy = request.policy_for(lambda: cost, acceptance, len(recording.prompt))
        yield _replay(recording, drafting.create(spec, shared, context), policy, costs)
        if carry and spec.uses_earlier_answers:
            shared.history.add(recording.answer)
        done += len(recording.answer)
        if carry and spec.has("kept") and due(done, counted):
            answers = [earlier.answer for earlier in recordings[: at + 1]]
            counted, kept = done, KeptText.count(answers, 1 + max(map(max, answers)))
        watch(done)


def drafter_resources(
    model: str, options: Mapping[str, Options], progress: Progress
) -> DrafterResources:
    """Return resources for the drafters of these contenders, which must not need the model.

    A table's vocabulary is not checked: only the model's name is available.

    Raises:
        InvalidRequest: there is no such drafter, or it cannot be simulated.
        ModelError: a drafter cannot be read.
    """
    shared = DrafterResources(
        target=model,
        shipped=drafting.shipped(model),
        find=lambda name: resolve_drafter(name, progress),
    )
    for settings in options.values():
        spec = check_options(settings).drafter
        check(spec, shared)
        for part in spec.resolve(shared.shipped).parts:
            if part.kind != "table" or part.name in shared.tables:
                continue
            folder = shared.find(part.name) if part.name else shared.shipped.get(part.kind)
            if folder is not None:
                size = read_manifest(folder, TABLE, TableFacts).vocab_size
                shared.tables[part.name] = Table.open(folder, size)
    return shared


def check(spec: DrafterSpec, shared: DrafterResources) -> None:
    """Raise InvalidRequest if a drafter of `spec` needs a model; the message gives the reason."""
    for part in spec.resolve(shared.shipped).parts:
        if part.kind not in _ALONE:
            raise InvalidRequest(
                f"drafter {part.kind} cannot be simulated: it needs a model's hidden states or "
                f"calls, which a text lacks; expected {', '.join(_ALONE)}"
            )


def costs_by_context(cost: CostTable) -> CallCosts:
    """Return a function: context -> seconds of a forward pass by rows; index 0 is unused."""

    @cache
    def of_bin(number: int) -> list[float]:
        return cost.at_context(number * _CONTEXT_BIN + _CONTEXT_BIN // 2).by_rows(MAX_ROWS)

    return lambda context: of_bin(context // _CONTEXT_BIN)


def _replay(
    recording: Recording, drafters: Sequence[Drafter], policy: Policy, costs: CallCosts
) -> Simulation:
    generation = _generation(recording, drafters, policy)
    seconds = plain = drafting_took = 0.0
    for took, (rows, context, step) in _steps(generation, recording, costs):
        by_rows = costs(context)
        seconds += by_rows[rows]
        plain += by_rows[1] * len(step.tokens)
        drafting_took += took
    return Simulation(recording, generation.counters, seconds, plain, drafting_took)


def _generation(recording: Recording, drafters: Sequence[Drafter], policy: Policy) -> Generation:
    ended_by = recording.ended_by
    limit = recording.max_tokens
    if ended_by is None or limit is None:
        limit = len(recording.answer)
    ends = frozenset() if ended_by is None else frozenset([ended_by])
    return Generation(
        recording.prompt,
        Target(
            vocab_size=_ANY_TOKEN,
            context_length=len(recording.prompt) + limit,
            decode=lambda _: "",
            prefill_chunk=len(recording.prompt),
        ),
        Rules(stopping=Stopping(stop_token_ids=ends)),
        Speculation(policy, drafters),
    )


def _steps(
    generation: Generation, recording: Recording, costs: CallCosts
) -> Iterator[tuple[float, SimulatedStep]]:
    """Yield (seconds that drafting took, step) of every step after prefill."""
    # Tokens after the end are arbitrary: none of them is read.
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
        seconds = 0.0 if prefilling else costs(context)[rows]
        step = generation.accept(_NO_ROWS, best=best, seconds=seconds)
        if not prefilling:
            yield took, SimulatedStep(rows, context, step)
    generation.close()
