"""Responses that a later request continues, in memory, evicted by least recent use.

Independent of the model. Invariants: the stored responses take at most about `_MAX_BYTES`; and a
client can read only responses stored with its own API key.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from threading import Lock
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.body import Message
from paceline.server.errors import ApiError
from paceline.server.http import client_of, to_json

_MAX_RESPONSES = 1000
_MAX_BYTES = 64 * 2**20
"""Limit for all stored conversations; texts that several share count for each."""

_MESSAGE_BYTES = 2000
"""Memory of a message without its texts."""


class StoredResponse(NamedTuple):
    response: dict[str, Any]
    messages: tuple[Message, ...]
    """The conversation, with the answer and without instructions."""
    size: int
    """Approximate memory in bytes."""


class ResponseStore:
    """The stored responses of one server. Thread-safe. `client` is the number of an API key."""

    def __init__(self) -> None:
        self._stored: OrderedDict[tuple[int, str], StoredResponse] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def add(self, client: int, response: dict[str, Any], messages: Sequence[Message]) -> None:
        """Store a response; the least recently used ones may be evicted for it."""
        size = len(to_json(response)) + sum(map(_size, messages))
        stored = StoredResponse(response, tuple(messages), size)
        with self._lock:
            self._stored[client, response["id"]] = stored
            self._size += stored.size
            while self._size > _MAX_BYTES or len(self._stored) > _MAX_RESPONSES:
                _, old = self._stored.popitem(last=False)
                self._size -= old.size

    def messages(self, client: int, name: str) -> tuple[Message, ...]:
        """Return the conversation of a response. Raises ApiError if it is not stored."""
        with self._lock:
            stored = self._stored.get((client, name))
            if stored is None:
                raise ApiError(
                    f"response {name[:80]!r} not found: it was not stored, or has expired; "
                    "send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self._stored.move_to_end((client, name))
            return stored.messages

    def item(self, client: int, name: str) -> dict[str, Any] | None:
        with self._lock:
            items = [
                item
                for (owner, _), stored in reversed(self._stored.items())
                for item in stored.response["output"]
                if owner == client and item["id"] == name
            ]
        return items[0] if items else None

    async def reply(self, request: Request) -> Response:
        """Reply to GET with a stored response, and to DELETE without it. Raises ApiError."""
        name = request.path_params["response_id"]
        key = client_of(request.scope), name
        with self._lock:
            stored = self._stored.get(key)
            if stored is None:
                raise ApiError(
                    f"response {name[:80]!r} not found",
                    status=HTTPStatus.NOT_FOUND,
                    param="response_id",
                )
            if request.method != "DELETE":
                return JSONResponse(stored.response)
            del self._stored[key]
            self._size -= stored.size
        return JSONResponse({"id": name, "object": "response", "deleted": True})


def _size(message: Message) -> int:
    texts = [message.content, message.reasoning_content]
    texts += [call.function.arguments for call in message.tool_calls or ()]
    return _MESSAGE_BYTES + sum(sys.getsizeof(text) for text in texts)
