"""Errors on the wire: a status, and the error object of OpenAI or Anthropic.

Invariants: a client error is a 4xx whose message names the fix; a server fault is a 5xx, and an
unexpected error reveals only its type.
"""

from collections.abc import Container, Mapping
from http import HTTPStatus
from typing import Any

from paceline.errors import Busy, CacheFull, InvalidRequest, MissingExtra, ModelError
from paceline.options import Options
from paceline.runtime.batching.request import Draining, QueueFull, TimedOut

_RETRY_AFTER = {"retry-after": "1"}
"""Seconds until a client may retry."""


class ApiError(Exception):
    """An error reply: its status and OpenAI's error object."""

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
        """Describe an error.

        `kind` is the object's `type`, `param` the invalid field (`messages[0].role`); `more` has
        further fields of the object.
        """
        super().__init__(message)
        self.status = int(status)
        self.headers = dict(headers or {})
        self.fields: dict[str, Any] = {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            **(more or {}),
        }

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply, in OpenAI's format."""
        return {"error": self.fields}

    def body_for(self, path: str, headers: Container[str] = ()) -> dict[str, Any]:
        """Return the body of the reply to a request, in the format of the API of `path`."""
        if not is_anthropic(path, headers):
            return self.body
        message, param = self.fields["message"], self.fields["param"]
        if param is not None and param not in message:
            message = f"{param}: {message}"
        if "n_prompt_tokens" in self.fields:  # Claude Code compacts its session at these words
            count, limit = self.fields["n_prompt_tokens"], self.fields["n_ctx"]
            message = f"prompt is too long: {count} tokens > {limit - 1} maximum"
        failed = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        other = "api_error" if failed else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": message}}


def is_anthropic(path: str, headers: Container[str] = ()) -> bool:
    """Return whether a path, or lower-case `headers`, belong to Anthropic's API.

    The list of models has the same path in both APIs.
    """
    first = path.removeprefix("/v1").partition("/")[2].partition("/")[0]
    return first == "messages" or "anthropic-version" in headers


def field_error(field: str, fault: object) -> ApiError:
    """Return the error for the value of a body's field, which its message names first."""
    return ApiError(f"{field}: {fault}", param=field)


def prompt_too_long(count: int, limit: int, *, at_least: bool = False) -> ApiError:
    """Return the error for a prompt of (`at_least`) `count` tokens; `limit` includes the answer."""
    return ApiError(
        f"this model's maximum context length is {limit} tokens, the answer included, and the "
        f"prompt has {'at least ' if at_least else ''}{count}; shorten the prompt",
        code="context_length_exceeded",
        more={"n_prompt_tokens": count, "n_ctx": limit},
    )


def unknown_model(name: str, served: str) -> ApiError:
    """Return the error for a model that this server does not serve."""
    return ApiError(
        f"the model {name[:80]!r} does not exist; this server has {served!r}",
        status=HTTPStatus.NOT_FOUND,
        param="model",
        code="model_not_found",
    )


def api_error(error: Exception) -> ApiError:
    """Return the reply for any error of a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        first = str(error).partition(" ")[0].rstrip(":")
        is_field = first in Options.__annotations__ or first.startswith("messages[")
        return ApiError(str(error), param=first if is_field else None)
    for kind, (status, name, code) in _SERVER_ERRORS.items():
        if isinstance(error, kind):
            headers = _RETRY_AFTER if code in _RETRYABLE else None
            return ApiError(str(error), status=status, kind=name, code=code, headers=headers)
    return ApiError(
        f"the server failed ({type(error).__name__}); see its log",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        kind="server_error",
    )


_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's type; other client errors are `invalid_request_error`, server errors
`api_error`. From the errors page of its API reference."""

_SERVER_ERRORS: Mapping[type[Exception], tuple[HTTPStatus, str, str]] = {
    QueueFull: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "queue_full"),
    Busy: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "busy"),
    Draining: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "draining"),
    CacheFull: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "cache_full"),
    TimedOut: (HTTPStatus.GATEWAY_TIMEOUT, "timeout_error", "request_timeout"),
    MissingExtra: (HTTPStatus.NOT_IMPLEMENTED, "server_error", "missing_extra"),
    ModelError: (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "model_error"),
}
"""Error -> status, OpenAI's type, and code."""

_RETRYABLE = ("queue_full", "busy", "draining", "cache_full")
