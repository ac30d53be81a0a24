"""HTTP of every request: its id, Host, key and JSON body, and a reply.

A reply is JSON or server-sent events. Independent of paths and of the content; plain ASGI, so that
an endpoint detects at once when its client disconnects. Invariants: a request that the middleware
rejects costs next to nothing; and the status is sent once, so a later error must be in the stream.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.errors import ApiError
from paceline.server.settings import Settings, encode_keys

log = logging.getLogger("paceline.server")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n"

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Clients that read events with Python's `splitlines`, such as httpx, also end lines there."""

_LOGGED_CHARACTERS = 200
"""Characters per path."""

_DRAIN_SECONDS = 5.0
"""Time limit for reading the rest of a body after an error was sent."""

_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)


class ClientGone(Exception):
    """The client has closed the connection."""


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """Read the body of a request that sends JSON.

    Raises:
        ApiError: it is not JSON, too large, or too slow.
        ClientGone: the client has closed the connection.
    """
    headers = Headers(scope=scope)
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(
            f"the body has the Content-Encoding {coding[:40]!r}; send it as it is",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    # This also blocks pages of other origins: a browser sends this type only after a preflight.
    if not _JSON.fullmatch(headers.get("content-type", "")):
        raise ApiError(
            "the body should be JSON, and the Content-Type application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > settings.body_bytes:
        raise _too_large(settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > settings.body_bytes:
                    raise _too_large(settings)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(
            f"the body was not complete after {settings.body_seconds:g} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
            kind="timeout_error",
        ) from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client, whose body was read, closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(settings: Settings) -> ApiError:
    return ApiError(
        f"the body is larger than {settings.body_bytes} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="body_too_large",
    )


def to_json(value: Any) -> bytes:
    """Return a value as JSON on one line, whatever a client treats as the end of a line.

    Other non-ASCII text is escaped only if it is not valid Unicode.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.translate(_LINE_ENDS).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class Reply:
    def __init__(self, send: Send, scope: Scope) -> None:
        """Start with nothing sent; the request determines the format of errors."""
        self._send = send
        self.scope = scope
        """The request."""
        self.status: int | None = None
        """The status that was sent; None if none was."""

    async def json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = to_json(value)
        length = {"content-length": str(len(body))}
        await self.start(status, "application/json", {**length, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        body = error.body_for(self.scope["path"], Headers(scope=self.scope))
        await self.json(body, error.status, error.headers)

    async def open_stream(self) -> None:
        """Send the head of a stream, unless it was sent before."""
        if self.status is None:
            # Proxies would otherwise buffer events.
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self.start(200, "text/event-stream; charset=utf-8", headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of a stream; wait while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def start(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        """Send the head of a reply; `kind` is its content type."""
        self.status = status
        pairs = [("content-type", kind), *headers.items()]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs],
            }
        )


_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Valid request ids of clients."""

CLIENT_HEADER = "x-paceline-client"
"""From a router to a model's server: the number of the client's key."""

OnError = Callable[[ApiError], None]
"""Called with the error of every rejected request."""


class HostMiddleware:
    """Gives every request an id and a line in the log, and rejects those with an unknown Host.

    A web page whose name resolves to this machine (DNS rebinding) still sends its own name in Host.
    """

    def __init__(self, app: ASGIApp, settings: Settings, on_error: OnError) -> None:
        self._app = app
        self._on_error = on_error
        hosts = {host.lower() for host in settings.hosts or "*"}
        self._hosts = None if "*" in hosts else hosts
        self._root = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = sent if _ID.fullmatch(sent) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id

        started, status = time.perf_counter(), 0
        unread = "content-length" in headers or "transfer-encoding" in headers

        async def receive_part() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                status = message["status"]
            elif unread and not message.get("more_body"):
                # Closing now would reset the connection of a client that is still sending, and lose
                # the error that was sent to it.
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        while unread:
                            await receive_part()
            await send(message)

        try:
            if self._hosts is None or host_of(headers.get("host", "")) in self._hosts:
                await self._app(scope, receive_part, send_with_id)
            else:
                self._on_error(_WRONG_HOST)
                await Reply(send_with_id, scope).error(_WRONG_HOST)
        finally:
            _log_request(scope, status, time.perf_counter() - started)


_WRONG_HOST = ApiError(
    "the Host header is not allowed; see --allow-host",
    status=HTTPStatus.FORBIDDEN,
    kind="permission_error",
    code="wrong_host",
)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log a request; `status` is 0 if its client left without a reply.

    Successful GETs, of pages and polls, have level DEBUG.
    """
    quiet = scope["method"] == "GET" and 0 < status < HTTPStatus.BAD_REQUEST
    # The path as sent: a decoded path could contain the end of a line.
    path = scope["raw_path"].decode("ascii", "replace")[:_LOGGED_CHARACTERS]
    log.log(
        logging.DEBUG if quiet else logging.INFO,
        "%s %s %s %.3f s %s",
        scope["method"],
        path,
        status or "gone",
        seconds,
        scope["state"]["request_id"],
    )


class ApiKeyMiddleware:
    """Rejects requests without a valid key, if the server has keys; `client_of` reads the key."""

    def __init__(
        self, app: ASGIApp, settings: Settings, public: Collection[str], on_error: OnError
    ) -> None:
        self._app = app
        self._on_error = on_error
        self._public = frozenset(public)
        self._keys = encode_keys(settings.api_keys)
        self._behind_router = settings.behind_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"] not in self._public:
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            sent = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
            client = self._number(key.strip(" \t").encode("latin-1") for key in sent)
            if client is None:
                error = _WRONG_KEY if any(sent) else _NO_KEY
                self._on_error(error)
                await Reply(send, scope).error(error)
                return
            if self._behind_router:
                client = int(headers.get(CLIENT_HEADER, "0"))
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)

    def _number(self, keys: Iterable[bytes]) -> int | None:
        """Return the number of the first valid key, from 0, or None without one."""
        # Compare with all keys, each in constant time, so that timing reveals nothing.
        valid = [hmac.compare_digest(key, one) for one in keys for key in self._keys]
        return valid.index(True) % len(self._keys) if any(valid) else None


def client_of(scope: Scope) -> int:
    """Return the number of a request's API key, for access to stored data. 0 without keys."""
    client: int = scope.get("state", {}).get("client", 0)
    return client


def _unauthorised(message: str) -> ApiError:
    return ApiError(
        message,
        status=HTTPStatus.UNAUTHORIZED,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


_NO_KEY = _unauthorised("this server requires an API key, as a Bearer token or in X-Api-Key")
_WRONG_KEY = _unauthorised("the API key is not valid")


def host_of(header: str) -> str:
    """Return the lower-case name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
