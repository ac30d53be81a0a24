"""Handles of requests: a stream to iterate, one for coroutines, and the results of many.

The engine's thread puts events into a handle's queue; the caller takes them out. So Ctrl-C and the
end of a reader never touch the engine: they cancel the request.
"""

import asyncio
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Self, cast

from paceline.decoding.types import FinishReason, Step, TokenLogprob
from paceline.errors import InvalidRequest
from paceline.runtime.answer import Answer
from paceline.runtime.batching.request import BatchRequest, Draining, Event, Listener
from paceline.runtime.request import Request
from paceline.runtime.result import Result, Stats
from paceline.system.processes import use_native_threads

Submit = Callable[[BatchRequest, Listener], BatchRequest]

MAX_UNREAD = 8
"""Unread steps of a stream that pause its request, so that memory stays bounded."""

_MAX_AHEAD = 128
"""Requests of a list that are submitted at once: waiting ones replace those that end."""

_POLL_SECONDS = 0.5
"""On Windows, Ctrl-C cannot interrupt a wait, only the pause between two."""


class _Handle:
    """A request, and its result once it was read."""

    def __init__(self) -> None:
        self._queued: BatchRequest | None = None
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def result(self) -> Result:
        """The finished answer. Raises RuntimeError before its end, and the error if it failed."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RuntimeError("the answer has not ended: iterate to its end, or close the stream")
        return self._result

    def __repr__(self) -> str:
        count = 0 if self._queued is None else self._queued.count - len(self._queued.tokens)
        return f"<{type(self).__name__}: {self._result or f'{count} tokens so far'}>"

    def __del__(self) -> None:
        if (queued := getattr(self, "_queued", None)) is not None and not queued.ended:
            queued.cancel()

    @property
    def finished(self) -> bool:
        """True if the last event was read."""
        return self._result is not None or self._error is not None

    def _take(self, event: Event) -> Step | None:
        """Return a step, or None after the end, when the result is stored. Raises an error."""
        if isinstance(event, Step):
            return event
        if isinstance(event, Exception):
            self._error = event
            raise event
        self._result = cast("Result", event)  # or the result of another job
        return None


class Stream(_Handle):
    """Iterate for `Step`s, each with its new `tokens` and `text`; then read `result`.

    The answer is computed while its steps are read, and pauses when too many are unread. To leave
    early, `close()` (or use a `with` block): the answer so far is the result.
    """

    def __init__(
        self,
        queued: BatchRequest,
        submit: Submit,
        on_end: Callable[[Result], None] = lambda _: None,
    ) -> None:
        """Submit a request; `on_end` gets its result when it is read. Raises as `submit` does."""
        super().__init__()
        events, end = SimpleQueue[Event](), list[Event]()
        self._events, self._end, self._on_end = events, end, on_end

        def listen(event: Event) -> None:  # in the engine's thread; it must not refer to the stream
            if not isinstance(event, Step):
                end.append(event)
            events.put(event)

        queued.is_paused = lambda: events.qsize() >= MAX_UNREAD
        self._queued: BatchRequest = queued  # first: Ctrl-C may end `submit` after its work
        submit(queued, listen)

    @property
    def request(self) -> Request:
        """The checked options."""
        return self._queued.request

    @property
    def tokens(self) -> list[int]:
        """The token ids of the prompt, and of the answer so far, unread steps included."""
        job = self._queued.job
        return [*self._queued.tokens] if job is None else job.tokens

    @property
    def answer(self) -> list[int]:
        """The token ids of the answer so far."""
        return self.tokens[len(self._queued.tokens) :]

    @property
    def stats(self) -> Stats:
        """The statistics so far."""
        job = self._queued.job
        return job.stats if isinstance(job, Answer) else Stats()

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The logprobs of the answer so far, if they were requested."""
        job = self._queued.job
        return job.generation.logprobs if isinstance(job, Answer) else []

    def close(self) -> None:
        """End the answer; its text so far is the result. After the end this does nothing."""
        if not self.finished:
            self._queued.cancel()
        with suppress(Exception):  # `result` raises it
            for _ in self:
                pass

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        try:
            if not self.finished and (step := self._take(self._next_event())) is not None:
                return step
        except KeyboardInterrupt:
            self._queued.cancel()  # the remaining events can still be read
            raise
        if self._result is not None:
            self._on_end(self._result)
            self._on_end = lambda _: None  # only now: Ctrl-C may end the call
        raise StopIteration

    def _next_event(self) -> Event:
        use_native_threads()
        while True:
            with suppress(Empty):
                event = self._events.get(timeout=_POLL_SECONDS)
                if self._events.qsize() == MAX_UNREAD - 1:
                    self._queued.wake()
                return event
            if self._end:  # another thread took it, or Ctrl-C came after it was taken
                return self._end[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Handle):
    """An answer for one coroutine: `async for` its steps, then read `result`.

    To leave early, `await aclose()`, or an `async with` block.
    """

    def __init__(self, submit: Submit, make: Callable[[], BatchRequest]) -> None:
        """Submit the result of `make` at the first step; it runs in a thread, as it may be slow."""
        super().__init__()
        self._submit, self._make = submit, make
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._has_started = self._has_left = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if not self._has_started:
            await self._start()
        if not self.finished and (step := self._take(await self._events.get())) is not None:
            if self._queued is not None and self._events.qsize() == MAX_UNREAD - 1:
                self._queued.wake()
            return step
        raise StopAsyncIteration

    async def finish(self) -> Result:
        """Wait for the end; if the caller is cancelled, the answer ends."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def _start(self) -> None:
        self._has_started = True
        loop, events = asyncio.get_running_loop(), self._events

        def listen(event: Event) -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:  # in a thread, which outlives a cancelled waiter, and the loop
            try:
                queued = self._make()
                queued.is_paused = lambda: events.qsize() >= MAX_UNREAD
                self._queued = self._submit(queued, listen)
            except Exception as error:
                self._error = error  # there will be no event
                raise
            if self._has_left:
                self._queued.cancel()

        try:
            await asyncio.to_thread(submit)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the answer here."""
        self._has_left = True
        if self._queued is not None:
            self._queued.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def results_of(
    submit: Submit,
    requests: Iterator[BatchRequest],
    noun: str | None,
    max_running: int = _MAX_AHEAD,
) -> Generator[tuple[int, Any], None, None]:
    """Run requests together; yield each one's number, from 0, and its result when it has ended.

    At most `max_running` are taken before one has ended. An error of one, or closing the generator,
    ends all of them. The error for a prompt that is too long has its number, after `noun`.
    """
    events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    queued: dict[int, BatchRequest] = {}

    def listen(number: int, event: Event) -> None:
        if not isinstance(event, Step):
            events.put((number, event))

    numbered = enumerate(requests)
    try:
        while True:
            for number, request in islice(numbered, max_running - len(queued)):
                queued[number] = request  # first: Ctrl-C may end `submit` after its work
                try:
                    submit(request, partial(listen, number))
                except InvalidRequest as error:
                    if noun is None:
                        raise
                    raise InvalidRequest(f"{noun} {number}: {error}") from error
            if not queued:
                return
            use_native_threads()
            try:
                number, event = events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            del queued[number]
            reason = event.finish_reason if isinstance(event, Result) else None
            if reason is FinishReason.CANCELLED:
                raise Draining("the model was closed before all answers had ended")
            if isinstance(event, Exception):
                raise event
            yield number, event
    finally:
        for unfinished in queued.values():
            unfinished.cancel()
