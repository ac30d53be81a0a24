"""One model's server, from start to shutdown; serves an ASGI application at an address.

Invariants: the address is bound once, before anything is loaded for it; every accepted request gets
its answer or an error. At shutdown the server accepts nothing new, lets requests run for the grace
period, and ends the rest with an error; then it closes the connections.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from paceline.errors import InvalidRequest, PacelineError
from paceline.models import cache_dir
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.model import Model
from paceline.server.app import make_app
from paceline.server.connections import Connections, connection_limit
from paceline.server.service import Service
from paceline.server.settings import Settings
from paceline.storage.text import visible
from paceline.system.machine import allow_open_files, is_loopback, stop_signals

CONTEXTS = 4
"""Full contexts in the KV cache without `--cache-tokens`. Requests and the prefix cache allocate
blocks as they grow, and memory is allocated as blocks are used."""

_BACKLOG = 1024
"""Connections that wait to be accepted, which use no descriptor. Beyond this number, the system
drops a connection attempt, and the client retries after a second."""

_FLUSH_SECONDS = 2
"""Time for clients to read the rest after all answers have ended."""

_LAST_SECONDS = 5
"""Time after the grace period until a process ends, whatever hangs."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def print_line(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{visible(line, line=True)}\n")
    sys.stderr.flush()


class HttpServer(ABC):
    """A server of an application, bound to its address and not yet running."""

    app: ASGIApp
    name: str
    """The served model or models, in the line with the URL."""
    descriptors = 1
    """File descriptors per request."""

    def __init__(self, settings: Settings) -> None:
        """Bind the address; raise as `bound` does."""
        host = settings.host
        if is_loopback(host) and not settings.hosts:
            settings = replace(settings, hosts=(*_LOCAL_NAMES, host))
        self.settings = settings
        self._socket = bound(settings)
        self.port: int = self._socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._end_timers: list[threading.Timer] | None = None

    @abstractmethod
    def close(self, grace: float) -> None:
        """Accept nothing new, and end running requests after `grace` seconds.

        Blocks, and is called from other threads.
        """

    def run(
        self,
        *,
        on_line: Callable[[str], Any] = print_line,
        signals: bool = False,
        quiet: bool = True,
    ) -> None:
        """Serve until `stop` is called, or with `signals` until a signal.

        Args:
            on_line: receives the line with the URL once the server listens.
            signals: True if SIGTERM and SIGINT stop it; the process then ends soon after the grace
                period, whatever hangs.
            quiet: False: write a line for each request to standard error.
        """
        if signals:
            allow_open_files()
        self._end_timers = [] if signals else None
        limit = connection_limit(self.settings, self.descriptors)
        try:
            with request_log(quiet=quiet), stop_signals(self.stop) if signals else nullcontext():
                asyncio.run(self._run(on_line, limit, quiet=quiet))
        finally:
            self.close(0.0)
            self._socket.close()
            for timer in self._end_timers or ():
                timer.cancel()

    def stop(self) -> None:
        """Shut down, from any thread; the second call skips the grace period."""
        self._stop_requests += 1
        if self._end_timers is not None:
            grace = self.settings.shutdown_timeout if self._stop_requests == 1 else 0.0
            timer = threading.Timer(grace + _LAST_SECONDS, _end_process)
            timer.daemon = True
            timer.start()
            self._end_timers.append(timer)
        if self._loop is None:  # not running yet; it will end at once
            self._stop.set()
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._stop_requests > 1:
            threading.Thread(target=self.close, args=(0.0,), daemon=True).start()

    async def _run(self, on_line: Callable[[str], Any], limit: int, *, quiet: bool) -> None:
        self._loop = asyncio.get_running_loop()
        server = _Uvicorn(self._config())
        serving = asyncio.ensure_future(server.serve(sockets=[]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        connections = Connections(server, self.settings, limit)
        accepting = asyncio.ensure_future(connections.accept(self._socket))
        on_line(f"serving {self.name} at {self.url}/v1 (a page to chat: {self.url}/)")
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if (count := connections.running()) and not quiet:
            requests = f"{count} request{'s' * (count > 1)}"
            grace = self.settings.shutdown_timeout
            print_line(f"finishing {requests}, up to {grace:g} s; Ctrl-C again ends it now")
        await asyncio.to_thread(self.close, self.settings.shutdown_timeout)
        accepting.cancel()
        connections.close_unfinished()
        server.should_exit = True
        await serving

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # no line for each request that is not HTTP
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )


class _Uvicorn(uvicorn.Server):
    """Does not handle signals: uvicorn would close connections with unfinished answers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bound(settings: Settings) -> socket.socket:
    """Open a socket that listens at the address of the settings.

    Raises InvalidRequest if other machines can reach it and it requires no API key, and
    PacelineError if it cannot listen there.
    """
    host, port = settings.host, settings.port
    if not (is_loopback(host) or settings.api_keys or settings.no_auth):
        raise InvalidRequest(
            f"{host} is reachable from other machines; set an API key (--api-key), or accept "
            "requests without one (--no-auth)"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]
        raise PacelineError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --port"
        ) from error
    # Connections inherit it. asyncio sets it only for a socket that names its protocol, and without
    # it a reply's body waits up to 40 ms until the client acknowledges its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _end_process() -> None:
    """End the process at once: files appear by a rename, so that none is left half-written."""
    print_line("the server has not stopped within its shutdown timeout; ending the process")
    os._exit(1)


@contextmanager
def request_log(*, quiet: bool) -> Generator[None, None, None]:
    """Log to standard error in the context: warnings, and each request unless `quiet`."""
    log, all_logs = logging.getLogger("paceline.server"), logging.getLogger("paceline")
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLine("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    level = log.level
    all_logs.addHandler(handler)
    if not quiet:
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        all_logs.removeHandler(handler)


class _LogLine(logging.Formatter):
    """A record on one line, with indented traceback lines: no client text begins a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return visible(super().formatMessage(record), line=True).replace("\n", r"\n")

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(visible(line, line=True) for line in super().format(record).split("\n"))


def serve(model: Model, settings: Settings, **options: Any) -> None:
    """Serve a loaded model, as `HttpServer.run` does with `options`, until a signal.

    Raises InvalidRequest and PacelineError as `bound` does, and for the setting `think`.
    """
    server = Server(model, settings)
    with suppress(PacelineError):  # a request for structured output gets the error
        server.service.grammars.json_object()  # warm up: the first grammar takes half a second
    server.run(signals=True, **options)


class Server(HttpServer):
    """The server of a model."""

    def __init__(self, model: Model, settings: Settings) -> None:
        model.open_drafters(settings.drafter, "auto")  # a request may name either
        super().__init__(settings)
        store = None
        if (gigabytes := settings.prompt_cache) is not None:
            folder, max_bytes = cache_dir() / "prompts", round(gigabytes * 1e9)
            store = PromptStore(folder, model.engine, model.files.fingerprint, max_bytes)
        self.scheduler = model.open_scheduler(
            max_waiting=settings.queue, max_running=settings.max_concurrent, store=store
        )
        self.service = Service(model, self.scheduler, self.settings)
        self.name, self.app = self.service.name, make_app(self.service)

    def run(self, **options: Any) -> None:
        self.scheduler.start(warm_up=True)
        super().run(**options)

    def close(self, grace: float) -> None:
        self.service.close(grace)


def end_with_input() -> None:
    """Send this process SIGTERM when its input ends, as when its parent process ends."""

    def wait() -> None:
        # `sys.stdin` does not work: its lock, held at the end of the process, would abort it.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
