"""POST /v1/responses: text in, text out; the server keeps nothing between requests."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.decoding.types import FinishReason
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.errors import ApiError
from paceline.server.api.http import event
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.api.schema import (
    MAX_MESSAGES,
    Body,
    Effort,
    GenerationBody,
    Message,
    NamedSchema,
    ResponseFormat,
)
from paceline.server.api.tool_calls import template_messages
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Delta, Piece

_LOGPROBS = "message.output_text.logprobs"


class Format(Body):
    """The structure of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    wanted: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    """Options of the text."""

    format: Format = Format()


def _messages(value: Any) -> Any:
    """A text is one user message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Reasoning(Body):
    """Options of the model's thoughts."""

    effort: Effort | None = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    input: Annotated[
        list[Message], BeforeValidator(_messages, json_schema_input_type=str | list[Message])
    ] = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=-1)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: list[str] = Field(default=[])
    top_logprobs: int = Field(default=0, ge=0, le=20)
    metadata: dict[str, str] = Field(default={})
    tools: list[Any] = Field(default=[])
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool = False
    truncation: Literal["disabled", "auto"] = "disabled"

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesBody":
        for name, given in (
            ("previous_response_id", self.previous_response_id),
            ("conversation", self.conversation),
            ("background", self.background),
        ):
            if given:
                raise ApiError(
                    f"{name}: the server keeps no state; send the whole conversation as input",
                    param=name,
                )
        if self.tools:
            raise ApiError("tools are not supported here; use /v1/chat/completions", param="tools")
        if self.truncation == "auto":
            raise ApiError("truncation is not supported; shorten the input", param="truncation")
        if self.n != 1:
            raise ApiError("this endpoint returns one answer", param="n")
        form = self.text.format
        if form.type == "json_schema" and form.wanted is None:
            raise ApiError("text.format.schema: is missing", param="text.format.schema")
        if form.type != "text":
            named = NamedSchema(schema=form.wanted) if form.wanted is not None else None
            self.response_format = ResponseFormat(type=form.type, json_schema=named)
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """Limit of the answer's tokens; None: the rest of the context."""
        return None if self.max_output_tokens == -1 else self.max_output_tokens


class Responses(ApiRequest[ResponsesBody]):
    """A conversation and its answer."""

    body_kind = ResponsesBody
    kind = chunk_kind = "response"
    id_prefix = "resp_"

    def __init__(self, service: Service, text: bytes) -> None:
        """Parse a body. Raises ApiError or PacelineError if it cannot be served."""
        super().__init__(service, text)
        body, thinking = self._body, service.files.thinking()
        chat = template_messages(body.input, thinking)
        if body.instructions:
            chat.insert(0, {"role": "system", "content": body.instructions})
        effort = body.reasoning.effort
        variables = thinking.effort(effort) if effort else {}
        prompt, thoughts = service.render_chat(chat, variables=variables)
        tokens = service.prompt_tokens(prompt)
        self._prompts = [tokens]
        options: dict[str, Any] = {}
        if _LOGPROBS in body.include:
            options["logprobs"] = body.top_logprobs
        if body.response_format is None and body.structured_outputs is None:
            options["thoughts"] = thoughts
        self.requests = service.requests(body, tokens, **options)
        self._settings = self.requests[0].options.settings
        self._message = f"msg_{secrets.token_hex(16)}"
        self._events = 0

    def response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The complete response."""
        (answer,) = answers
        completed = answer.finish_reason != FinishReason.LENGTH
        cost = self._usage(answers)
        return {
            **self._response("completed" if completed else "incomplete"),
            "incomplete_details": None if completed else {"reason": "max_output_tokens"},
            "output": [self._item(answer)],
            "usage": {
                "input_tokens": cost["prompt_tokens"],
                "input_tokens_details": cost["prompt_tokens_details"],
                "output_tokens": cost["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": cost["total_tokens"],
            },
            **self._telemetry(answers),
        }

    def stream_start(self) -> bytes:
        """Events for a response with one message, which has one empty part."""
        response = self._response("in_progress")
        item = {**self._item(None), "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=self._part("", ()))
        )

    def delta_events(self, delta: Delta, answers: Sequence[Answer]) -> bytes:
        """An event for new text."""
        if not delta.text:
            return b""
        more = {"delta": delta.text, "logprobs": self._logprobs(delta.pieces)}
        return self._event("response.output_text.delta", **self._place, **more)

    def stream_end(self, answers: Sequence[Answer]) -> bytes:
        """Events for the complete message and response."""
        (answer,) = answers
        response = self.response(answers)
        part = self._part(answer.text, answer.pieces)
        text = {"text": answer.text, "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._place, **text)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=self._item(answer))
            + self._event(f"response.{response['status']}", response=response)
        )

    def error_events(self, error: ApiError) -> bytes:
        """An event for an error that ends the stream."""
        fields = {name: error.fields[name] for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error.fields)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1, **fields}, kind)

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._base["id"],
            "object": "response",
            "created_at": self._base["created"],
            "model": self._service.name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._settings["temperature"].value,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self._settings["top_p"].value,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, answer: Answer | None) -> dict[str, Any]:
        completed = answer is not None and answer.finish_reason != FinishReason.LENGTH
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": "completed" if completed else "incomplete",
            "content": [] if answer is None else [self._part(answer.text, answer.pieces)],
        }

    def _part(self, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        logprobs = self._logprobs(pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        if _LOGPROBS not in self._body.include:
            return []
        return chat_logprobs(self._service.token_bytes, pieces)
