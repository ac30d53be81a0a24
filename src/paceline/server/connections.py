"""Client connections: accepted up to a limit, and closed when a client sends or reads nothing.

Independent of the served content. Invariants: at the limit, a new connection replaces one without a
complete request; and the accept loop never ends, and logs at most one line per minute.
"""

import asyncio
import logging
import math
import socket
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import NoReturn

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from paceline.server.errors import ApiError
from paceline.server.http import to_json
from paceline.server.settings import Settings
from paceline.system.machine import free_descriptors

log = logging.getLogger("paceline.server")

_RESERVED = 24
"""Descriptors for files and processes that are opened while connections are open."""

_MIN = 8
"""Minimum connections to try, however few descriptors there are."""

_IDLE = 1024
"""Connections beyond those of the running and waiting requests: memory, not descriptors, limits
them."""

_RETRY_SECONDS = 0.1
"""Time without a descriptor before the next attempt to accept."""

_REPORT_SECONDS = 60.0

_SILENT, _ANSWERED, _SENDING, _READING = range(4)
"""Kinds of connections without a complete request, in closing order: no part of a request so far,
none since the last answer, no complete body, the last answer not read."""


def connection_limit(settings: Settings, descriptors: int = 1) -> int:
    """Return the maximum number of connections, given the `descriptors` that each uses."""
    limit = settings.connections or _IDLE + settings.queue + settings.max_concurrent
    free = free_descriptors()
    return limit if free is None else min(limit, max((free - _RESERVED) // descriptors, _MIN))


class Connections:
    """The connections of one server, and the loop that accepts them."""

    def __init__(self, server: uvicorn.Server, settings: Settings, limit: int) -> None:
        """Accept at most `limit` at a time."""
        self._server, self._settings, self._limit = server, settings, limit
        self._reported = -math.inf

    async def accept(self, listening: socket.socket) -> NoReturn:
        """Accept connections one by one, until it is cancelled.

        asyncio's own loop accepts the whole queue at once, and without a free descriptor logs a
        traceback for each connection.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        config, state = self._server.config, self._server.server_state
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:  # no free descriptor or memory, or the client left
                if not isinstance(error, ConnectionError):
                    self._report(f"no connection can be accepted ({error.strerror})")
                    await asyncio.sleep(0 if self._make_room() else _RETRY_SECONDS)
                continue
            if len(state.connections) >= self._limit:
                self._report(f"all {self._limit} connections are open")
                if not self._make_room():
                    _refuse(client, self._limit)
                    await asyncio.sleep(0)
                    continue
            with suppress(OSError):
                new = partial(Connection, config, state, self._settings)
                await loop.connect_accepted_socket(new, client)

    def close_unfinished(self) -> None:
        """Close connections without a complete request, except while an answer is read from them.

        Otherwise uvicorn would log a traceback for one that is sending part of a request.
        """
        for connection in self._waiting():
            if connection.kind != _READING:
                connection.transport.abort()

    def running(self) -> int:
        """Return the number of complete requests whose responses are not complete."""
        return sum(one.kind is None for one in self._open())

    def _waiting(self) -> "list[Connection]":
        """Return the connections without a complete request."""
        return [one for one in self._open() if one.kind is not None]

    def _open(self) -> "list[Connection]":
        connections = self._server.server_state.connections
        ours = [one for one in connections if isinstance(one, Connection)]
        return [one for one in ours if not one.transport.is_closing()]

    def _make_room(self) -> bool:
        """Close the connection that has been without a complete request longest, if any."""
        longest = min(self._waiting(), key=lambda one: (one.kind, one.since), default=None)
        if longest is not None:
            longest.transport.abort()
        return longest is not None

    def _report(self, reason: str) -> None:
        if monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = monotonic()
            log.warning("%s: new connections replace idle ones", reason)


class Connection(H11Protocol):
    """One client's connection, closed when the client is slow."""

    def __init__(self, config: uvicorn.Config, state: ServerState, settings: Settings) -> None:
        super().__init__(config, state, {})
        self._settings = settings
        self.since = monotonic()
        """Time when it was opened, or its last request was answered."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None  # cancelled while the client reads

    @property
    def kind(self) -> int | None:
        """The kind of connection; None if it has a complete request."""
        if self.cycle is None:
            return _SILENT
        if self.cycle.response_complete:
            return _READING if self.transport.get_write_buffer_size() else _ANSWERED
        return _SENDING if self.cycle.more_body else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # the time for reading starts with the first byte
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def on_response_complete(self) -> None:
        """Continue with the next request, if any; nothing after it was read until now."""
        self.since = monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._time_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().resume_writing()

    def _time_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the headers are complete
            self._stop_header_timer()
        elif self._header_timer is None:
            seconds = self._settings.header_seconds
            self._header_timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_reading(self, before: float = math.inf) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            seconds = self._settings.reading_seconds
            self._read_timer = self.loop.call_later(seconds, self._time_reading, left)
        else:  # the client has read nothing
            self.transport.abort()


def _refuse(client: socket.socket, limit: int) -> None:
    """Send an error to a client, as far as possible without waiting, and close the connection."""
    message = f"all {limit} connections of this server are busy; try again later"
    error = ApiError(message, kind="server_error", code="too_many_connections")
    body = to_json(error.body)
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with client, suppress(OSError):
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.recv(2**16)  # a socket closed with unread bytes loses the data it sent
        client.sendall(head.encode() + body)
