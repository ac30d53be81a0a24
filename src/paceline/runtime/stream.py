"""The one loop, and an answer as it is made: its blocks, its rows, and where its time goes.

A single stream and the scheduler's requests all go through `run_step`: blocks of streams into a
call of the engine, rows of the result to each stream. Only `bench simulate` has no engine, and
drives `decoding.Generation` itself.

The clock is here; `decoding` has none. Each second of a step is counted as drafting, as the
engine's call, or as sampling.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Self

from paceline.decoding.generation import Generation
from paceline.decoding.reasoning import answer_text
from paceline.decoding.text import TextPiece, showing
from paceline.decoding.types import Block, FinishReason, Step, TokenLogprob
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.engines.exact import Compared
from paceline.errors import InvalidRequest
from paceline.runtime.pooled import PooledStream
from paceline.runtime.request import Request, RequestDrafters
from paceline.runtime.result import Result, Stats

if TYPE_CHECKING:
    from paceline import Model


class Stream:
    """Iterate for `Step`s, each with its new `tokens` and `text`; then read `result`.

    To leave early, `close()` (or a `with` block): the answer so far is the result.
    """

    def __init__(
        self,
        model: "Model",
        tokens: Sequence[int],
        request: Request,
        sequence: KVSequence,
        drafters: RequestDrafters,
        *,
        started: float,
        exactness: Callable[[], Mapping[str, Compared] | None],
        on_end: Sequence[Callable[["Stream"], None]] = (),
    ) -> None:
        """Answer `tokens`; `Model._open_stream`, which says what the arguments are, makes streams.

        At the end `exactness` is called for `Result.exactness`, then each of `on_end` in its order.
        Raises InvalidRequest if the prompt fills the context, or an option is of an unknown token.
        """
        self.request, self.drafters = request, drafters
        self.failed = False  # whether an error ended the answer
        self.engine, self.sequence, self.lock = model.engine, sequence, model.lock
        self.policy = drafters.policy
        self.stats = Stats(load_seconds=model.load_seconds, cached_tokens=sequence.length)
        self._model, self._costs = model.files.name, model.costs
        self._exactness, self._on_end = exactness, on_end
        self._block_length = 0
        self._text: list[TextPiece] = []
        self._started = self._began = self._drafted = started
        self._result: Result | None = None
        self._steps = self._run()
        stopping = request.stopping(model.files.stop_token_ids)
        decode = model.files.tokenizer.continuation
        text = answer_text(showing(decode, request.shown), stopping.stop, request.thoughts)
        try:
            self._generation = Generation(
                tokens,
                vocab_size=self.engine.vocab_size,
                context_length=self.engine.context_length,
                sampling=request.sampling,
                stopping=stopping,
                drafters=[*drafters.probes, *drafters.asked],
                policy=drafters.policy,
                decode=decode,
                cached=sequence.length,
                constraint=request.constraint,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                name=model._token_bytes.name,
                text=text,
                counters=self.stats,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self._generation.tokens

    @property
    def answer(self) -> list[int]:
        return self._generation.answer

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Of the answer's tokens so far, if they were asked for."""
        return self._generation.logprobs

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self._generation.finished

    @property
    def count(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self._generation.token_count

    @property
    def prefilling(self) -> bool:
        """Whether the next block is part of the prompt."""
        return self._generation.prefilling

    @property
    def recomputing(self) -> bool:
        """Whether the next block computes rows again, after `restart`."""
        return self._generation.recomputing

    def restart(self, sequence: KVSequence) -> None:
        """Go on in another sequence, which holds a prefix of the prompt."""
        self._generation.restart(sequence.length)
        self.sequence = sequence
        self.stats.preempted += 1

    @property
    def result(self) -> Result:
        """The finished answer. Raises RuntimeError if it has not ended."""
        if self._result is None:
            raise RuntimeError("the answer has not ended: iterate to its end, or close the stream")
        return self._result

    def close(self) -> None:
        """End here; the answer so far is the result. After the end it does nothing."""
        with self.lock:
            self._steps.close()
            self._finish()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        with self.lock:
            try:
                return next(self._steps)
            except BaseException:
                self._finish()
                raise

    def __repr__(self) -> str:
        state = self._result or f"{len(self.answer)} tokens so far"
        return f"<Stream of {self._model}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[Step, None, None]:
        try:
            while not self._generation.finished:
                step = self._step()
                if step.tokens or step.text or step.reasoning:
                    yield step
        except Exception:
            self.failed = True
            raise
        finally:  # perhaps in a finalizer
            self.lock.run_soon(self._finish)

    def _step(self) -> Step:
        """Run one block; without a free slot the answer ends."""
        room = self.sequence.unused + self.engine.free_slots
        if room < 1:
            piece = self._generation.cancel(FinishReason.LENGTH)
            self._text.append(piece)
            self._finish()
            return Step(0, (), [piece])
        (step,) = run_step(self.engine, [(self, self.next_block(room))])
        if isinstance(step, Exception):
            raise step
        return step

    def next_block(self, max_rows: int | None = None) -> Block:
        self._began = perf_counter()
        block = self._generation.next_block(max_rows)
        self._drafted = perf_counter()
        self._block_length = len(block.tokens)
        return block

    def accept(self, rows: StepResult, place: int) -> Step:
        """Accept this stream's rows of a call, and count the step's time."""
        stats = self.stats
        verified = perf_counter()
        prefilling, recomputing = self._generation.prefilling, self._generation.recomputing
        taken = verified - self._began
        step = self._generation.accept(
            rows.logits[place],
            best=rows.best[place] if rows.best else None,
            taps=rows.taps[place],
            seconds=taken,
        )
        context = self.sequence.length
        self.sequence.commit(step.accepted_rows)
        ended = perf_counter()
        for part, seconds in rows.parts.items():
            stats.parts[part] = stats.parts.get(part, 0.0) + seconds
        if recomputing:
            stats.recomputed += step.accepted_rows
            stats.recompute_seconds += ended - self._began
        elif prefilling:
            stats.prefill_seconds += ended - self._began
            if step.tokens:
                stats.first_token_seconds = ended - self._started
        else:
            stats.decode_seconds += ended - self._began
            stats.draft_seconds += self._drafted - self._began
            stats.verify_seconds += rows.seconds
            stats.sample_seconds += ended - verified
            stats.decoded += len(step.tokens)
            if len(rows.logits) == 1:
                self._costs.observe(self._block_length, context, rows.seconds)
        self._text += step.pieces
        return step

    def finish(self) -> None:
        """Make the result if the answer has ended. This may run the engine, to measure it."""
        if self._generation.finished:
            self._finish()

    def _finish(self) -> None:
        """Make the result and release what was held; only the first call does anything."""
        if self._result is None:
            with self.lock:
                self._make_result()

    def _make_result(self) -> None:
        generation, stats = self._generation, self.stats
        self._text.append(generation.cancel())
        if probes := self.drafters.probes:
            stats.probe = {probe.watched: probe.count(self.tokens) for probe in probes}
        generation.close()
        assert generation.finish_reason is not None
        exactness = None if self.failed else self._exactness()
        self._result = Result(
            text="".join(piece.final for piece in self._text),
            token_ids=generation.answer,
            finish_reason=generation.finish_reason,
            stopped_by=generation.stopped_by,
            stats=stats,
            prompt_tokens=generation.prompt_length,
            model=self._model,
            engine=self.engine.name,
            drafter=str(self.request.drafter),
            policy=self.request.policy,
            exact=self.engine.min_rows > 1
            and generation.prompt_length + len(generation.answer) <= self.engine.compared_keys
            and exactness is not None
            and all(compared.holds for compared in exactness.values()),
            seed=self.request.sampling.seed,
            settings=self.request.settings,
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            reasoning="".join(piece.reasoning for piece in self._text),
            reasoning_tokens=generation.reasoning_tokens,
            exactness=exactness or {},
        )
        for call in self._on_end:
            call(self)


Work = tuple[Stream | PooledStream, Block]
"""An answer or an embedding, and its next block."""


def run_step(
    engine: Engine,
    work: Sequence[Work],
    observe: Callable[[StepResult], None] = lambda _: None,
) -> list[Step | Exception]:
    """Run a block of each stream in one call of the engine, and accept the rows of each.

    Every answer is made by this function. Invariant: the engine does not run again before all rows
    are accepted, as they are views of its memory.

    Args:
        engine: that of all the streams.
        work: streams, each with its next block.
        observe: called with the engine's result before rows are accepted.

    Returns:
        The step of each stream, in the order of `work`, or the error that accepting its rows or
        making its result raised: one stream's error is not the others'.

    Raises:
        CacheFull: there are no slots for the blocks; nothing was run.
    """
    result = engine.step([(stream.sequence, block) for stream, block in work])
    observe(result)
    steps: list[Step | Exception] = []
    for place, (stream, _) in enumerate(work):
        try:
            steps.append(stream.accept(result, place))
        except Exception as error:
            steps.append(error)
    for place, (stream, _) in enumerate(work):
        if isinstance(steps[place], Step):
            try:
                stream.finish()
            except Exception as error:
                steps[place] = error
    return steps
