"""Endpoints without generation: models, health, tokenization and detokenization."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import AliasChoices, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.drafters import DrafterSpec
from paceline.server.body import MAX_MESSAGES, Message
from paceline.server.errors import field_error
from paceline.server.json_body import Body, parse
from paceline.server.service import Service

_STUCK_SECONDS = 120.0
"""Duration of a forward pass, or of reading a body, that is reported as stuck."""


class TokenizeBody(Body):
    """POST /tokenize: a `prompt` or `messages` as in vLLM, or `content` as in llama.cpp."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    add_special_tokens: bool = Field(
        default=True, validation_alias=AliasChoices("add_special_tokens", "add_special")
    )
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False

    @model_validator(mode="before")
    @classmethod
    def _llama_defaults(cls, data: Any) -> Any:
        # llama.cpp, whose field is `content`, adds no special tokens by default.
        if isinstance(data, Mapping) and data.get("content") is not None:
            return {"add_special": False, **data}
        return data


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class InfoHandlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        """Reply 200 if requests are accepted; 503 at shutdown or if forward passes fail or hang."""
        scheduler = self._service.scheduler
        if scheduler.draining:
            return JSONResponse({"status": "draining"}, 503)
        if scheduler.failing or not scheduler.alive:
            return JSONResponse({"status": "error"}, 503)
        readers = self._service.readers
        if max(scheduler.batcher.call_seconds, readers.busy_seconds) > _STUCK_SECONDS:
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, _request: Request) -> Response:
        return JSONResponse(model_list([self._model()]))

    async def model(self, request: Request) -> Response:
        """Reply with a model; without a name, with the list. Raises ApiError for other names."""
        if not request.path_params["name"]:
            return await self.models(request)
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def tokenizer_info(self, _request: Request) -> Response:
        """Reply with the data that lm-evaluation-harness needs to use the server's tokenizer."""
        facts = self._service.files.facts
        return JSONResponse(
            {
                "eos_token": facts.eos_token,
                "bos_token": facts.bos_token,
                "chat_template": self._service.files.chat_template,
            }
        )

    def _model(self) -> dict[str, Any]:
        service = self._service
        drafter = service.model.drafting.resolve(DrafterSpec.parse(service.settings.drafter))
        engine = service.model.engine.describe()
        return model_entry(
            service.name,
            service.created,
            max_model_len=service.max_length,
            drafter=drafter.without_folders,
            defaults={
                name: setting.value
                for name, setting in service.defaults.resolve(service.limit).items()
            },
            device=engine.get("device", engine.get("units", "the CPU")),
        )

    def tokenize(self, text: bytes) -> dict[str, Any]:
        body = parse(TokenizeBody, text)
        service = self._service
        service.check_model(body.model)
        if body.messages is not None:
            chat = service.prompts.template_chat(body.messages)
            prompt = service.prompts.render(chat, {}, generate=body.add_generation_prompt)
            tokens = service.files.control_text.encode(prompt.text)
        else:
            content = body.prompt if body.content is None else body.content
            if content is None:
                raise field_error("prompt", "is missing")
            service.prompts.check_length(content)
            tokens = service.tokenizer.encode(content, special=body.parse_special)
            if not body.add_special_tokens:
                tokens = self._without_bos(content, tokens)
        names = [service.token_bytes.name(token) for token in tokens]
        listed: list[Any] = list(tokens)
        if body.with_pieces:
            listed = [{"id": i, "piece": name} for i, name in zip(tokens, names, strict=True)]
        return {
            "count": len(tokens),
            "max_model_len": service.max_length,
            "tokens": listed,
            "token_strs": names if body.return_token_strs else None,
        }

    def detokenize(self, text: bytes) -> dict[str, str]:
        body = parse(DetokenizeBody, text)
        self._service.check_model(body.model)
        decoded = self._service.token_bytes.text(body.tokens)
        return {"prompt": decoded, "content": decoded}

    def _without_bos(self, text: str, tokens: list[int]) -> list[int]:
        """Remove the beginning-of-sequence token, unless the text itself begins with it."""
        facts = self._service.files.facts
        added = facts.add_bos and tokens[:1] == [facts.bos_token_id]
        return tokens[1:] if added and not text.startswith(facts.bos_token or "\0") else tokens


def model_entry(name: str, created: int = 0, **more: Any) -> dict[str, Any]:
    """Return a model's entry, which combines the formats of OpenAI and Anthropic.

    `created` is in seconds since 1970, or 0 if it is unknown.
    """
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    anthropic = {"type": "model", "display_name": name, "created_at": at}
    openai = {"object": "model", "created": created, "owned_by": "paceline", "root": name}
    return {"id": name, **openai, **anthropic, **more}


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of all entries, which is Anthropic's first and last page."""
    ids = [entry["id"] for entry in entries]
    page = {
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
    return {"object": "list", "data": [*entries], **page}
