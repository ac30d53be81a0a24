"""An answer in progress, and the step that all answers share: blocks in, rows out.

`Scheduler` drives everything through `run_step`: the next block of each running job goes into one
forward pass, and each job accepts its rows. Only `bench simulate` has no engine; it drives
`decoding.Generation` itself.

This module reads the clock; `decoding` does not. Each second of a step is counted as drafting, as
the engine's forward pass, or as sampling.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from paceline.decoding.generation import Generation, Speculation
from paceline.decoding.types import Block, Piece, Step
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.engines.exact import BATCH, BLOCK_LENGTH, CHUNKED_PREFILL, PREFIX_CACHE, RowComparison
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.request import Request, RequestDrafters
from paceline.runtime.result import Result

if TYPE_CHECKING:
    from paceline import Model


class PrefillJob(ABC):
    """A job that computes only rows of prompts, and starts over after a preemption."""

    policy = None  # nothing is drafted
    recomputing = shared = failed = False

    def __init__(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Compute rows after `tokens`, or after a prefix of them that the sequence has."""
        self.sequence = sequence
        self.tokens = list(tokens)
        self.result: Any = None

    @property
    def count(self) -> int:
        return max(len(self.tokens), self.sequence.length)

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def prefilling(self) -> bool:
        return not self.finished

    def restart(self, sequence: KVSequence) -> None:
        raise RuntimeError("the job starts over")  # all its blocks are prefill

    @abstractmethod
    def next_block(self, max_rows: int | None = None) -> Block: ...

    @abstractmethod
    def accept(self, rows: StepResult, place: int) -> Step: ...

    def finish(self) -> None:
        return

    def close(self) -> None:
        return


class AnswerRequest(Protocol):
    """The parts of the scheduler's request that an answer needs."""

    model: "Model"
    tokens: list[int]  # the prompt
    request: Request
    started: float  # `perf_counter`

    def empty_result(self) -> Result: ...


class Answer:
    """One answer: its generation, its KV sequence, and its times."""

    def __init__(
        self,
        queued: AnswerRequest,
        sequence: KVSequence,
        drafters: RequestDrafters,
        make_room: Callable[[], None],
    ) -> None:
        """Answer a request; see `Model._open_answer`."""
        self._model, self.request, self.drafters = queued.model, queued.request, drafters
        self._empty = queued.empty_result()  # not `queued` itself, which refers to its answer
        self.engine, self.sequence = self._model.engine, sequence
        self.policy = drafters.policy
        self.cached = sequence.length > 0
        self.chunked = False
        self.shared = False
        """True if a forward pass also had other sequences."""
        self.failed = False
        """True if an error ended it."""
        self.stats = replace(self._empty.stats, cached_tokens=sequence.length)
        self.result: Result | None = None
        """The result after `close`."""
        self._make_room = make_room
        self._block_length = 0
        self._text: list[Piece] = []
        self._started = self._began = self._drafted = queued.started
        drafts = [*drafters.probes, *drafters.asked]
        try:
            self.generation = Generation(
                queued.tokens,
                self._model._target,
                self.request.rules(self._model.files.stop_token_ids),
                Speculation(drafters.policy, drafts, self.stats),
                sequence.length,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    @property
    def finished(self) -> bool:
        return self.generation.finished

    @property
    def count(self) -> int:
        return self.generation.token_count

    @property
    def prefilling(self) -> bool:
        """True if the next block is part of the prompt."""
        return self.generation.prefilling

    @property
    def recomputing(self) -> bool:
        """True if the next block computes rows again, after `restart`."""
        return self.generation.recomputing

    def restart(self, sequence: KVSequence) -> None:
        """Continue in another sequence, which holds a prefix of the prompt."""
        self.generation.restart(sequence.length)
        self.sequence = sequence
        self.cached = self.chunked = True
        self.stats.preempted += 1

    def next_block(self, max_rows: int | None = None) -> Block:
        self._began = perf_counter()
        block = self.generation.next_block(max_rows)
        self._drafted = perf_counter()
        self._block_length = len(block.tokens)
        return block

    def accept(self, rows: StepResult, place: int) -> Step:
        """Accept this answer's rows of a forward pass, and count the step's time."""
        stats = self.stats
        verified = perf_counter()
        prefilling, recomputing = self.generation.prefilling, self.generation.recomputing
        taken = verified - self._began
        step = self.generation.accept(
            rows.logits[place],
            best=rows.best[place] if rows.best else None,
            taps=rows.taps[place],
            seconds=taken,
        )
        context = self.sequence.length
        self.chunked |= prefilling and not step.pieces
        self.sequence.commit(step.accepted_rows)
        ended = perf_counter()
        for part, seconds in rows.parts.items():
            stats.parts[part] = stats.parts.get(part, 0.0) + seconds
        if recomputing:
            stats.recomputed += step.accepted_rows
            stats.recompute_seconds += ended - self._began
        elif prefilling:
            stats.prefill_seconds += ended - self._began
            if step.pieces:
                stats.first_token_seconds = ended - self._started
        else:
            stats.decode_seconds += ended - self._began
            stats.draft_seconds += self._drafted - self._began
            stats.verify_seconds += rows.seconds
            stats.sample_seconds += ended - verified
            stats.decoded += len(step.pieces)
            if len(rows.logits) == 1:
                self._model.costs.observe(self._block_length, context, rows.seconds)
        self._text += step.pieces
        return step

    def compare(self, progress: Progress | None = None) -> Mapping[str, RowComparison] | None:
        """Return the comparisons for the conditions so far, measured now where one is missing."""
        conditions = {
            BLOCK_LENGTH: not self.request.drafter.none or self.engine.min_rows < 2,
            PREFIX_CACHE: self.cached,
            CHUNKED_PREFILL: self.chunked,
            BATCH: self.shared,
        }
        names = {name for name, depends in conditions.items() if depends}
        return self._model._exactness.evidence(names, self._make_room, progress)

    def finish(self) -> None:
        """Make the result if the answer has ended. This may run the engine, to measure it."""
        if self.generation.finished:
            self.close()

    def close(self) -> None:
        """End the answer; the output so far is the result. After the end this does nothing."""
        if self.result is not None:
            return
        generation, stats, model = self.generation, self.stats, self._model
        self._text.append(generation.cancel())
        if probes := self.drafters.probes:
            stats.probe = {probe.watched: probe.count(self.tokens) for probe in probes}
        generation.close()
        assert generation.finish_reason is not None
        exactness = None if self.failed else self.compare()
        self.result = replace(
            self._empty,
            text="".join(piece.final for piece in self._text),
            token_ids=generation.answer,
            finish_reason=generation.finish_reason,
            stopped_by=generation.text.stopped_by,
            stats=stats,
            engine=self.engine.name,
            exact=model._exactness.holds(exactness, generation.token_count),
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            reasoning="".join(piece.reasoning for piece in self._text),
            reasoning_tokens=generation.text.reasoning_tokens,
            exactness=exactness or {},
        )
        model.costs.store()
        model.drafting.learn(self)


Job = Answer | PrefillJob
"""A unit of the scheduler's work: an answer, an embedding, or decisions."""

Work = tuple[Job, Block]


def run_step(
    engine: Engine,
    work: Sequence[Work],
    observe: Callable[[StepResult], None] = lambda _: None,
) -> list[Step | Exception]:
    """Run a block of each job in one forward pass, and let each job accept its rows.

    All answers use this function. Invariant: the engine does not run again before all rows are
    accepted, as they are views of its memory.

    Args:
        engine: the engine of all the jobs.
        work: jobs, each with its next block.
        observe: called with the engine's result before rows are accepted.

    Returns:
        The step of each job, in the order of `work`, or the error from accepting its rows or making
        its result: one job's error does not affect the others.

    Raises:
        CacheFull: there are no slots for the blocks; nothing was run.
    """
    result = engine.step([(job.sequence, block) for job, block in work])
    observe(result)
    steps: list[Step | Exception] = []
    for place, (job, _) in enumerate(work):
        job.shared |= len(work) > 1
        try:
            steps.append(job.accept(result, place))
        except Exception as error:
            steps.append(error)
    for place, (job, _) in enumerate(work):
        if isinstance(steps[place], Step):
            try:
                job.finish()
            except Exception as error:
                steps[place] = error
    return steps
