"""`paceline serve`: one server from its start to its end.

Knows sockets, signals and uvicorn. The rule: whoever was promised an answer gets it or an error,
also while the server ends: it takes nothing new, lets what runs go on for a while, and says to the
rest that it has ended.
"""

import asyncio
import ipaddress
import math
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime.model import Model
from paceline.server import page
from paceline.server.app import make_app
from paceline.server.metrics import Metrics
from paceline.server.scheduler import Scheduler
from paceline.server.service import Service
from paceline.server.settings import Settings

DEFAULT_PORT = 8000

CONTEXTS = 4
"""Full contexts in a server's KV cache where `--cache-tokens` does not say. Requests and prefixes
take blocks of it as they need them, and memory is taken as blocks are used."""

_BACKLOG = 1024
"""Connections that may wait to be accepted."""

_FLUSH_SECONDS = 2
"""How long clients may take to read the rest once all answers have ended."""

_OPEN_FILES = 10_240
"""Connections need one each. What macOS allows at most where it says that there is no limit."""

_HERE = ("localhost", "127.0.0.1", "::1")


def serve(
    model: Model,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    settings: Settings | None = None,
    *,
    say: Callable[[str], Any] | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT; a second one ends it at once.

    Args:
        model: loaded, with the drafters that requests may ask for.
        host: the address to listen at; others than this machine's own want an API key.
        port: 0 takes a free one.
        settings: None: the defaults.
        say: told where the server listens, once it does; None: standard error.

    Raises:
        InvalidRequest: the address cannot be served so.
        PacelineError: the address cannot be listened at.
    """
    allow_open_files()
    server = Server(model, host, port, settings)
    with suppress(PacelineError):  # those who ask for a form will hear why there is none
        server.service.grammars.json_object()  # half a second that the first would have to wait
    server.run(say=say or _say, signals=True)


class Server:
    """A server that is bound to its address and not yet running."""

    def __init__(
        self,
        model: Model,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: Settings | None = None,
    ) -> None:
        """Bind the address; see `serve`."""
        settings = settings or Settings()
        for drafter in {settings.drafter, "auto"}:  # a request may ask for either
            model.open_drafters(drafter)
        here = _is_here(host)
        if not (here or settings.api_keys or settings.anyone):
            raise InvalidRequest(
                f"others can reach a server at {host}: give it an API key, or say that anyone may "
                "use it"
            )
        if here and settings.hosts is None:
            settings = replace(settings, hosts=(*_HERE, host))
        self.settings = settings
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}"
        self.scheduler = Scheduler(
            model, most_waiting=settings.most_waiting, most_running=settings.most_running
        )
        self.service = Service(self.scheduler, settings)
        metrics = Metrics(self.service)
        self.service.watch = metrics
        self._app = make_app(self.service, metrics.routes(), page.routes())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = 0
        self._stop = asyncio.Event()

    def run(self, *, say: Callable[[str], Any] = lambda _: None, signals: bool = False) -> None:
        """Serve until `stop` is called, or a signal comes where `signals` are listened to."""
        self.scheduler.start()
        try:
            asyncio.run(self._run(say, signals=signals))
        finally:
            self.scheduler.close()
            self._socket.close()

    def stop(self) -> None:
        """Have it end, from any thread; at the second call at once."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told += 1
        self._stop.set()
        if self._told > 1:
            threading.Thread(target=self.scheduler.close, daemon=True).start()

    async def _run(self, say: Callable[[str], Any], *, signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        server = _Uvicorn(self._config())
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._tell)
        say(f"serving {self.service.name} at {self.url}/v1")
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.to_thread(self.scheduler.close, self.settings.grace_seconds)
        server.should_exit = True
        await serving

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http=_patient(self.settings.header_seconds, self.settings.reading_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: uvicorn would hang up on those who still get their answers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _patient(headers: float, reading: float) -> type[H11Protocol]:
    """Connections whose clients may take so many seconds.

    Args:
        headers: to send a request's headers.
        reading: to take none of what waits for them.
    """

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            self._is_read()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            self._wait_for_reader()
            super().pause_writing()

        def _wait_for_reader(self, before: float = math.inf) -> None:
            left = self.transport.get_write_buffer_size()
            if left < before:
                self._unread = self.loop.call_later(reading, self._wait_for_reader, left)
            else:  # nothing was taken
                self.transport.abort()

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()  # the headers are here
            elif self._timer is None:
                self._timer = self.loop.call_later(headers, self.transport.close)

        def _forget(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Patient


def _is_here(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PacelineError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --port"
        ) from error


def allow_open_files() -> None:
    """As many as may be: some shells allow 256, and every connection takes one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
