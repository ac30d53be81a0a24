"""Who may come in: the Host they ask for, the key they bring, the size of what they send.

Knows headers and bodies; knows nothing of what is asked. Plain ASGI, so that nothing here stands
between a request and the news that its client has gone. The rule: whoever is turned away has cost
next to nothing.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.api.errors import Refused
from paceline.server.api.sse import Reply
from paceline.server.api_keys import encoded
from paceline.server.settings import Settings

_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Request ids that are given back as they came."""

_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)

Count = Callable[[Refused], None]
"""Is told of everybody who is turned away."""


class Door:
    """Gives every request an id, and turns away those for another Host.

    A page whose name was made to point here (DNS rebinding) still says its own name in Host.
    """

    def __init__(self, app: ASGIApp, settings: Settings, count: Count) -> None:
        """Stand before `app`."""
        self._app = app
        self._count = count
        hosts = {host.lower() for host in settings.hosts or "*"}
        self._hosts = None if "*" in hosts else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = number

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        if self._hosts is not None and host_of(headers.get("host", "")) not in self._hosts:
            error = Refused(
                "this server does not go by that Host",
                status=HTTPStatus.FORBIDDEN,
                kind="permission_error",
                code="wrong_host",
            )
            self._count(error)
            await Reply(named).refuse(error)
            return
        await self._app(scope, receive, named)


class Keys:
    """Turns away those without a key, where keys are asked for."""

    def __init__(
        self, app: ASGIApp, settings: Settings, public: Collection[str], count: Count
    ) -> None:
        """Stand before `app`; the paths in `public` are for all."""
        self._app = app
        self._count = count
        self._public = frozenset(public)
        self._keys = encoded(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if self._keys and scope["type"] == "http" and scope["path"] not in self._public:
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
            if not self._known(key.strip(" \t").encode("latin-1") for key in given):
                error = _WRONG_KEY if any(given) else _NO_KEY
                self._count(error)
                await Reply(send).refuse(error)
                return
        await self._app(scope, receive, send)

    def _known(self, given: Iterable[bytes]) -> bool:
        # All are compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(key, one) for one in given for key in self._keys) > 0


def _unauthorised(message: str) -> Refused:
    return Refused(
        message,
        status=HTTPStatus.UNAUTHORIZED,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


_NO_KEY = _unauthorised("this server wants an API key, as a Bearer token or in X-Api-Key")
_WRONG_KEY = _unauthorised("that API key is not known here")


def host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


async def read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """The body of a request that sends JSON.

    Raises:
        Refused: it is no JSON, too large, or too slow.
        ClientGone: nobody waits for an answer any more.
    """
    headers = Headers(scope=scope)
    # Also what keeps pages in a browser out: they cannot send this type without asking first.
    if not _JSON.fullmatch(headers.get("content-type", "")):
        raise Refused(
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
        raise Refused(
            f"the body did not come within {settings.body_seconds:g} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
            kind="timeout_error",
        ) from None


class ClientGone(Exception):
    """The client has hung up."""


async def gone(receive: Receive) -> None:
    """Wait until the client has hung up. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(settings: Settings) -> Refused:
    return Refused(
        f"the body is larger than {settings.body_bytes} bytes",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="body_too_large",
    )
