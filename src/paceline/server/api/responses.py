"""POST /v1/responses: text in, text out, nothing kept between requests."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.decoding.types import FinishReason
from paceline.server.api.bodies import MOST_MESSAGES, Effort, Message
from paceline.server.api.errors import Refused
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.api.schema import Body, Common, NamedSchema, ResponseFormat, read
from paceline.server.api.sse import event
from paceline.server.api.tool_calls import turns
from paceline.server.api.usage import telemetry, usage
from paceline.server.delivery import News
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Piece

_LOGPROBS = "message.output_text.logprobs"


class Format(Body):
    """What the text has to look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    wanted: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    """How the text is to be."""

    format: Format = Format()


def _messages(value: Any) -> Any:
    """A text is a user's message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Reasoning(Body):
    """How much the model is to think."""

    effort: Effort | None = None


class ResponsesBody(Common):
    """POST /v1/responses."""

    input: Annotated[
        list[Message], BeforeValidator(_messages, json_schema_input_type=str | list[Message])
    ] = Field(min_length=1, max_length=MOST_MESSAGES)
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
    def _fits(self) -> "ResponsesBody":
        for name, given in (
            ("previous_response_id", self.previous_response_id),
            ("conversation", self.conversation),
            ("background", self.background),
        ):
            if given:
                raise Refused(
                    f"{name}: nothing is kept here; send the whole conversation as input",
                    param=name,
                )
        if self.tools:
            raise Refused("this path takes no tools; use /v1/chat/completions", param="tools")
        if self.truncation == "auto":
            raise Refused("nothing is cut off here; shorten the input", param="truncation")
        if self.n != 1:
            raise Refused("this path gives one answer", param="n")
        form = self.text.format
        if form.type == "json_schema" and form.wanted is None:
            raise Refused("text.format.schema: is missing", param="text.format.schema")
        if form.type != "text":
            named = NamedSchema(schema=form.wanted) if form.wanted is not None else None
            self.response_format = ResponseFormat(type=form.type, json_schema=named)
        return self

    @property
    def most(self) -> int | None:
        """Tokens in the answer."""
        return None if self.max_output_tokens == -1 else self.max_output_tokens


class Responses:
    """A request that was understood, and how its answer is written down."""

    def __init__(self, service: Service, text: bytes) -> None:
        """Understand a body. Raises Refused or PacelineError when it cannot be served."""
        body = read(ResponsesBody, text)
        service.check_model(body.model)
        self._service, self._body = service, body
        self.streamed = body.stream
        chat = turns(body.input, service.files.thinking())
        if body.instructions:
            chat.insert(0, {"role": "system", "content": body.instructions})
        effort = body.reasoning.effort
        extra = service.files.thinking().effort(effort) if effort else {}
        prompt, thoughts = service.rendered(chat, extra=extra)
        self._tokens = service.prompt(prompt)
        options: dict[str, Any] = {}
        if _LOGPROBS in body.include:
            options["logprobs"] = body.top_logprobs
        if body.response_format is None and body.structured_outputs is None:
            options["thoughts"] = thoughts
        self.asks = service.asks(body, self._tokens, **options)
        self._settings = self.asks[0].request.settings
        self._id = f"resp_{secrets.token_hex(16)}"
        self._message = f"msg_{secrets.token_hex(16)}"
        self._created = service.now()
        self._told = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response that is sent at once."""
        (answer,) = answers
        ended = answer.finish_reason != FinishReason.LENGTH
        found = self._response("completed" if ended else "incomplete")
        cost = usage([len(self._tokens)], answers)
        return {
            **found,
            "incomplete_details": None if ended else {"reason": "max_output_tokens"},
            "output": [self._item(answer)],
            "usage": {
                "input_tokens": cost["prompt_tokens"],
                "input_tokens_details": cost["prompt_tokens_details"],
                "output_tokens": cost["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": cost["total_tokens"],
            },
            **telemetry(answers, steps=self._body.speculation.pieces),
        }

    def opening(self) -> bytes:
        """A response with one message in it, which has one empty part."""
        begun = self._response("in_progress")
        item = {**self._item(None), "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=self._part("", ()))
        )

    def news(self, news: News, answers: Sequence[Answer]) -> bytes:
        """More text."""
        text, pieces = news.part.text, news.part.pieces
        if not text:
            return b""
        told = self._logprobs(pieces)
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=told)

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The message as a whole, and what was used."""
        (answer,) = answers
        whole = self.whole(answers)
        part = self._part(answer.text, answer.pieces)
        logprobs = part["logprobs"]
        return (
            self._event(
                "response.output_text.done", **self._place, text=answer.text, logprobs=logprobs
            )
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=self._item(answer))
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def failure(self, error: Refused) -> bytes:
        """An error in the middle."""
        about = {name: error.about[name] for name in ("code", "message", "param")}
        return self._event("error", **about, error=error.about)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **said: Any) -> bytes:
        self._told += 1
        return event({"type": kind, "sequence_number": self._told - 1, **said}, kind)

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
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
        ended = answer is not None and answer.finish_reason != FinishReason.LENGTH
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": "completed" if ended else "incomplete",
            "content": [] if answer is None else [self._part(answer.text, answer.pieces)],
        }

    def _part(self, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        logprobs = self._logprobs(pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        if _LOGPROBS not in self._body.include:
            return []
        return chat_logprobs(self._service.words, pieces)
