"""An ASGI application at an address, from start to shutdown, on uvicorn.

Independent of what is served. Invariant: the address is bound once, before anything is loaded for
it; at shutdown the application drains before connections are closed.
"""

import asyncio
import ipaddress
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import InvalidRequest, PacelineError
from paceline.server.settings import Settings
from paceline.storage.system import stop_signals

_BACKLOG = 1024
"""Connections that wait to be accepted."""

_FLUSH_SECONDS = 2
"""Time for clients to read the rest after all answers have ended."""

_LAST_SECONDS = 5
"""Time after the grace period in which a process ends by itself."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Served(Protocol):
    """What is served, as far as its shutdown is concerned."""

    def close(self, grace: float = 0.0) -> None:
        """Accept nothing new; end what still runs after `grace` seconds. Blocks; thread-safe."""
        ...


class HttpServer:
    """A server, bound to its address and not yet running."""

    def __init__(self, host: str, port: int, settings: Settings) -> None:
        """Bind the address; port 0 chooses a free one.

        Raises:
            InvalidRequest: other machines can reach it, and it requires no API key.
            PacelineError: it cannot listen at the address.
        """
        _check_access(host, settings)
        if _is_local(host) and settings.hosts is None:
            settings = replace(settings, hosts=(*_LOCAL_NAMES, host))
        self.settings = settings
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}"
        self._served: Served | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._end_timers: list[threading.Timer] | None = None

    def run(
        self, app: ASGIApp, served: Served, ready: Callable[[], Any], *, signals: bool = False
    ) -> None:
        """Serve until `stop` is called, or with `signals` until a signal.

        `ready` is called once the server listens. With `signals` the process ends soon after the
        grace period, whatever hangs.
        """
        self._served = served
        self._end_timers = [] if signals else None
        try:
            with stop_signals(self.stop) if signals else nullcontext():
                asyncio.run(self._run(app, served, ready))
        finally:
            served.close()
            self._socket.close()
            for timer in self._end_timers or ():
                timer.cancel()

    def stop(self) -> None:
        """Shut down, from any thread; the second call skips the grace period."""
        self._stop_requests += 1
        if self._end_timers is not None:
            grace = self.settings.grace_seconds if self._stop_requests == 1 else 0.0
            timer = threading.Timer(grace + _LAST_SECONDS, _end_process)
            timer.daemon = True
            timer.start()
            self._end_timers.append(timer)
        if self._loop is None:  # it does not run yet, and will end at once
            self._stop.set()
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._stop_requests > 1 and self._served is not None:
            threading.Thread(target=self._served.close, daemon=True).start()

    async def _run(self, app: ASGIApp, served: Served, ready: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        server = _Uvicorn(self._config(app))
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        ready()
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.to_thread(served.close, self.settings.grace_seconds)
        server.should_exit = True
        await serving

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            http=_protocol(self.settings.header_seconds, self.settings.reading_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )


class _Uvicorn(uvicorn.Server):
    """Does not handle signals: uvicorn would close connections with unfinished answers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _protocol(headers: float, reading: float) -> type[H11Protocol]:
    """A protocol that closes connections of slow clients.

    Args:
        headers: seconds to send the headers of a request.
        reading: seconds in which a client reads nothing of what is ready for it.
    """

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._time_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_read_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            self._time_reading()
            super().pause_writing()

        def _time_reading(self, before: float = math.inf) -> None:
            left = self.transport.get_write_buffer_size()
            if left < before:
                self._read_timer = self.loop.call_later(reading, self._time_reading, left)
            else:  # the client has read nothing
                self.transport.abort()

        def resume_writing(self) -> None:
            self._stop_read_timer()
            super().resume_writing()

        def _stop_read_timer(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _time_headers(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_header_timer()  # the headers are here
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(headers, self.transport.close)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return TimedProtocol


def _is_local(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PacelineError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --port"
        ) from error
    # Connections inherit it. asyncio sets it only for a socket that names its protocol, and without
    # it a reply's body waits up to 40 ms until the client acknowledges its head.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def check_address(host: str, port: int, settings: Settings) -> None:
    """Raise what `HttpServer` would, before a model is fetched or loaded for it."""
    _check_access(host, settings)
    _bound(host, port).close()


def _check_access(host: str, settings: Settings) -> None:
    """Raise InvalidRequest if other machines can reach `host` and no API key is required."""
    if not (_is_local(host) or settings.api_keys or settings.anyone):
        raise InvalidRequest(
            f"other machines can reach a server at {host}: set an API key, or allow --anyone"
        )


def _end_process() -> None:
    """End the process at once: files appear by a rename, so that none is left half-written."""
    say_line("the server has not ended within its grace period: its process is ended")
    os._exit(1)


def say_line(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
