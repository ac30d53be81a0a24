"""Answers of one process in batches: lists of prompts, and requests of coroutines.

A scheduler and its thread exist while there is work. With the last answer the KV cache is as it was
before, so that streams and conversations find its slots. Requests that come meanwhile join.
"""

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self
from weakref import ref

from paceline.decoding.types import Step
from paceline.errors import InvalidRequest
from paceline.runtime.batching.request import BatchRequest, Draining, Event, Listener
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.pooled import Embedding
from paceline.runtime.result import Result

if TYPE_CHECKING:
    from paceline import Model

AT_ONCE = 64  # requests that run
_APART = 8  # where calls are not shared: each call would bring another sequence's KV into its cache
_AHEAD = 2 * AT_ONCE  # requests in the scheduler: the waiting take the places of those that end


class Batches:
    """The batches of one model. Thread-safe."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._scheduler: Scheduler | None = None
        self._guard = threading.Lock()
        # A thread that is in the engine when the process ends would crash it.
        atexit.register(_close, ref(self))

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return self._scheduler is not None and self._scheduler.unfinished > 0

    def submit(self, request: BatchRequest, listener: Listener) -> BatchRequest:
        """Run a request beside the others; see `Scheduler.submit`."""
        with self._guard:
            if self._scheduler is not None:
                with suppress(Draining):  # it ended with its last request
                    return self._scheduler.submit(request, listener)
            with self._model.lock:
                most = AT_ONCE if self._model.engine.shares_calls else _APART
                scheduler = Scheduler(
                    self._model, max_waiting=sys.maxsize, max_running=most, until_idle=True
                )
                queued = scheduler.submit(request, listener)
                scheduler.start()
                self._scheduler = scheduler
            return queued

    def as_they_end(
        self, requests: Iterator[BatchRequest], noun: str | None, at_once: int | None = None
    ) -> Generator[tuple[int, Result | Embedding], None, None]:
        """Run requests together; yield each one's number, from 0, and its result when it has ended.

        At most `at_once` are taken before one has ended. An error of one, or closing the generator,
        ends all of them. The error of one that is too long has its number, after `noun`.
        """
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        queued: dict[int, BatchRequest] = {}

        def listen(number: int, event: Event) -> None:
            if not isinstance(event, Step):
                events.put((number, event))

        numbered = enumerate(requests)
        try:
            while True:
                for number, request in islice(numbered, (at_once or _AHEAD) - len(queued)):
                    try:
                        queued[number] = self.submit(request, partial(listen, number))
                    except InvalidRequest as error:
                        if noun is None:
                            raise
                        raise InvalidRequest(f"{noun} {number}: {error}") from error
                if not queued:
                    return
                number, event = events.get()
                del queued[number]
                if isinstance(event, Exception):
                    raise event
                assert not isinstance(event, Step)
                yield number, event
        finally:
            for unfinished in queued.values():
                unfinished.cancel()

    def close(self) -> None:
        """End all requests, and wait for the call that runs."""
        with self._guard:
            scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.close()


def _close(batches: "ref[Batches]") -> None:
    if (still_there := batches()) is not None:
        still_there.close()


class AsyncStream:
    """An answer as it is made, for one coroutine: `async for` its steps, then read `result`.

    To leave early, `await aclose()`, or an `async with` block.
    """

    def __init__(self, submit: Callable[[Listener], BatchRequest]) -> None:
        """Submit at the first step; `submit` may take a while, and runs in another thread."""
        self._submit = submit
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._queued: BatchRequest | None = None
        self._started = self._left = False
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The finished answer. Raises RuntimeError if it has not ended."""
        if self._result is None:
            raise RuntimeError("the answer has not ended: iterate to its end")
        return self._result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        if not self._started:
            await self._start()
        if self._result is None:
            match await self._events.get():
                case Step() as step:
                    return step
                case Exception() as error:
                    raise error
                case Result() as result:
                    self._result = result
        raise StopAsyncIteration

    async def finish(self) -> Result:
        """Wait for the end; if the caller is cancelled, the answer ends."""
        async with self:
            async for _ in self:
                pass
        return self.result

    async def _start(self) -> None:
        self._started = True
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        def submit() -> None:  # in a thread, which outlives a cancelled waiter, and the loop
            self._queued = self._submit(listen)
            if self._left:
                self._queued.cancel()

        try:
            await asyncio.to_thread(submit)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the answer here."""
        self._left = True
        if self._queued is not None:
            self._queued.cancel()

    def __del__(self) -> None:
        if self._queued is not None:  # a loop was left without `aclose`
            self._queued.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
