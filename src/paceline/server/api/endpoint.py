"""A path that takes JSON and answers with what the model writes, whole or as a stream.

Knows how a request lives: its body, its work, its client's patience. Knows nothing of what the body
says. The rules: a stream begins when there is something to tell, so that an error before has a
status of its own; and work ends as soon as its client has gone, wherever it is.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from paceline.server.api.errors import Refused, refused
from paceline.server.api.sse import KEEPALIVE, Reply
from paceline.server.delivery import Answers, News
from paceline.server.middleware import ClientGone, gone, read_body
from paceline.server.service import Ask, Service
from paceline.server.stream_text import Answer

log = logging.getLogger("paceline.server")

_LONG = 16 * 1024
"""Bytes of a body from which on it is not read in the event loop."""

_FORMS = (b'"tools"', b'"response_format"', b'"structured_outputs"', b'"format"')
"""What else takes long to read: grammars have to be compiled."""


_GONE = Refused("the client has gone", status=499, code="client_gone")
"""What nobody is told; nginx' status for it."""


class Form(Protocol):
    """A request that was understood, and how its answers are written down."""

    @property
    def asks(self) -> Sequence[Ask]:
        """The answers that are wanted."""
        ...

    @property
    def streamed(self) -> bool:
        """Whether they are told as they come."""
        ...

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response that is sent at once."""
        ...

    def opening(self) -> bytes:
        """What a stream begins with."""
        ...

    def news(self, news: News, answers: Sequence[Answer]) -> bytes:
        """What is told of something new; perhaps nothing."""
        ...

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """What a stream ends with."""
        ...

    def failure(self, error: Refused) -> bytes:
        """What it ends with instead when something goes wrong."""
        ...


Read = Callable[[Service, bytes], Form]
"""Understands a body. Raises Refused or PacelineError when it cannot."""

Work = Callable[[bytes, Reply], Awaitable[None]]
"""Answers a body."""


class Endpoint:
    """An ASGI application for one path: reads a body, and has it answered while anybody waits."""

    def __init__(self, service: Service, work: Work) -> None:
        """Answer with `work`."""
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = time.perf_counter()
        reply = Reply(send)
        number = scope.get("state", {}).get("request_id", "")
        try:
            body = await read_body(scope, receive, self._service.settings)
            watcher = asyncio.ensure_future(gone(receive))
            work = asyncio.ensure_future(self._answered(body, reply, number))
            try:
                await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self._service.watch.refused(_GONE)
            finally:
                for task in (watcher, work):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        except Refused as error:
            self._service.watch.refused(error)
            await reply.refuse(error)
        except ClientGone:
            pass
        seconds = time.perf_counter() - started
        log.info("%s %s %s %.3f s", number, scope["path"], reply.status or "gone", seconds)

    async def _answered(self, body: bytes, reply: Reply, number: str) -> None:
        try:
            await self._work(body, reply)
        except Exception as error:
            told = refused(error)
            self._service.watch.refused(told)
            if told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                report(number, error)
            if reply.status is None:
                await reply.refuse(told)


def generating(service: Service, read: Read, *, templated: bool = False) -> Endpoint:
    """An endpoint whose answers the model writes.

    `templated` bodies are rendered with the model's chat template, which may take as long as its
    limit allows: never in the event loop.
    """

    async def work(body: bytes, reply: Reply) -> None:
        if len(body) > _LONG or any(name in body for name in _FORMS):
            form = await service.apart(read, service, body)
        elif templated:
            form = await service.apart(read, service, body, short=True)
        else:
            form = read(service, body)
        with Answers(service, form.asks) as answers:
            if form.streamed:
                await _stream(form, answers, reply, service)
            else:
                await reply.json(form.whole(await answers.finish()))

    return Endpoint(service, work)


async def _stream(form: Form, answers: Answers, reply: Reply, service: Service) -> None:
    patience = service.settings.keepalive_seconds
    news = await answers.some(patience)
    await reply.open_stream()
    told = form.opening()
    try:
        while True:
            told += b"".join(form.news(each, answers.all) for each in news)
            if told or not news:
                await reply.write(told or KEEPALIVE)
            told = b""
            if not answers.open:
                break
            news = await answers.some(patience)
        end = form.closing(answers.all)
    except Exception as error:
        failure = refused(error)
        service.watch.refused(failure)
        if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            report("a stream", error)
        end = form.failure(failure)
    await reply.write(end, more=False)


def report(number: str, error: Exception) -> None:
    """Put a fault of ours into the log: where it was, not what it says, which may be a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{frame.name} ({frame.lineno})" for frame in reversed(frames))
    log.error("%s failed: %s in %s", number, type(error).__name__, where)
