"""The ASGI application: routes, middleware and error handlers.

Invariant: clients get the error object of the path's API, OpenAI's or Anthropic's, for every error.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import HTTPExceptionHandler

from paceline.server import page
from paceline.server.api.chat import Chat
from paceline.server.api.completions import Completions
from paceline.server.api.embeddings import embeddings
from paceline.server.api.endpoint import Host, generation, observed, reading
from paceline.server.api.info import InfoHandlers
from paceline.server.api.messages import Messages, count_tokens
from paceline.server.api.openapi import BODIES, openapi_route
from paceline.server.api.responses import Responses, StoredResponses
from paceline.server.errors import ApiError
from paceline.server.http import ApiKeyMiddleware, HostMiddleware
from paceline.server.service import Service

_PUBLIC = ("/health", "/v1/health", "/openapi.json")
"""Paths without a key: health checks have none, nor has a link of the page."""


def make_app(service: Service) -> Starlette:
    """The application of `service`: every path with the prefix /v1 and without it."""
    info = InfoHandlers(service)
    posts: dict[str, Any] = {
        "/chat/completions": generation(service, Chat),
        "/completions": generation(service, Completions),
        "/responses": generation(service, Responses),
        "/embeddings": embeddings(service),
        "/messages": generation(service, Messages),
        "/messages/count_tokens": count_tokens(service),
        "/tokenize": reading(service, info.tokenize),
        "/detokenize": reading(service, info.detokenize),
    }
    stored = StoredResponses(service.stored)
    gets: dict[str, Any] = {
        "/models": info.models,
        "/models/{name:path}": info.model,
        "/responses/{response_id}": stored.get,
        "/health": info.health,
        "/tokenizer_info": info.tokenizer_info,
    }
    all_routes = [*service.metrics.routes(), openapi_route(service.settings)]
    for prefix in ("/v1", ""):
        all_routes += [Route(prefix + path, work, methods=["POST"]) for path, work in posts.items()]
        all_routes += [Route(prefix + path, work, methods=["GET"]) for path, work in gets.items()]
        all_routes.append(
            Route(prefix + "/responses/{response_id}", stored.delete, methods=["DELETE"])
        )
    return application(service, all_routes)


def application(host: Host, routes: Sequence[BaseRoute]) -> Starlette:
    """An application of `routes` and the page, with the middleware and errors of every server.

    The page needs no key: a browser that opens it has none yet.
    """
    pages, settings = page.routes(), host.settings
    layers = [Middleware(HostMiddleware, settings, host.on_error)]
    if settings.origins:
        # Before the key check: a browser's preflight request has no key.
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
        routes=[*pages, *routes],
        middleware=layers,
        exception_handlers=dict.fromkeys(handled, _error_handler(host)),
    )


def _error_handler(host: Host) -> HTTPExceptionHandler:
    """The handler of errors outside of endpoints."""

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
