"""The server as an ASGI application: which path is answered by whom, and what stands before them.

Knows Starlette. The rule: whatever goes wrong anywhere, clients get OpenAI's error object.
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

from paceline.server.api.chat import Chat
from paceline.server.api.completions import Completions
from paceline.server.api.endpoint import generating, report
from paceline.server.api.errors import Refused, refused
from paceline.server.api.info import Plain
from paceline.server.api.openapi import described
from paceline.server.api.responses import Responses
from paceline.server.middleware import Door, Keys
from paceline.server.service import Service

_PUBLIC = ("/health", "/v1/health")
"""What is answered without a key: whoever watches over the server has none."""


def make_app(
    service: Service, routes: Sequence[BaseRoute] = (), page: Sequence[BaseRoute] = ()
) -> Starlette:
    """The application that serves `service`: every path with /v1 before it and without.

    `routes` are others beside its own. `page` are those of a page, which are there without a key: a
    browser that opens it has none yet.
    """
    plain = Plain(service)
    posts: dict[str, Any] = {
        "/chat/completions": generating(service, Chat, templated=True),
        "/completions": generating(service, Completions),
        "/responses": generating(service, Responses, templated=True),
        "/tokenize": plain.tokenize(),
        "/detokenize": plain.detokenize(),
    }
    gets: dict[str, Any] = {
        "/models": plain.models,
        "/models/{name:path}": plain.model,
        "/health": plain.health,
        "/tokenizer_info": plain.tokenizer_info,
    }
    about = described()

    async def openapi(_request: Request) -> Response:
        return JSONResponse(about)

    found: list[BaseRoute] = [*routes, *page, Route("/openapi.json", openapi)]
    for before in ("/v1", ""):
        found += [Route(before + path, work, methods=["POST"]) for path, work in posts.items()]
        found += [Route(before + path, work, methods=["GET"]) for path, work in gets.items()]
    return Starlette(
        routes=found,
        middleware=_middleware(service, [route.path for route in page if isinstance(route, Route)]),
        exception_handlers=dict.fromkeys((HTTPException, Refused, Exception), _answered(service)),
    )


def _middleware(service: Service, page: Sequence[str]) -> list[Middleware]:
    settings = service.settings
    count = service.watch.refused
    found = [Middleware(Door, settings, count)]
    if settings.origins:
        # Before the keys: a browser asks whether it may without bringing one.
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id"],
                expose_headers=["X-Request-Id"],
            )
        )
    return [*found, Middleware(Keys, settings, {*_PUBLIC, *page}, count)]


def _answered(service: Service) -> HTTPExceptionHandler:
    """What answers an error that no endpoint has answered, and has it counted."""

    async def answered(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
            told = Refused(error.detail, status=error.status_code, code=code, headers=error.headers)
        else:
            told = refused(error)
        if told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            report(request.scope.get("state", {}).get("request_id", ""), error)
        service.watch.refused(told)
        return JSONResponse(told.body, told.status, told.headers)

    return answered
