"""POST endpoints: a JSON body in, a reply or a stream of the model's answers out.

Independent of the body's content. Invariants: a stream starts with its first event, so an earlier
error has its own status; and the work for a request ends as soon as its client disconnects.
"""

import asyncio
import logging
import secrets
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from time import monotonic
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from paceline.constraints.matcher_process import Caller
from paceline.decoding.types import Piece
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.stream import AsyncStream
from paceline.server.body import GenerationBody
from paceline.server.errors import ApiError, api_error
from paceline.server.http import (
    DONE,
    KEEPALIVE,
    ClientGone,
    Reply,
    client_of,
    disconnected,
    event,
    read_body,
)
from paceline.server.json_body import parse
from paceline.server.metrics import telemetry, usage
from paceline.server.service import Lane, Service
from paceline.server.settings import Settings
from paceline.server.stream_text import Answer, Answers, Delta

log = logging.getLogger("paceline.server")

_GRAMMAR_SECONDS = 10.0
"""Time limit until a request's grammars are compiled, including waits for other requests."""

_PROGRESS_SECONDS = 1.0
"""Interval of progress events for a client that waits for a long prefill."""

_GONE = ApiError("the client is gone", status=499, code="client_gone")
"""Used only in the metrics; nginx has this status."""


_B = TypeVar("_B", bound=GenerationBody)


class ApiRequest(ABC, Generic[_B]):
    """A parsed request, and the serialization of its answers: OpenAI's chunks by default."""

    body_kind: type[_B]
    templated: ClassVar[bool] = True
    """True if the prompt is rendered with the chat template, which may be slow."""
    kind: ClassVar[str]
    """The field `object` of a response."""
    chunk_kind: ClassVar[str]
    """The field `object` of a chunk."""
    id_prefix: ClassVar[str]
    keepalive: ClassVar[bytes] = KEEPALIVE
    """Data sent by a stream while there is nothing new."""
    requests: Sequence[BatchRequest]
    """The answers to compute: `body.n` for each prompt, in the order of the prompts."""
    _predicted = False
    """True if the request has a prediction."""

    def __init__(self, service: Service, body: _B, client: int) -> None:
        """Raise ApiError or PacelineError if a body cannot be served; `client` is a key number."""
        self._service, self._body, self._client = service, body, client
        self.streamed = body.stream
        self._base: dict[str, Any] = {
            "id": f"{self.id_prefix}{secrets.token_hex(12)}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._sent = set[int]()  # answers that have sent a chunk
        self.answers: Sequence[Answer] = ()
        """The growing answers, once they are submitted."""

    @property
    def prompts(self) -> list[list[int]]:
        return [request.tokens for request in self.requests[:: self._body.n]]

    def compile(self, caller: Caller) -> None:
        """Compile the constraints, which may take seconds.

        Raises InvalidRequest; also Busy if other requests take too long, or the caller leaves.
        """
        grammars = self._service.grammars.for_caller(caller)
        self.requests = [request.compiled(grammars) for request in self.requests]

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """Return the complete response."""

    def stream_start(self) -> bytes:
        """Return the events before the first delta."""
        return b""

    @abstractmethod
    def delta_events(self, delta: Delta) -> bytes:
        """Return the events for a delta, possibly none."""

    def stream_end(self) -> bytes:
        """Return the events after the last delta."""
        if not self._body.stream_options.include_usage:
            return DONE
        return event(self._complete_response([])) + DONE

    def error_events(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        return event(error.body) + DONE

    def _complete_response(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        response = {**self._base, "choices": choices, "usage": self._usage(), **more}
        return {**response, **self._telemetry()}

    def _chunk(self, choice: dict[str, Any], *, last: bool, **more: Any) -> bytes:
        """Return an event with one choice; `last`: it ends that choice."""
        body = self._body
        self._sent.add(choice["index"])
        if body.speculation.pieces:
            choice["speculation"] = self.answers[choice["index"]].speculation
        chunk: dict[str, Any] = {**self._base, "choices": [choice], **more}
        if body.stream_options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif body.stream_options.include_usage:
            chunk["usage"] = None
        elif last and all(answer.result is not None for answer in self.answers):
            chunk |= self._telemetry()
        return event(chunk)

    def _token_fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the fields of a choice that list its tokens."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [piece.token for piece in pieces]
        if self._body.speculation.pieces:
            fields["pieces"] = [{"text": shown.text, "source": shown.source} for shown in pieces]
        return fields

    def _lists_tokens(self, pieces: Sequence[Piece], *, logprobs: bool) -> bool:
        """Return whether a chunk is sent for tokens without text."""
        body = self._body
        return bool(pieces) and (body.return_token_ids or logprobs or body.speculation.pieces)

    def _usage(self) -> dict[str, Any]:
        counts = [len(tokens) for tokens in self.prompts]
        return usage(counts, self.answers, predicted=self._predicted)

    def _telemetry(self) -> dict[str, Any]:
        body = self._body
        ignored = {"ignored_tools": body.ignored_tools, "ignored_items": body.ignored_items}
        more = {name: listed for name, listed in ignored.items() if listed}
        return {**telemetry(self.answers, steps=body.speculation.pieces), **more}


Work = Callable[[bytes, Reply], Awaitable[None]]
"""Replies to a body."""


class Host(Protocol):
    """The interface that endpoints need from the served models."""

    settings: Settings

    def on_error(self, error: ApiError) -> None:
        """Handle the error of a request, which may be in its stream or a client that left."""
        ...


class Endpoint:
    """An ASGI application for one path: reads a body, and replies while the client waits."""

    def __init__(self, host: Host, work: Work) -> None:
        self._host = host
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, scope)
        request_id = scope.get("state", {}).get("request_id", "")
        try:
            body = await read_body(scope, receive, self._host.settings)
            watcher = asyncio.ensure_future(disconnected(receive))
            work = asyncio.ensure_future(self._reply(body, reply, request_id))
            try:
                await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self._host.on_error(_GONE)
            finally:
                for task in (watcher, work):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        except ApiError as error:
            self._host.on_error(error)
            await reply.error(error)
        except ClientGone:
            pass

    async def _reply(self, body: bytes, reply: Reply, request_id: str) -> None:
        try:
            await self._work(body, reply)
        except Exception as caught:
            error = observed(self._host, caught, request_id)
            if reply.status is None:
                await reply.error(error)


def generation(service: Service, kind: type[ApiRequest[Any]]) -> Endpoint:
    """Create the endpoint for one kind of `ApiRequest`."""

    async def work(body: bytes, reply: Reply) -> None:
        def read() -> ApiRequest[Any]:
            return kind(service, parse(kind.body_kind, body), client_of(reply.scope))

        lane = Lane.for_body(body)
        is_quick = lane is Lane.SHORT and not kind.templated
        request = read() if is_quick else await service.readers.run(lane, read)
        if any(one.constraint for one in request.requests):
            with Caller(_GRAMMAR_SECONDS) as caller:  # the caller leaves with its client
                await service.readers.run(Lane.GRAMMAR, request.compile, caller)
        on_answer = service.metrics.on_answer
        with Answers(service.scheduler, request.requests, on_answer) as answers:
            request.answers = answers.all
            if request.streamed:
                await _stream(request, answers, reply, service)
            else:
                await answers.finish()
                await reply.json(request.response())

    return Endpoint(service, work)


def reading(service: Service, read: Callable[[bytes], Any]) -> Endpoint:
    """Create an endpoint without generation: it replies with the result of `read`, in a thread."""

    async def work(body: bytes, reply: Reply) -> None:
        await reply.json(await service.readers.run(Lane.for_body(body), read, body))

    return Endpoint(service, work)


async def result_of(service: Service, request: BatchRequest) -> Any:
    """Run a request that is not an answer; return its result. Raises its error."""
    return await AsyncStream(service.scheduler.submit, lambda: request).finish()


async def _stream(
    request: ApiRequest[Any], answers: Answers, reply: Reply, service: Service
) -> None:
    keepalive = service.settings.keepalive_seconds
    written, prefilled = monotonic(), answers.prefilled
    start = request.stream_start()
    try:
        while answers.unfinished:
            deltas = await answers.deltas(min(_PROGRESS_SECONDS, keepalive))
            events = b"".join(map(request.delta_events, deltas))
            if not deltas and answers.prefilled > prefilled:
                prefilled = answers.prefilled
                events = b": prefill %d/%d\n" % (prefilled, sum(map(len, request.prompts)))
            elif not deltas and monotonic() - written >= keepalive:
                events = request.keepalive
            if events:
                await reply.open_stream()
                await reply.write(start + events)
                start, written = b"", monotonic()
        end = request.stream_end()
    except Exception as error:
        if reply.status is None:
            raise
        end = request.error_events(observed(service, error, "a stream"))
    await reply.write(end, more=False)


def observed(host: Host, error: Exception, request_id: str) -> ApiError:
    """Return the reply for an error and count the error; log it if the server is at fault.

    The log has the error's type and place, but not its message, which may contain a prompt.
    """
    reply = api_error(error)
    host.on_error(reply)
    if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{frame.name} ({frame.lineno})" for frame in reversed(frames))
        log.error("%s failed: %s in %s", request_id, type(error).__name__, where)
    return reply
