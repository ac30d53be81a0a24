"""Answers on the wire: a JSON object at once, or server-sent events one by one.

Knows ASGI's messages. Knows nothing of what is said. The rule: a status is sent once, and after it
an error can only be part of what is told.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from paceline.server.api.errors import Refused

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


def encoded(value: Any) -> bytes:
    """A value as JSON; text stays readable where it is valid Unicode."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(value) + b"\n\n"


class Reply:
    """The reply to one request."""

    def __init__(self, send: Send) -> None:
        """Nothing is sent yet."""
        self._send = send
        self.status: int | None = None
        """What was sent; None: nothing yet."""

    async def json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send all of it."""
        body = encoded(value)
        length = {"content-length": str(len(body))}
        await self._start(status, "application/json", {**length, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: Refused) -> None:
        """Send an error."""
        await self.json(error.body, error.status, error.headers)

    async def open_stream(self) -> None:
        """Send the head of a stream, unless it was sent."""
        if self.status is None:
            # Proxies would otherwise keep events back.
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, "text/event-stream; charset=utf-8", headers)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of a stream; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.status = status
        pairs = [("content-type", kind), *headers.items()]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs],
            }
        )
