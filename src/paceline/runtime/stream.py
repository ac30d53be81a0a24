"""One answer as it is made: blocks to the engine, rows to the generation, time accounted for.

The clock is here: `decoding` has none. Every second of a step is put down to drafting, to the
engine's call, or to picking and text.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import Self

from paceline.decoding.generation import Generation, Step
from paceline.decoding.logprobs import TokenLogprob
from paceline.decoding.reasoning import Thoughts
from paceline.decoding.types import Block, FinishReason, Policy
from paceline.drafters import Probe
from paceline.engines.base import Engine, KVSequence, StepResult
from paceline.runtime.result import Result, Stats


class Stream:
    """Iterate for `Step`s, each with its new `tokens` and `text`; then read `result`.

    To leave early, `close()` (or a `with` block): the answer so far is the result.
    """

    def __init__(
        self,
        engine: Engine,
        slots: KVSequence,
        generation: Generation,
        result: partial[Result],
        *,
        started: float,
        load_seconds: float,
        probes: Sequence[Probe],
        end: Callable[["Stream"], None],
        thoughts: Thoughts | None = None,
    ) -> None:
        """Drive `generation` on `slots`.

        `result` has what can be said before anything ran. `started` is when the request came
        (`perf_counter`); `end` is called once, when it has ended in any way. `thoughts` is how
        `generation` tells thoughts from the answer.

        """
        self._engine = engine
        self._slots = slots
        self._generation = generation
        self._make_result = result
        self._probes = probes
        self._end = end
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._stats = Stats(load_seconds=load_seconds, cached_tokens=slots.length)
        self._started = self._began = self._drafted = started
        self._result: Result | None = None
        self.thoughts = thoughts
        """How the model's thoughts are told apart; None: all of the text is the answer."""
        self.failed = False
        """Whether an error ended it."""
        self._steps = self._run()

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self._generation.tokens

    @property
    def answer(self) -> list[int]:
        """The answer's tokens so far."""
        return self._generation.answer

    @property
    def slots(self) -> KVSequence:
        """The engine's slots for it."""
        return self._slots

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self._generation.finished

    @property
    def count(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self._generation.count

    @property
    def prefilling(self) -> bool:
        """Whether its next block is a part of the prompt."""
        return self._generation.prefilling

    @property
    def recomputing(self) -> bool:
        """Whether its next block computes rows again, after `restart`."""
        return self._generation.recomputing

    def restart(self, slots: KVSequence) -> None:
        """Go on in `slots`, which hold a prefix of the prompt: see `Generation.restart`."""
        self._generation.restart(slots.length)
        self._slots = slots
        self._stats.preempted += 1

    @property
    def policy(self) -> Policy:
        """Who says how much is drafted."""
        return self._generation.policy

    @property
    def stats(self) -> Stats:
        """Where the time has gone so far; what is counted is there when it has ended."""
        return self._stats

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """How likely the answer's tokens so far were, where that was asked for."""
        return self._generation.logprobs

    @property
    def result(self) -> Result:
        """The finished answer.

        Raises:
            RuntimeError: it has not ended; iterate to its end, or close it.

        """
        if self._result is None:
            raise RuntimeError("the answer has not ended: iterate to its end, or close the stream")
        return self._result

    def close(self) -> None:
        """End here; the answer so far is the result. Nothing happens when it has ended."""
        self._steps.close()
        self._finish()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        return next(self._steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        finally:
            self._finish()

    def _step(self) -> Step:
        """One block through the engine; none where no slot is free: the answer has ended then."""
        fitting = blocks_that_fit(self._engine, [self])
        if not fitting:
            before = len(self._reasoning)
            text = self.end(FinishReason.LENGTH)
            return Step(0, (), text, reasoning="".join(self._reasoning[before:]))
        rows = self._engine.step([(self._slots, block) for _, block in fitting])
        return self.accept(rows, 0)

    def end(self, reason: FinishReason) -> str:
        """End here for a reason of the caller's; returns the text that was held back."""
        text = self._generation.cancel(reason)
        self._text.append(text)
        self._finish()
        return text

    def next_block(self, most: int | None = None) -> Block:
        """What to run next; see `Generation.next_block`. For those who run streams themselves."""
        self._began = perf_counter()
        block = self._generation.next_block(most)
        self._drafted = perf_counter()
        return block

    def accept(self, rows: StepResult, place: int) -> Step:
        """Take this stream's rows of a call, and put the step's time down."""
        stats = self._stats
        verified = perf_counter()
        prefilling, recomputing = self._generation.prefilling, self._generation.recomputing
        taken = verified - self._began
        step = self._generation.accept(
            rows.logits[place],
            best=rows.best[place] if rows.best else None,
            taps=rows.taps[place],
            seconds=taken,
        )
        self._slots.commit(step.kept)
        ended = perf_counter()
        for part, seconds in rows.parts.items():
            stats.parts[part] = stats.parts.get(part, 0.0) + seconds
        if recomputing:
            stats.recomputed += step.kept
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
        if step.tokens:
            self._text.append(step.text)
            self._reasoning.append(step.reasoning)
        if self._generation.finished:
            self._finish()
        return step

    def _finish(self) -> None:
        """Make the result and let go of what was held; only the first call does anything."""
        if self._result is not None:
            return
        generation, stats = self._generation, self._stats
        self._text.append(generation.cancel())
        self._reasoning.append(generation.thought())
        stats.steps = generation.counters.steps
        stats.drafted = generation.counters.drafted
        stats.accepted = generation.counters.accepted
        stats.forced = generation.counters.forced
        stats.drafted_by = generation.counters.drafted_by
        stats.accepted_by = generation.counters.accepted_by
        stats.drafted_at = generation.counters.drafted_at
        stats.accepted_at = generation.counters.accepted_at
        if self._probes:
            stats.probe = {probe.watched: probe.count(self.tokens) for probe in self._probes}
        generation.close()
        assert generation.finish_reason is not None
        self._result = self._make_result(
            text="".join(self._text),
            token_ids=generation.answer,
            finish_reason=generation.finish_reason,
            stats=stats,
            prompt_tokens=generation.prompt_length,
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            reasoning="".join(self._reasoning),
            reasoning_tokens=generation.thought_tokens,
        )
        self._end(self)


def blocks_that_fit(engine: Engine, streams: Sequence[Stream]) -> list[tuple[Stream, Block]]:
    """The next block of every stream that has slots for one row or more, cut to what fits.

    All of them together fit, so that their call is not refused.
    """
    free, size = engine.free_slots, engine.block_size
    found = []
    for stream in streams:
        own = stream.slots.unused
        if own + free < 1:
            continue
        block = stream.next_block(own + free)
        free -= max(-(-(len(block.tokens) - own) // size) * size, 0)
        found.append((stream, block))
    return found


def run_together(streams: Sequence[Stream]) -> None:
    """Run streams of one model to their ends, all that go on in one call at a time.

    The time of a call is put down whole to each of its streams.
    """
    going = [stream for stream in streams if not stream.finished]
    for _ in as_they_end(iter(going), at_once=len(going)):
        pass


def as_they_end(
    streams: Iterator[Stream],
    at_once: int,
    watch: Callable[[Stream], None] = lambda _: None,
) -> Generator[Stream, None, None]:
    """Run streams of one model, `at_once` in each call; yields each when it has ended.

    A stream without a free slot waits until others have ended. Where all wait, the newest one ends
    with `length`. `streams` is asked for the next one when there is room for it, so what it opens
    lazily is open no sooner. `watch` sees a stream after each of its steps, and may close it.
    """
    going: list[Stream] = []
    try:
        while True:
            going += islice(streams, at_once - len(going))
            if not going:
                return
            fitting = blocks_that_fit(going[0]._engine, going)
            if not fitting:
                going[-1].end(FinishReason.LENGTH)
            else:
                rows = going[0]._engine.step([(stream.slots, block) for stream, block in fitting])
            for place, (stream, _) in enumerate(fitting):
                stream.accept(rows, place)
                watch(stream)
            ended = [stream for stream in going if stream.finished]
            going = [stream for stream in going if not stream.finished]
            yield from ended
    finally:
        for stream in going:
            stream.close()
