"""GET /openapi.json, generated from the models that parse the requests, and /docs, a page of it."""

from collections.abc import Collection
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline import __version__
from paceline.server.api.info import DetokenizeBody, TokenizeBody
from paceline.server.api.messages_body import MessagesBody
from paceline.server.api.response_body import ResponsesBody
from paceline.server.body import ChatBody, CompletionBody, EmbeddingsBody
from paceline.server.errors import is_anthropic
from paceline.server.json_body import Body
from paceline.server.page import page_route
from paceline.server.page.reference import reference

_POSTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_GETS = {
    "/v1/models": "The served models",
    "/health": "Whether requests are accepted",
    "/tokenizer_info": "Special tokens and the chat template",
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_MODEL, _STORED = "/v1/models/{name}", "/v1/responses/{response_id}"
_METRICS = "/metrics"

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_routes(without: Collection[str] = ()) -> list[BaseRoute]:
    """GET /openapi.json and /docs: the document, without the paths that a server does not have."""
    document = openapi()
    for path in without:
        del document["paths"][path]

    async def describe(_request: Request) -> Response:
        return JSONResponse(document)

    return [
        Route("/openapi.json", describe, methods=["GET"]),
        page_route("/docs", reference(document), "html"),
    ]


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the server."""
    named, schemas = models_json_schema(
        [(kind, "validation") for kind in _POSTS.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": (kind.__doc__ or "").partition("\n")[0],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": named[kind, "validation"]}},
                },
                "responses": _responses(path),
            }
        }
        for path, kind in _POSTS.items()
    }
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path)}}
    paths[_METRICS] = {
        "get": {"summary": "Prometheus metrics", "responses": _responses(_METRICS)},
    }
    paths[_MODEL] = {
        "parameters": [_in_path("name")],
        "get": {"summary": "A served model", "responses": _responses(_MODEL)},
    }
    paths[_STORED] = {
        "parameters": [_in_path("response_id")],
        "get": {"summary": "A stored response", "responses": _responses(_STORED)},
        "delete": {"summary": "Forget a stored response", "responses": _responses(_STORED)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "paceline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                **schemas.get("$defs", {}),
            }
        },
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _responses(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path == _METRICS:
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {}}
    name = "AnthropicError" if is_anthropic(path) else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "An error", "content": error},
    }
