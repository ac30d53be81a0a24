"""HTTP of an endpoint: the JSON body of a request, and a reply as JSON or server-sent events.

Independent of the content. Invariant: the status is sent once; a later error can only be part of
the stream.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from paceline.server.errors import ApiError
from paceline.server.settings import Settings

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Clients that read events with Python's `splitlines` (httpx, for one) end lines there, too."""

_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)


class ClientGone(Exception):
    """The client has closed the connection."""


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """The body of a request that sends JSON.

    Raises:
        ApiError: it is not JSON, too large, or too slow.
        ClientGone: the client has closed the connection.
    """
    headers = Headers(scope=scope)
    # This also blocks pages of other origins: a browser sends this type only after a preflight.
    if not _JSON.fullmatch(headers.get("content-type", "")):
        raise ApiError(
            "the body should be JSON, and the Content-Type application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > settings.body_bytes:
        raise _too_large(settings)
    found = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                found += message.get("body", b"")
                if len(found) > settings.body_bytes:
                    raise _too_large(settings)
                if not message.get("more_body"):
                    return bytes(found)
    except TimeoutError:
        raise ApiError(
            f"the body was not complete after {settings.body_seconds:g} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
            kind="timeout_error",
        ) from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(settings: Settings) -> ApiError:
    return ApiError(
        f"the body is larger than {settings.body_bytes} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="body_too_large",
    )


def to_json(value: Any) -> bytes:
    """A value as JSON on one line, whatever a client takes for the end of a line.

    Other non-ASCII text is escaped only if it is not valid Unicode.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.translate(_LINE_ENDS).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class Reply:
    """The reply to one request."""

    def __init__(self, send: Send, scope: Scope) -> None:
        """Start with nothing sent; the request decides the form of errors."""
        self._send = send
        self.scope = scope
        """The request."""
        self.status: int | None = None
        """The status that was sent; None: none yet."""

    async def json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a complete reply."""
        body = to_json(value)
        length = {"content-length": str(len(body))}
        await self.start(status, "application/json", {**length, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        """Send an error as a complete reply."""
        body = error.body_for(self.scope["path"], Headers(scope=self.scope))
        await self.json(body, error.status, error.headers)

    async def open_stream(self) -> None:
        """Send the head of a stream, if it was not sent before."""
        if self.status is None:
            # Proxies would otherwise buffer events.
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self.start(200, "text/event-stream; charset=utf-8", headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of a stream; waits while the client does not read."""
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
