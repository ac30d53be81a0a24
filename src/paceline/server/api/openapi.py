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
from paceline.server.settings import Settings

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_STORED = "/v1/responses/{response_id}"
_READ = ("/v1/models", "/v1/models/{name}", _STORED, "/health", "/tokenizer_info", "/metrics")
_RESPONSES = {"200": {"description": "The answer"}, "default": {"description": "An error"}}


def openapi_route(settings: Settings, without: Collection[str] = ()) -> Route:
    """GET /openapi.json: an OpenAPI 3.1 document, without the paths that a server does not have."""
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
