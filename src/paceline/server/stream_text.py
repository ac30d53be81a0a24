"""Answers on their way to a client: from events in the engine's thread to deltas of text.

Independent of HTTP. Invariants: sent text is never taken back; a token is sent with its text or
after it; tokens that are not part of the text (of a stop string, or the one that ended the answer)
are not sent; and no request stays in the scheduler once its client is gone.

The queue between the threads is unbounded because answers are bounded: a slow reader delays no
other request.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple, Self

from paceline.decoding.text import Decode, TextStream, unsigned
from paceline.decoding.types import FinishReason, Step, TokenLogprob
from paceline.errors import InvalidRequest
from paceline.runtime.batching.request import BatchRequest, Event
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.embedding import Embedding
from paceline.runtime.result import Result


class Piece(NamedTuple):
    """A token of an answer, and the text that it completed.

    A token of a thought has no text of the answer; its text is in `reasoning`.
    """

    token: int
    text: str
    start: int
    """Offset of the text in the answer, in characters."""
    logprobs: TokenLogprob | None = None
    source: str | None = None
    """The drafter whose draft had the token, or `forced`; None: it was not drafted."""
    reasoning: str = ""
    """The text of a thought that it completed."""

    @property
    def end(self) -> int:
        """Offset of the end of its text."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one of the answers to a request."""

    index: int
    text: str
    pieces: list[Piece]
    reasoning: str = ""
    signed: str = ""
    """`text` with the signs of marks that a token wrote."""
    finished: bool = False


class StepCount(NamedTuple):
    drafted: int
    accepted: int


@dataclass(slots=True)
class Answer:
    stop_token_ids: Collection[int]
    index: int = 0
    prefill_only: bool = False
    text: str = ""
    signed: str = ""
    """`text` with the signs of marks that a token wrote, for the parser of calls."""
    reasoning: str = ""
    """The model's thoughts, if they are separated from the answer."""
    pieces: list[Piece] = field(default_factory=list)
    steps: list[StepCount] = field(default_factory=list)
    result: Result | None = None
    """Once it has ended."""
    submitted: float = field(default_factory=perf_counter)
    _held: deque[Piece] = field(default_factory=deque)
    _decoded: int = 0
    _reasoning_tokens: int = 0
    _started: bool = False
    _stopped: bool = False

    @property
    def done(self) -> Result:
        """The result of an answer that has ended."""
        assert self.result is not None
        return self.result

    @property
    def tokens(self) -> int:
        """How many were sent so far."""
        return len(self.pieces)

    @property
    def reasoning_tokens(self) -> int:
        return min(self._reasoning_tokens, self.tokens)

    @property
    def speculation(self) -> dict[str, int]:
        """Steps after the prompt so far, and their draft tokens."""
        return {
            "steps": len(self.steps),
            "drafted": sum(step.drafted for step in self.steps),
            "accepted": sum(step.accepted for step in self.steps),
        }

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.prefill_only else self.done.finish_reason

    def progress(self, step: Step) -> Delta:
        """Add a step."""
        if self._started:
            self.steps.append(StepCount(step.drafted, step.accepted))
        self._started = True
        if self.prefill_only:
            return Delta(self.index, "", [])
        self._reasoning_tokens = step.reasoning_tokens
        new = enumerate(zip_longest(step.tokens, step.pieces, step.logprobs))
        for place, (token, piece, logprobs) in new:
            if token in self.stop_token_ids:
                self._stopped = True
                self._extend(piece.text, piece.reasoning)
                break
            source = step.source if place < step.matched else None
            text, reasoning = unsigned(piece.text), unsigned(piece.reasoning)
            self._held.append(Piece(token, text, self._decoded, logprobs, source, reasoning))
            self._decoded += len(text)
        pieces = self._complete(len(self.text) + len(unsigned(step.text)))
        return self._append(step.text, pieces, step.reasoning)

    def finish(self, result: Result) -> Delta:
        """Add the end."""
        self.result = result
        if self.prefill_only:
            return Delta(self.index, "", [], finished=True)
        text = unsigned(result.text)
        length = len(text)
        self._extend(text[self._decoded :], "")  # text held back until the end
        cut = result.finish_reason == FinishReason.STOP and not self._stopped
        pieces = []
        while self._held and not (cut and self._held[0].start >= length):
            piece = self._held.popleft()
            pieces.append(piece._replace(text=piece.text[: max(length - piece.start, 0)]))
        self._held.clear()
        reasoning = unsigned(result.reasoning)[len(self.reasoning) :]
        delta = self._append(result.text[len(self.signed) :], pieces, reasoning)
        return replace(delta, finished=True)

    def _extend(self, text: str, reasoning: str) -> None:
        """Add text without a token of its own to the last token that is not sent yet."""
        if self._held:
            last, text = self._held.pop(), unsigned(text)
            reasoning = last.reasoning + unsigned(reasoning)
            self._held.append(last._replace(text=last.text + text, reasoning=reasoning))
            self._decoded += len(text)

    def _complete(self, sent: int) -> list[Piece]:
        """Take the held tokens whose text is sent, up to the last one with any text."""
        complete = 0
        for place, piece in enumerate(self._held, 1):
            if piece.end > sent:
                break
            if piece.text or piece.reasoning:
                complete = place
        return [self._held.popleft() for _ in range(complete)]

    def _append(self, signed: str, pieces: list[Piece], reasoning: str) -> Delta:
        text, reasoning = unsigned(signed), unsigned(reasoning)
        self.text += text
        self.signed += signed
        self.reasoning += reasoning
        self.pieces += pieces
        return Delta(self.index, text, pieces, reasoning, signed)


class Answers:
    """The answers to one HTTP request; on exit none of it stays in the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[BatchRequest],
        on_answer: Callable[[BatchRequest, Answer], None],
    ) -> None:
        """Prepare; entering submits the requests. `on_answer` gets each answer that has ended."""
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
            QueueFull: the queue has no room for all of them; none is submitted.
            Draining: the server is shutting down.
            InvalidRequest: one can never be served, or there are more than the queue may hold.
        """
        limit = self._scheduler.max_waiting
        if len(self._requests) > limit:
            raise InvalidRequest(
                f"{len(self._requests)} answers are more than may wait here ({limit})"
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
        """Tokens of the prompts whose KV is there; the answers to one prompt share its tokens."""
        held: dict[int, int] = {}
        for request in self._requests:
            tokens = request.tokens
            held[id(tokens)] = max(held.get(id(tokens), 0), min(request.held, len(tokens)))
        return sum(held.values())

    async def deltas(self, seconds: float | None = None) -> list[Delta]:
        """The next deltas, as soon as there are any; none after `seconds`.

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
        """Wait until all answers have ended. Raises what `deltas` raises."""
        while self.unfinished:
            await self.deltas()

    def _delta(self, index: int, event: Event) -> Delta:
        match event:
            case Step():
                return self.all[index].progress(event)
            case Result():
                delta = self.all[index].finish(event)
                self.unfinished -= 1
                self._on_answer(self._requests[index], self.all[index])
                return delta
            case Exception():
                self.unfinished -= 1
                raise event
            case Embedding():
                raise AssertionError("an answer is no embedding")

    def _deliver(self, index: int, event: Event) -> None:
        """Pass an event from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()


def prompt_pieces(decode: Decode, tokens: list[int]) -> list[Piece]:
    """A prompt's tokens, each with its text."""
    stream = TextStream(decode)
    pieces: list[Piece] = []
    start = 0
    for place, token in enumerate(tokens):
        text = stream.push(token).text
        if place == len(tokens) - 1:
            text += stream.finish().text
        pieces.append(Piece(token, text, start))
        start += len(text)
    return pieces
