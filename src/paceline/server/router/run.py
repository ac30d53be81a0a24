"""`paceline serve --all`: every model that is here after one port, from start to shutdown."""

from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import DEFAULT_MODEL, Listed, list_models
from paceline.server.app import application
from paceline.server.http_server import HttpServer, say_line, serving_line
from paceline.server.router.app import Router
from paceline.server.router.child import Child
from paceline.server.router.pool import Limits, Pool
from paceline.server.settings import Settings


class RouterServer:
    """A server of several models, bound to its address and not yet running."""

    def __init__(
        self,
        default: str,
        options: Sequence[str],
        *,
        settings: Settings,
        limits: Limits,
        listed: Callable[[], Sequence[Listed]] = list_models,
        say: Callable[[str], Any],
    ) -> None:
        """Bind the address; see `serve_all`. `listed` lists the models that are here."""
        self.http = HttpServer(settings)
        self.stop = self.http.stop
        self.url = self.http.url
        self._say = say

        async def load(name: str) -> Child:
            say(f"loading {name}")
            words = ["--name", name, *options]
            return await Child.start(name, words, lambda line: say(f"{name}: {line}"))

        self.router = Router(listed, Pool(load, limits), self.http.settings, default)
        self._app = application(self.router, self.router.routes())

    def run(self, *, signals: bool = False, quiet: bool = True) -> None:
        """Serve until `stop` is called, or with `signals` until a signal."""
        line = serving_line("all models", self.url)
        self.http.run(
            self._app,
            self.router.close,
            lambda: self._say(line),
            signals=signals,
            quiet=quiet,
            descriptors=2,
        )


def serve_all(
    default: str,
    options: Sequence[str],
    *,
    settings: Settings,
    limits: Limits,
    say: Callable[[str], Any] = say_line,
    quiet: bool = True,
) -> None:
    """Serve all models that are here until SIGTERM or SIGINT; a second signal ends it at once.

    Args:
        default: the model of a request that names none.
        options: options of `paceline serve` for each model's own process.
        settings: of the server; what concerns answers is among the `options`.
        limits: how many models are loaded, and for how long.
        say: gets the line with the URL once the server listens, then what the models' servers say.
        quiet: False: write a line for each request to standard error.

    Raises as `bound` does, and InvalidRequest if the default model is not here. The one of every
    command need not be: requests may name others.
    """
    names = sorted(listed.name for listed in list_models() if listed.here)
    if default not in names and default != DEFAULT_MODEL:
        known = ", ".join(names[:20]) or "none"
        raise InvalidRequest(
            f"--model {default} is not among the models that are here ({known}): name one of them, "
            "or fetch it first with paceline pull"
        )
    server = RouterServer(default, options, settings=settings, limits=limits, say=say)
    server.run(signals=True, quiet=quiet)
