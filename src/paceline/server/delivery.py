"""From the scheduler's thread to a request's coroutine.

Knows the scheduler and the event loop. Knows nothing of how an answer is written down. The rule:
whoever leaves, in any way, leaves no ticket behind. The queue between them has no bound because
answers have one: a slow reader holds up nobody.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from paceline.server.api.errors import Refused
from paceline.server.request import Done, Event, Failed, Progress, Ticket
from paceline.server.service import Ask, Service
from paceline.server.stream_text import Answer, Part


class News(NamedTuple):
    """What is new of one of the answers."""

    place: int
    """Which of them."""
    part: Part
    ended: bool


class Answers:
    """The answers to one request, while it is in the scheduler: use it with `with`."""

    def __init__(self, service: Service, asks: Sequence[Ask]) -> None:
        """Prepare to ask; entering does it."""
        self._service = service
        self._asks = asks
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self.open = len(asks)
        """How many have not ended."""
        stops = service.files.stop_token_ids
        self.all: list[Answer] = [
            Answer(() if ask.request.ignore_eos else stops, ask.silent) for ask in asks
        ]

    def __enter__(self) -> Self:
        """Submit all of it.

        Raises:
            QueueFull: there is no room for all; none was asked for then.
            Draining: the server is ending.
            InvalidRequest: it could never be served.
            Refused: it is more than may wait.
        """
        most = self._service.settings.most_waiting
        if len(self._asks) > most:
            raise Refused(f"{len(self._asks)} answers are more than may wait here ({most})")
        try:
            for index, ask in enumerate(self._asks):
                ticket = self._service.scheduler.submit(
                    ask.tokens,
                    ask.request,
                    partial(self._hear, index),
                    salt=ask.salt,
                    cached=ask.cached,
                    seconds=self._service.settings.request_seconds,
                )
                self._tickets.append(ticket)
        except Exception:
            self._cancel()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()

    async def some(self, seconds: float | None = None) -> list[News]:
        """Whatever is new, as soon as anything is; nothing when `seconds` went by.

        Raises:
            PacelineError: one of the answers failed.
        """
        try:
            async with asyncio.timeout(seconds):
                found = [await self._events.get()]
        except TimeoutError:
            return []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return [self._news(index, event) for index, event in found]

    async def finish(self) -> list[Answer]:
        """All of them, when they have ended. Raises what `some` raises."""
        while self.open:
            await self.some()
        return self.all

    def _news(self, index: int, event: Event) -> News:
        match event:
            case Progress():
                return News(index, self.all[index].progress(event), ended=False)
            case Done():
                part = self.all[index].finish(event.result)
                self.open -= 1
                self._service.watch.answered(self._asks[index], self.all[index])
                return News(index, part, ended=True)
            case Failed():
                self.open -= 1
                raise event.error

    def _hear(self, index: int, event: Event) -> None:
        # In the engine's thread. A loop that has ended has nobody who waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
