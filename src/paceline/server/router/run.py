"""`paceline serve --all`: every installed model at one port, from start to shutdown.

The application forwards each request to its model's process. Its routes are those of one model's
server, except `_NOT_HERE`. Invariants: a body is forwarded unchanged; replies of the model's server
are streamed unchanged; and no client string is used as a file name: a model is looked up by name in
the list of installed models.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import quote

import httpx
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from paceline.errors import InvalidRequest, ModelError
from paceline.models import DEFAULT_MODEL, ModelEntry, list_models, memory_needed
from paceline.runtime.batching.request import TimedOut
from paceline.server.api.endpoint import Endpoint
from paceline.server.api.info import model_entry, model_list
from paceline.server.app import BODIES, application
from paceline.server.errors import ApiError, unknown_model
from paceline.server.http import CLIENT_HEADER, Reply, client_of
from paceline.server.json_body import Body, parse
from paceline.server.metrics import exposition
from paceline.server.router.child import Child
from paceline.server.router.pool import Pool
from paceline.server.run import HttpServer
from paceline.server.service import Lane
from paceline.server.settings import Settings

log = logging.getLogger("paceline.server")

POSTS = [path.removeprefix("/v1") for path in BODIES]
"""Paths whose bodies name the model."""

_NOT_HERE = ("/tokenizer_info",)
"""Paths of a single model's server: a request for them names no model."""

_LIST_SECONDS = 1.0
"""Minimum age of the model list before an unknown name triggers another read."""

_REQUEST_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta")
_REPLY_HEADERS = ("cache-control", "retry-after", "x-accel-buffering")
"""Headers that are forwarded; others belong to one connection, or to the server itself."""

_COUNTERS = {
    "loads": "Models loaded since the start",
    "errors": "Requests that ended with an error before a model had them",
}


class Router:
    """Models by name, for many clients. For one event loop alone."""

    def __init__(
        self,
        listed: Callable[[], Sequence[ModelEntry]],
        pool: Pool,
        settings: Settings,
        default: str,
    ) -> None:
        """Serve the models of `listed`; `default` is used for requests that name none."""
        self.settings = settings
        self.errors = 0  # requests that failed in the router, not in a model's process
        self._listed, self._pool, self._default = listed, pool, default
        self._models: dict[str, ModelEntry] = {}
        self._read = -_LIST_SECONDS
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A model's process has its own limits; an answer may take minutes. A request never waits
        # for another request's connection: client connections are limited.
        self._client = httpx.AsyncClient(
            trust_env=False,  # only loopback addresses: no proxy
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    def on_error(self, error: ApiError) -> None:
        self.errors += 1

    def close(self, grace: float) -> None:
        """Accept nothing new, and end the models' processes. Blocks; for other threads."""
        self._closed = True
        loop = self._loop
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(self._pool.close(grace), loop).result()

    def app(self) -> ASGIApp:
        """Create the application: every path with and without the prefix /v1."""
        gets = {
            "/models": self._list,
            "/models/{name:path}": self._one,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        posts = dict.fromkeys(POSTS, Endpoint(self, self._forward))
        return application(self, posts, gets, self._stored, _NOT_HERE)

    async def _forward(self, body: bytes, reply: Reply) -> None:
        """Forward a body, and stream the reply of the model's server."""
        self._loop = asyncio.get_running_loop()
        is_long = Lane.for_body(body) is Lane.LONG
        read = await asyncio.to_thread(parse, _Named, body) if is_long else parse(_Named, body)
        model = await self._model(read.model)
        sent = Headers(scope=reply.scope)
        headers = {name: sent[name] for name in _REQUEST_HEADERS if name in sent}
        headers[CLIENT_HEADER] = str(client_of(reply.scope))
        headers["x-request-id"] = reply.scope["state"]["request_id"]
        async with asyncio.timeout(self.settings.timeout) as limit:
            try:
                async with self._pool.use(model.name, memory_needed(model.bytes)) as child:
                    limit.reschedule(None)  # the model's server has the same limit
                    await self._exchange(child, body, headers, reply)
            except TimeoutError:
                raise TimedOut(f"timed out waiting for a free slot to load {model.name}") from None
            except ModelError as error:
                raise ModelError(f"{model.name} cannot be loaded: {error}") from error

    async def _exchange(
        self, child: Child, body: bytes, headers: dict[str, str], reply: Reply
    ) -> None:
        url = child.url + reply.scope["path"]
        request = self._client.build_request(
            "POST", url, content=body, headers={**headers, **child.headers}
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise _transport_error(error) from error
        try:
            kept = {
                name: response.headers[name] for name in _REPLY_HEADERS if name in response.headers
            }
            await reply.start(response.status_code, response.headers["content-type"], kept)
            async for part in response.aiter_raw():
                await reply.write(part)
        except httpx.TransportError as error:
            # The status is sent: the connection breaks, so that the client detects it.
            raise _transport_error(error) from error
        finally:
            await response.aclose()
        await reply.write(b"", more=False)

    async def _model(self, name: str | None) -> ModelEntry:
        """Return the model with a name. Raises ApiError if it is not installed."""
        model = name or self._default
        if model not in self._models and monotonic() - self._read >= _LIST_SECONDS:
            await self._read_list()
        if model not in self._models:
            known = ", ".join(sorted(self._models)[:20]) or "no models"
            raise unknown_model(model, known)
        return self._models[model]

    async def _read_list(self) -> None:
        listed = await asyncio.to_thread(self._listed)
        self._models = {model.name: model for model in listed if model.here}
        self._read = monotonic()

    async def _list(self, _request: Request) -> Response:
        """Reply with the installed models, and their states."""
        await self._read_list()
        return JSONResponse(model_list([*map(self._entry, self._models.values())]))

    async def _one(self, request: Request) -> Response:
        """Reply with a model; without a name, with the list. Raises ApiError if not installed."""
        if not request.path_params["name"]:
            return await self._list(request)
        return JSONResponse(self._entry(await self._model(request.path_params["name"])))

    def _entry(self, model: ModelEntry) -> dict[str, Any]:
        state = self._pool.states.get(model.name, "unloaded")
        return model_entry(model.name, status={"value": state})  # as in llama.cpp's router

    async def _stored(self, request: Request) -> Response:
        """Reply with a stored response from any loaded model; unloaded models have none."""
        reply: Response | None = None
        client = {CLIENT_HEADER: str(client_of(request.scope))}
        for _, response in await self._ask_all(request.url.path, request.method, client):
            if response is not None and (reply is None or response.is_success):
                kind = response.headers["content-type"]
                reply = Response(response.content, response.status_code, media_type=kind)
        if reply is None:
            raise ApiError("no model is loaded, so no responses are stored", status=404)
        return reply

    async def _health(self, _request: Request) -> Response:
        """Reply 200 if requests are accepted, with the state of every loaded model."""
        states = dict(self._pool.states)
        for name, response in await self._ask_all("/health"):
            if response is None:
                states[name] = "gone"
            elif response.status_code != httpx.codes.OK:
                states[name] = response.json()["status"]
        if self._closed:
            return JSONResponse({"status": "draining", "models": states}, 503)
        return JSONResponse({"status": "ok", "models": states})

    async def _metrics(self, _request: Request) -> Response:
        """Reply with the metrics of every loaded model, labeled by name, and the router's own."""
        texts = {
            name: response.text
            for name, response in await self._ask_all("/metrics")
            if response is not None and response.status_code == httpx.codes.OK
        }
        counters = {"loads": self._pool.loads, "errors": self.errors}
        return exposition(partial(_labelled, texts, counters))

    async def _ask_all(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> Iterable[tuple[str, httpx.Response | None]]:
        """Return the reply of each loaded model's server, or None if it did not reply."""
        children = self._pool.loaded

        async def ask(child: Child) -> httpx.Response | None:
            try:
                return await self._client.request(
                    method,
                    child.url + quote(path),
                    headers={**(headers or {}), **child.headers},
                    timeout=5.0,
                )
            except httpx.TransportError:
                return None

        replies = await asyncio.gather(*map(ask, children.values()))
        return zip(children, replies, strict=True)


class _Named(Body):
    """The fields that the router reads from a body."""

    model: str | None = None


def _transport_error(error: httpx.TransportError) -> ApiError:
    return ApiError(
        f"the model's process does not respond ({type(error).__name__}); try again",
        status=502,
        kind="server_error",
        code="model_ended",
    )


def _labelled(texts: Mapping[str, str], counters: Mapping[str, int]) -> Iterable[Metric]:
    """Return the metrics of all models' servers, and the router's.

    `texts`: model name -> metrics of its server; `counters`: the values of `_COUNTERS`.
    """
    families: dict[str, Metric] = {}
    for model, text in texts.items():
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                joined.samples.append(sample._replace(labels={**sample.labels, "model": model}))
    for name, value in counters.items():
        families[name] = CounterMetricFamily(f"paceline_router_{name}", _COUNTERS[name], value)
    return families.values()


class RouterServer(HttpServer):
    """The server of several models."""

    name = "all models"
    descriptors = 2

    def __init__(
        self,
        default: str,
        options: Sequence[str],
        *,
        settings: Settings,
        listed: Callable[[], Sequence[ModelEntry]] = list_models,
        on_line: Callable[[str], Any],
    ) -> None:
        """Bind the address; see `serve_all`. `listed` lists the installed models."""
        super().__init__(settings)

        async def load(name: str) -> Child:
            on_line(f"loading {name}")
            words = ["--name", name, *options]
            return await Child.start(name, words, lambda line: on_line(f"{name}: {line}"))

        self.router = Router(listed, Pool(load, self.settings), self.settings, default)
        self.app = self.router.app()

    def close(self, grace: float) -> None:
        self.router.close(grace)


def serve_all(
    default: str,
    options: Sequence[str],
    *,
    settings: Settings,
    on_line: Callable[[str], Any],
    quiet: bool,
) -> None:
    """Serve all installed models, as `HttpServer.run` does, until a signal.

    `default` is the model for requests that name none, `options` those of `paceline serve` for each
    model's own process. `on_line` also receives the models' output.

    Raises as `bound` does, and InvalidRequest if the default model is not installed. Only the
    default model of all commands may be missing: requests may name other models.
    """
    names = sorted(listed.name for listed in list_models() if listed.here)
    if default not in names and default != DEFAULT_MODEL:
        known = ", ".join(names[:20]) or "none"
        raise InvalidRequest(
            f"--model {default} is not installed; use one of {known}, or download it first with "
            "`paceline pull`"
        )
    server = RouterServer(default, options, settings=settings, on_line=on_line)
    server.run(on_line=on_line, signals=True, quiet=quiet)
