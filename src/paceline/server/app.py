"""The ASGI application: routes, middleware, error handlers, and a description of the paths.

Invariant: every error has the error object of the path's API, OpenAI's or Anthropic's.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import HTTPExceptionHandler

from paceline import __version__
from paceline.server import page
from paceline.server.api.chat import Chat
from paceline.server.api.completions import Completions
from paceline.server.api.decisions import DecisionsBody, SystemOneBody, decisions, system_one
from paceline.server.api.embeddings import embeddings
from paceline.server.api.endpoint import Host, generation, observed, reading
from paceline.server.api.info import DetokenizeBody, InfoHandlers, TokenizeBody
from paceline.server.api.messages import Messages, count_tokens
from paceline.server.api.messages_body import MessagesBody
from paceline.server.api.response_body import ResponsesBody
from paceline.server.api.responses import Responses
from paceline.server.body import ChatBody, CompletionBody, EmbeddingsBody
from paceline.server.errors import ApiError
from paceline.server.http import ApiKeyMiddleware, HostMiddleware
from paceline.server.json_body import Body
from paceline.server.service import Service
from paceline.server.settings import Settings

_PUBLIC = ("/health", "/v1/health", "/openapi.json")
"""Paths without a key: health checks have none, nor does a link on the page."""

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/decisions": DecisionsBody,
    "/v1/systemone": SystemOneBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_STORED = "/v1/responses/{response_id}"
_READ = ("/v1/models", "/v1/models/{name}", _STORED, "/health", "/tokenizer_info", "/metrics")
_RESPONSES = {"200": {"description": "The answer"}, "default": {"description": "An error"}}


def make_app(service: Service) -> Starlette:
    """Create the application of `service`: every path with and without the prefix /v1."""
    info = InfoHandlers(service)
    posts: dict[str, Any] = {
        "/chat/completions": generation(service, Chat),
        "/completions": generation(service, Completions),
        "/responses": generation(service, Responses),
        "/embeddings": embeddings(service),
        "/decisions": decisions(service),
        "/systemone": system_one(service),
        "/messages": generation(service, Messages),
        "/messages/count_tokens": count_tokens(service),
        "/tokenize": reading(service, info.tokenize),
        "/detokenize": reading(service, info.detokenize),
    }
    gets: dict[str, Any] = {
        "/models": info.models,
        "/models/{name:path}": info.model,
        "/health": info.health,
        "/metrics": service.metrics.reply,
        "/tokenizer_info": info.tokenizer_info,
    }
    return application(service, posts, gets, service.stored.reply)


def application(
    host: Host,
    posts: Mapping[str, Any],
    gets: Mapping[str, Any],
    stored: Callable[[Request], Awaitable[Response]],
    without: Collection[str] = (),
) -> Starlette:
    """Create an application of these endpoints and the page, with every server's middleware.

    `posts` and `gets` map paths without the prefix /v1 to endpoints; `stored` replies for stored
    responses, and `without` has the paths of `_READ` that the application lacks. The page needs no
    key: a browser that opens it has none yet.
    """
    pages, settings = page.routes(), host.settings
    routes = [*pages, _openapi_route(settings, without)]
    for prefix in ("/v1", ""):
        routes += [Route(prefix + path, work, methods=["POST"]) for path, work in posts.items()]
        routes += [Route(prefix + path, work, methods=["GET"]) for path, work in gets.items()]
        path = prefix + "/responses/{response_id}"
        routes.append(Route(path, stored, methods=["GET", "DELETE"]))
    layers = [Middleware(HostMiddleware, settings, host.on_error)]
    if settings.origins:
        # Before the key check, because a browser's preflight request has no key.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=[
                    *("Authorization", "Content-Type", "X-Api-Key", "X-Request-Id"),
                    *("Anthropic-Version", "Anthropic-Beta"),
                ],
                expose_headers=["X-Request-Id"],
            )
        )
    public = {*_PUBLIC, *(route.path for route in pages)}
    layers.append(Middleware(ApiKeyMiddleware, settings, public, host.on_error))
    handled = (HTTPException, ApiError, Exception)
    return Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers=dict.fromkeys(handled, _error_handler(host)),
    )


def _error_handler(host: Host) -> HTTPExceptionHandler:
    """Return the handler of errors outside endpoints."""

    async def handle(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, HTTPException):
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
            message = error.detail
            if error.status_code == HTTPStatus.NOT_FOUND:
                known = next((known for known in BODIES if path.endswith(known)), "/v1")
                root = host.settings.root_path
                message = (
                    f"there is no {path[:100]!r}; the API is at {root}{known}, "
                    f"and {root}/openapi.json lists its paths"
                )
            error = ApiError(message, status=error.status_code, code=code, headers=error.headers)
        reply = observed(host, error, request.scope.get("state", {}).get("request_id", ""))
        body = reply.body_for(path, request.headers)
        return JSONResponse(body, reply.status, reply.headers)

    return handle


def _openapi_route(settings: Settings, without: Collection[str]) -> Route:
    """Return the route GET /openapi.json: an OpenAPI 3.1 document, except paths in `without`."""
    schemas, objects = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for path in (path for path in _READ if path not in without):
        named = {"in": "path", "required": True, "schema": {"type": "string"}}
        parameters = [{"name": name, **named} for name in re.findall(r"{(\w+)}", path)]
        paths[path] = {"get": {"responses": _RESPONSES}, "parameters": parameters}
    paths[_STORED]["delete"] = {"responses": _RESPONSES}
    for path, kind in BODIES.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"requestBody": body, "responses": _RESPONSES}}
    info, components = {"title": "paceline", "version": __version__}, {"schemas": objects["$defs"]}
    document: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths}
    document |= {"components": components, "servers": [{"url": f"{settings.root_path}/"}]}

    async def describe(_request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", describe, methods=["GET"])
