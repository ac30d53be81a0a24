"""GET /openapi.json, from the models that parse the requests."""

import re
from collections.abc import Collection
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline import __version__
from paceline.server.api.info import DetokenizeBody, TokenizeBody
from paceline.server.api.messages_body import MessagesBody
from paceline.server.api.response_body import ResponsesBody
from paceline.server.body import ChatBody, CompletionBody, EmbeddingsBody
from paceline.server.json_body import Body

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_READ = ("/v1/models", "/v1/models/{name}", "/health", "/tokenizer_info", "/metrics")
_STORED = "/v1/responses/{response_id}"
_ERROR = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
"""OpenAI's error and Anthropic's."""
_RESPONSES = {
    "200": {"description": "The answer"},
    "default": {"description": "An error", "content": _ERROR},
}


def openapi_route(without: Collection[str] = ()) -> Route:
    """GET /openapi.json: an OpenAPI 3.1 document, without the paths that a server does not have."""
    schemas, objects = models_json_schema(
        [(kind, "validation") for kind in _BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {
        path: {"get": {"responses": _RESPONSES}, "parameters": _parameters(path)}
        for path in (*_READ, _STORED)
        if path not in without
    }
    paths[_STORED]["delete"] = {"responses": _RESPONSES}
    for path, kind in _BODIES.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"requestBody": body, "responses": _RESPONSES}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "paceline", "version": __version__},
        "paths": paths,
        "components": {"schemas": objects["$defs"]},
    }

    async def describe(_request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", describe, methods=["GET"])


def _parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [
        {"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names
    ]
