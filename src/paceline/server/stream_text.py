"""Converts events of the engine's thread to text deltas for a client.

Independent of HTTP. Invariants: sent text is never taken back; a token is sent with its text or
after it; tokens that are not part of the text (of a stop string, or the one that ended the answer)
are not sent; and no request stays in the scheduler once its client disconnects.

The queue between the threads is unbounded because answers are bounded: a slow reader delays no
other request.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Self

from paceline.decoding.text import unsigned
from paceline.decoding.types import FinishReason, Piece, Step
from paceline.errors import InvalidRequest
from paceline.runtime.batching.request import BatchRequest, Event
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.result import Result


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one of the answers to a request."""

    index: int
    text: str = ""
    """Text with a sign before tags that a token wrote (`decoding/text.py`), for the call parser."""
    pieces: Sequence[Piece] = ()
    """The tokens whose text is now sent."""
    reasoning: str = ""
    finished: bool = False


@dataclass(slots=True)
class Answer:
    stop_token_ids: Collection[int]
    index: int = 0
    prefill_only: bool = False
    text: str = ""
    """Text with signs, as in `Delta.text`."""
    reasoning: str = ""
    """The model's reasoning, if it is separated from the answer."""
    pieces: list[Piece] = field(default_factory=list)
    """The tokens that were sent."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Draft tokens of each step after the prompt, and the number accepted."""
    result: Result | None = None
    """The result, once the answer has ended."""
    submitted: float = field(default_factory=perf_counter)
    _held: list[Piece] = field(default_factory=list)
    _ahead: int = 0  # characters of held tokens that were sent
    _reasoning_tokens: int = 0
    _started: bool = False
    _stopped: bool = False

    @property
    def done(self) -> Result:
        """The result of an answer that has ended."""
        assert self.result is not None
        return self.result

    @property
    def complete(self) -> Delta:
        """All text and tokens of an answer that has ended."""
        return Delta(self.index, self.text, self.pieces, self.reasoning, finished=True)

    @property
    def tokens(self) -> int:
        """The number of tokens sent so far."""
        return len(self.pieces)

    @property
    def reasoning_tokens(self) -> int:
        return min(self._reasoning_tokens, self.tokens)

    @property
    def speculation(self) -> dict[str, int]:
        """Steps after the prompt so far, and their draft tokens."""
        return {
            "steps": len(self.steps),
            "drafted": sum(drafted for drafted, _ in self.steps),
            "accepted": sum(accepted for _, accepted in self.steps),
        }

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.prefill_only else self.done.finish_reason

    def progress(self, step: Step) -> Delta:
        if self._started:
            self.steps.append((step.drafted, step.accepted))
        self._started = True
        if self.prefill_only:
            return Delta(self.index)
        self._reasoning_tokens = step.reasoning_tokens
        for piece in step.pieces:
            if piece.token in self.stop_token_ids:
                self._stopped = True
                self._extend(piece.text, piece.reasoning)
                break
            self._held.append(piece)
        return self._delta(step.text, step.reasoning)

    def finish(self, result: Result) -> Delta:
        self.result = result
        if self.prefill_only:
            return Delta(self.index, finished=True)
        text = result.text[len(self.text) :]
        final = self._ahead + len(unsigned(text))
        if (lacking := final - sum(len(piece.text) for piece in self._held)) > 0:
            self._extend(unsigned(text)[-lacking:])  # text held back until the end
        cut = result.finish_reason == FinishReason.STOP and not self._stopped  # by a stop string
        held, start = self._held, 0
        self._held = []
        for piece in held:
            if cut and start >= final:
                break
            self._held.append(piece._replace(text=piece.text[: max(final - start, 0)]))
            start += len(piece.text)
        return self._delta(text, result.reasoning[len(self.reasoning) :], finished=True)

    def _extend(self, text: str, reasoning: str = "") -> None:
        """Add text without its own token to the last token that was not sent yet."""
        if self._held:
            self._held[-1] = self._held[-1].extended(text, reasoning=reasoning)

    def _delta(self, text: str, reasoning: str, *, finished: bool = False) -> Delta:
        """Send text, and the held tokens whose text is sent, up to the last one with any text."""
        self._ahead += len(unsigned(text))
        end, complete, ahead = 0, 0, self._ahead
        for place, piece in enumerate(self._held, 1):
            end += len(piece.text)
            if end > self._ahead and not finished:
                break
            if piece.text or piece.reasoning or finished:
                complete, ahead = place, self._ahead - end
        pieces, self._held = self._held[:complete], self._held[complete:]
        self._ahead = ahead
        self.text += text
        self.reasoning += reasoning
        self.pieces += pieces
        return Delta(self.index, text, pieces, reasoning, finished)


class Answers:
    """The answers to one HTTP request; on exit, all of them leave the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[BatchRequest],
        on_answer: Callable[[BatchRequest, Answer], None],
    ) -> None:
        """Prepare; entering submits the requests. `on_answer` receives each completed answer."""
        self._scheduler, self._on_answer = scheduler, on_answer
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.unfinished = len(requests)
        self.all = [
            Answer(
                () if request.request.ignore_eos else request.model.files.stop_token_ids,
                index,
                request.prefill_only,
            )
            for index, request in enumerate(requests)
        ]

    def __enter__(self) -> Self:
        """Submit all requests.

        Raises:
            QueueFull: the queue does not have room for all of them; none is submitted.
            Draining: the server is shutting down.
            InvalidRequest: one can never be served, or their number exceeds the queue's capacity.
        """
        limit = self._scheduler.max_waiting
        if len(self._requests) > limit:
            raise InvalidRequest(
                f"{len(self._requests)} answers exceed the limit of waiting ones ({limit})"
            )
        try:
            for index, request in enumerate(self._requests):
                listener = partial(self._deliver, index)
                self._scheduler.submit(request, listener)
        except Exception:
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    @property
    def prefilled(self) -> int:
        """The number of prompt tokens with KV; all answers to a prompt share its tokens."""
        held: dict[int, int] = {}
        for request in self._requests:
            tokens = request.tokens
            held[id(tokens)] = max(held.get(id(tokens), 0), min(request.slots, len(tokens)))
        return sum(held.values())

    async def deltas(self, seconds: float | None = None) -> list[Delta]:
        """Return the next deltas, as soon as there are any; none after `seconds`.

        Raises PacelineError if one of the answers failed.
        """
        try:
            async with asyncio.timeout(seconds):
                events = [await self._events.get()]
        except TimeoutError:
            return []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return [self._delta(index, event) for index, event in events]

    async def finish(self) -> None:
        """Wait until all answers have ended. Raises the errors of `deltas`."""
        while self.unfinished:
            await self.deltas()

    def _delta(self, index: int, event: Event) -> Delta:
        if isinstance(event, Step):
            return self.all[index].progress(event)
        self.unfinished -= 1
        if isinstance(event, Exception):
            raise event
        assert isinstance(event, Result)
        delta = self.all[index].finish(event)
        self._on_answer(self._requests[index], self.all[index])
        return delta

    def _deliver(self, index: int, event: Event) -> None:
        """Pass an event from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()
