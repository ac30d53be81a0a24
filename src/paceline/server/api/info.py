"""The paths that the model has no work with: who is served, tokens and back, health."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.api.bodies import DetokenizeBody, TokenizeBody
from paceline.server.api.endpoint import Endpoint
from paceline.server.api.errors import Refused, too_long
from paceline.server.api.schema import read
from paceline.server.api.sse import Reply
from paceline.server.api.tool_calls import spelt_out, turns
from paceline.server.service import Service

_STUCK_SECONDS = 120.0
"""A call of the engine that takes longer will hardly end."""


class Plain:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        """Answer for `service`."""
        self._service = service

    async def health(self, _request: Request) -> Response:
        """Whether requests are taken: 200.

        503 when the server ends, when no call succeeds, or the engine does not return from one.
        """
        scheduler = self._service.scheduler
        if scheduler.draining:
            return JSONResponse({"status": "draining"}, 503)
        if scheduler.failing or not scheduler.alive:
            return JSONResponse({"status": "error"}, 503)
        if scheduler.call_seconds > _STUCK_SECONDS:
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, _request: Request) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of a name. Raises Refused when it is another."""
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def tokenizer_info(self, _request: Request) -> Response:
        """What lm-evaluation-harness asks a server for whose tokenizer it uses."""
        facts = self._service.files.facts
        return JSONResponse(
            {
                "eos_token": facts.eos_token,
                "bos_token": facts.bos_token,
                "chat_template": self._service.files.chat_template,
            }
        )

    def tokenize(self) -> Endpoint:
        """POST /tokenize."""

        async def work(body: bytes, reply: Reply) -> None:
            await reply.json(await self._service.apart(self._tokens, body))

        return Endpoint(self._service, work)

    def detokenize(self) -> Endpoint:
        """POST /detokenize."""

        async def work(body: bytes, reply: Reply) -> None:
            text = await self._service.apart(self._text, body)
            await reply.json({"prompt": text, "content": text})

        return Endpoint(self._service, work)

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "paceline",
            "root": service.name,
            "max_model_len": service.context,
        }

    def _tokens(self, text: bytes) -> dict[str, Any]:
        body = read(TokenizeBody, text)
        service = self._service
        service.check_model(body.model)
        if body.messages is not None:
            chat = turns(body.messages, service.files.thinking())
            chat = chat if service.knows_tools else spelt_out(chat, [])
            prompt = service.rendered(chat, answer=body.add_generation_prompt).text
            tokens = service.tokenizer.encode(prompt, special=True)
        else:
            given = body.prompt if body.content is None else body.content
            if given is None:
                raise Refused("prompt: is missing", param="prompt")
            least = service.words.least(given)
            if least > service.context:
                raise too_long(least, service.context, at_least=True)
            tokens = service.tokenizer.encode(given, special=body.parse_special)
            if not body.add_special_tokens:
                tokens = self._without_beginning(given, tokens)
        names = [service.words.name(token) for token in tokens]
        listed: list[Any] = list(tokens)
        if body.with_pieces:
            listed = [{"id": i, "piece": name} for i, name in zip(tokens, names, strict=True)]
        return {
            "count": len(tokens),
            "max_model_len": service.context,
            "tokens": listed,
            "token_strs": names if body.return_token_strs else None,
        }

    def _text(self, text: bytes) -> str:
        body = read(DetokenizeBody, text)
        self._service.check_model(body.model)
        return self._service.words.text(body.tokens)

    def _without_beginning(self, text: str, tokens: list[int]) -> list[int]:
        """Tokens without the beginning-of-sequence token, unless the text itself begins with it."""
        facts = self._service.files.facts
        added = facts.add_bos and tokens[:1] == [facts.bos_token_id]
        return tokens[1:] if added and not text.startswith(facts.bos_token or "\0") else tokens
