"""Connections of clients: accepted up to a limit, and closed when a client sends or reads nothing.

Independent of what is served. Invariants: at the limit a new connection takes the place of one
without a complete request; the accept loop never ends, and logs at most a line a minute; and a
client that has sent its request and closes its sending side gets the answer.
"""

import asyncio
import json
import logging
import math
import socket
from contextlib import suppress
from time import monotonic
from typing import NoReturn

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from paceline.server.settings import Settings
from paceline.storage.system import free_descriptors

log = logging.getLogger("paceline.server")

_RESERVED = 24
"""Descriptors for files and processes that are opened while connections are open."""

_LEAST = 8
"""Connections that are tried with, however few descriptors there are."""

_IDLE = 1024
"""Connections beyond those of the requests that may run and wait: memory, not descriptors, limits
them."""

_RETRY_SECONDS = 0.1
"""Time without a descriptor before the next attempt to accept."""

_REPORT_SECONDS = 60.0

_HALF_CLOSE_SECONDS = 0.05
"""A client that sends no more (`nc -N`) says so right after its request. One that is gone does so
later, and TCP has no other difference until the server writes: after a stall of the event loop both
look alike, and `_PROBE` tells."""

_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An interim response, which clients skip. The system of a client that is gone rejects the first,
and the second ends the connection."""

_PROBE_SECONDS = (1.0, 2.0)
"""After the sending side was closed. Most answers that somebody waits for with `nc` come before."""

_SILENT, _ANSWERED, _SENDING, _READING = range(4)
"""Kinds of connections without a complete request, in the order in which they are closed: no head
of a request so far, none since the last answer, no complete body, the last answer not read."""


def most_connections(settings: Settings, descriptors: int = 1) -> int:
    """Maximum of connections, each of which takes a number of descriptors."""
    most = settings.max_connections or _IDLE + settings.max_waiting + settings.max_running
    free = free_descriptors()
    return most if free is None else min(most, max((free - _RESERVED) // descriptors, _LEAST))


class Connections:
    """The connections of one server, and the loop that accepts them."""

    def __init__(self, settings: Settings, most: int) -> None:
        """Accept at most `most` at a time."""
        self._most = most
        self._settings = settings
        self._without_request: list[dict[Connection, None]] = [{}, {}, {}, {}]
        self._reported = -math.inf

    async def accept(self, listening: socket.socket, server: uvicorn.Server) -> NoReturn:
        """Accept connections one by one, until it is cancelled.

        asyncio's own loop accepts as many at once as the queue holds, and without a descriptor
        logs a traceback for each.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        state = server.server_state

        def connection() -> Connection:
            return Connection(server.config, state, self, self._settings)

        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptor or memory is free, or the client is gone
                if not isinstance(error, ConnectionError):
                    self._report(f"no connection can be accepted ({error.strerror})")
                    await asyncio.sleep(0 if self._make_room() else _RETRY_SECONDS)
                continue
            if len(state.connections) >= self._most:
                self._report(f"all {self._most} connections are open")
                if not self._make_room():
                    _refuse(client, self._most)
                    await asyncio.sleep(0)
                    continue
            with suppress(OSError):
                await loop.connect_accepted_socket(connection, client)

    def close_unfinished(self) -> None:
        """Close connections whose request has come in part, which nothing waits for any more."""
        for connection in list(self._without_request[_SENDING]):
            connection.transport.abort()

    def sort(self, connection: "Connection", kind: int | None) -> None:
        """Note which kind a connection is of; None: it has a complete request, or is closed."""
        for other, connections in enumerate(self._without_request):
            if other != kind:
                connections.pop(connection, None)
        if kind is not None:
            self._without_request[kind].setdefault(connection)  # bytes of a head win it no time

    def _make_room(self) -> bool:
        """Close the connection that has been without a complete request longest, if any is."""
        for connections in self._without_request:
            for connection in connections:
                self.sort(connection, None)
                connection.transport.abort()
                return True
        return False

    def _report(self, reason: str) -> None:
        if monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = monotonic()
            log.warning("%s: new ones take the place of those without a request", reason)


class Connection(H11Protocol):
    """One client's connection, closed when the client is slow."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, others: Connections, settings: Settings
    ) -> None:
        """Take the time limits of the `settings`."""
        super().__init__(config, state, {})
        self._others, self._settings = others, settings
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._half_close_timer: asyncio.TimerHandle | None = None
        """Runs for a time after bytes could be read. Not a difference of times: after a stall the
        event loop handles what has come before it handles timers."""
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # the time for reading starts with the first byte
        self._time_headers()
        self._sort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, which may begin a request."""
        self._time_half_close()
        super().data_received(data)
        self._time_headers()
        self._sort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; True if it still gets an answer."""
        self._half_closed = self._has_request and self._half_close_timer is not None
        if self._half_closed and self.scope["http_version"] == "1.1":  # 1.0 has none
            for seconds in _PROBE_SECONDS:
                self.loop.call_later(seconds, self._probe)
        return self._half_closed

    def on_response_complete(self) -> None:
        """Go on with the next request, if there is one; until now nothing was read after it."""
        self._time_half_close()
        super().on_response_complete()
        if self._half_closed and not self._has_request:
            self.transport.close()
        self._sort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_header_timer()
        self._stop_read_timer()
        self._stop_half_close_timer()
        super().connection_lost(exc)
        self._others.sort(self, None)

    def pause_writing(self) -> None:
        """Start the time for reading."""
        self._time_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_read_timer()
        super().resume_writing()
        self._sort()

    @property
    def _kind(self) -> int | None:
        """Its kind among those without a complete request; None: it has one."""
        if self.cycle is None:
            return _SILENT
        if self.cycle.response_complete:
            return _READING if self.transport.get_write_buffer_size() else _ANSWERED
        return _SENDING if self.cycle.more_body else None

    @property
    def _has_request(self) -> bool:
        """Whether a complete request is not answered yet."""
        return self._kind is None

    def _sort(self) -> None:
        self._others.sort(self, self._kind)

    def _time_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()  # the headers are here
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self._settings.header_seconds, self.transport.close
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _probe(self) -> None:
        """Write what nobody reads: a connection without a client ends."""
        if self._has_request and not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(_PROBE)

    def _time_half_close(self) -> None:
        self._stop_half_close_timer()
        self._half_close_timer = self.loop.call_later(
            _HALF_CLOSE_SECONDS, self._stop_half_close_timer
        )

    def _stop_half_close_timer(self) -> None:
        if self._half_close_timer is not None:
            self._half_close_timer.cancel()
            self._half_close_timer = None

    def _time_reading(self, before: float = math.inf) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._read_timer = self.loop.call_later(
                self._settings.reading_seconds, self._time_reading, left
            )
        else:  # the client has read nothing
            self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def _refuse(client: socket.socket, most: int) -> None:
    """Send an error to a client, as far as it goes without waiting, and close the connection."""
    message = f"all {most} connections of this server are busy; try again later"
    fields = {"message": message, "type": "server_error", "param": None}
    body = json.dumps({"error": {**fields, "code": "too_many_connections"}})
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with client, suppress(OSError):
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.recv(2**16)  # a socket closed with unread bytes loses what was sent
        client.sendall((head + body).encode())
