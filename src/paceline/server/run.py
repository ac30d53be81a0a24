"""`paceline serve`: one model's server, from start to shutdown.

Invariant: every accepted request gets its answer or an error. At shutdown the server accepts
nothing new, lets requests run for the grace period, and ends the rest with an error.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.models import cache_dir
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.model import Model
from paceline.server.app import make_app
from paceline.server.http_server import HttpServer, say_line, serving_line
from paceline.server.service import Service
from paceline.server.settings import Settings

CONTEXTS = 4
"""Full contexts in the KV cache without `--cache-tokens`. Requests and the prefix cache take blocks
as they grow, and memory is allocated as blocks are used."""


def serve(
    model: Model,
    settings: Settings,
    *,
    say: Callable[[str], Any] = say_line,
    quiet: bool = True,
) -> None:
    """Serve a model until SIGTERM or SIGINT; a second signal ends it at once.

    Args:
        model: loaded, with the drafters that requests may ask for.
        settings: of the server.
        say: gets the line with the URL once the server listens.
        quiet: False: write a line for each request to standard error.

    Raises InvalidRequest and PacelineError as `bound` does, and for the setting `think`.
    """
    server = Server(model, settings)
    with suppress(PacelineError):  # a request for structured output gets the error
        server.service.grammars.json_object()  # warm up: the first grammar takes half a second
    server.run(say=say, signals=True, quiet=quiet)


class Server:
    """A model's server, bound to its address and not yet running."""

    def __init__(self, model: Model, settings: Settings) -> None:
        model.open_drafters(settings.drafter, "auto")  # a request may name either
        self.http = HttpServer(settings)
        self.stop = self.http.stop
        self.settings = self.http.settings
        self.scheduler = model.open_scheduler(
            max_waiting=settings.max_waiting,
            max_running=settings.max_running,
            store=_store(model, settings.prompt_cache_bytes),
        )
        self.service = Service(model, self.scheduler, self.settings)
        self._app = make_app(self.service)
        self.url, self.port = self.http.url, self.http.port

    def run(self, *, say: Callable[[str], Any], signals: bool = False, quiet: bool = True) -> None:
        """Serve until `stop` is called, or with `signals` until a signal."""
        self.scheduler.start(warm_up=True)
        line = serving_line(self.service.name, self.url)
        close = self.service.close
        self.http.run(self._app, close, lambda: say(line), signals=signals, quiet=quiet)


def _store(model: Model, max_bytes: int | None) -> PromptStore | None:
    if max_bytes is None:
        return None
    return PromptStore(cache_dir() / "prompts", model.engine, model.files.fingerprint, max_bytes)


def end_with_input() -> None:
    """Send this process SIGTERM when its input ends, as with the process that started it."""

    def wait() -> None:
        # Not through `sys.stdin`: its lock, held at the end of the process, would abort it.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
