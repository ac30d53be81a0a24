"""What clients are told when something goes wrong: OpenAI's error object and a status.

Knows every error that a request can end with. The rule: a client's mistake is a 4xx that says what
to do, ours is a 5xx, and nothing of ours but its kind is told.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from paceline.errors import CacheFull, InvalidRequest, MissingExtra, ModelError
from paceline.runtime.options import Options
from paceline.server.request import Draining, QueueFull, TimedOut

_LATER = {"retry-after": "1"}
"""Seconds after which a request that found no room may come again."""


class Refused(Exception):
    """A request that gets an error: its status, and the object that says why."""

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Say what went wrong, and which parameter (`messages[0].role`) is to blame.

        `kind` is what OpenAI calls the type. `more` goes into the error object as it is.
        """
        super().__init__(message)
        self.status = int(status)
        self.headers = dict(headers or {})
        self.about: dict[str, Any] = {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            **(more or {}),
        }

    @property
    def body(self) -> dict[str, Any]:
        """The whole answer."""
        return {"error": self.about}


def too_long(count: int, room: int, *, at_least: bool = False) -> Refused:
    """A prompt of `count` tokens, or `at_least` so many, where there is room for `room`.

    The answer's are among those that there is room for.
    """
    return Refused(
        f"this model's maximum context length is {room} tokens, the answer included, and the "
        f"prompt has {'at least ' if at_least else ''}{count}; shorten the prompt",
        code="context_length_exceeded",
        more={"n_prompt_tokens": count, "n_ctx": room},
    )


def unknown_model(name: str, known: str) -> Refused:
    """A model that is not served here."""
    return Refused(
        f"the model {name!r} does not exist here; this server has {known!r}",
        status=HTTPStatus.NOT_FOUND,
        param="model",
        code="model_not_found",
    )


def refused(error: Exception) -> Refused:
    """What a client is told of an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InvalidRequest):
        first = str(error).partition(" ")[0]
        return Refused(str(error), param=first if first in Options.__annotations__ else None)
    for kind, (status, name, code) in _OURS.items():
        if isinstance(error, kind):
            headers = _LATER if code in _PASSING else None
            return Refused(str(error), status=status, kind=name, code=code, headers=headers)
    return Refused(
        f"the server failed ({type(error).__name__}); its log says where",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        kind="server_error",
    )


_OURS: Mapping[type[Exception], tuple[HTTPStatus, str, str]] = {
    QueueFull: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "queue_full"),
    Draining: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "draining"),
    CacheFull: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "cache_full"),
    TimedOut: (HTTPStatus.GATEWAY_TIMEOUT, "timeout_error", "request_timeout"),
    MissingExtra: (HTTPStatus.NOT_IMPLEMENTED, "server_error", "missing_extra"),
    ModelError: (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "model_error"),
}
"""Error -> its status, OpenAI's type of it, and a code."""

_PASSING = ("queue_full", "draining", "cache_full")
"""Those after which one may come again."""
