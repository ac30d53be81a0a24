"""Middleware: request ids, the check of the Host header, and the check of API keys.

Independent of paths and bodies. Plain ASGI, so that an endpoint sees at once when its client is
gone. Invariant: a rejected request costs next to nothing.
"""

import hmac
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.api.http import Reply
from paceline.server.api_keys import encode_keys
from paceline.server.errors import ApiError
from paceline.server.settings import Settings

_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Valid request ids of clients."""

CLIENT_HEADER = "x-paceline-client"
"""From a router to the server of a model: the number of the client's key."""

OnError = Callable[[ApiError], None]
"""Called with the error of every rejected request."""


class HostMiddleware:
    """Gives every request an id, and rejects those with another Host.

    A web page whose name resolves to this machine (DNS rebinding) still sends its own name in Host.
    """

    def __init__(self, app: ASGIApp, settings: Settings, on_error: OnError) -> None:
        """Wrap `app`."""
        self._app = app
        self._on_error = on_error
        hosts = {host.lower() for host in settings.hosts or "*"}
        self._hosts = None if "*" in hosts else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if self._hosts is not None and host_of(headers.get("host", "")) not in self._hosts:
            error = ApiError(
                "the Host header is not allowed; see --allow-host",
                status=HTTPStatus.FORBIDDEN,
                kind="permission_error",
                code="wrong_host",
            )
            self._on_error(error)
            await Reply(send_with_id, scope).error(error)
            return
        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Rejects requests without a valid key, if the server has keys; `client_of` has the key."""

    def __init__(
        self, app: ASGIApp, settings: Settings, public: Collection[str], on_error: OnError
    ) -> None:
        """Wrap `app`; the paths in `public` need no key."""
        self._app = app
        self._on_error = on_error
        self._public = frozenset(public)
        self._keys = encode_keys(settings.api_keys)
        self._behind_router = settings.behind_router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if self._keys and scope["type"] == "http" and scope["path"] not in self._public:
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
            client = self._number(key.strip(" \t").encode("latin-1") for key in given)
            if client is None:
                error = _WRONG_KEY if any(given) else _NO_KEY
                self._on_error(error)
                await Reply(send, scope).error(error)
                return
            if self._behind_router:
                client = int(headers.get(CLIENT_HEADER, "0"))
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)

    def _number(self, given: Iterable[bytes]) -> int | None:
        """The number of the first valid key, from 0; None if there is none."""
        # Compare with all keys, each in constant time, so that timing reveals nothing.
        valid = [hmac.compare_digest(key, one) for one in given for key in self._keys]
        return valid.index(True) % len(self._keys) if any(valid) else None


def client_of(scope: Scope) -> int:
    """The number of a request's API key: who may read what it stores. 0 without keys."""
    client: int = scope.get("state", {}).get("client", 0)
    return client


def peer_of(scope: Scope) -> tuple[int, str]:
    """The number of a request's API key and its address: with whom others take turns."""
    address = scope.get("client") or ("", 0)
    return client_of(scope), address[0]


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
    """The lower-case name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
