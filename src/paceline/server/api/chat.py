"""POST /v1/chat/completions."""

import secrets
from collections.abc import Sequence
from typing import Any

from paceline.decoding.types import FinishReason
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.body import ChatBody
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Delta, Piece
from paceline.server.tools import Tool
from paceline.tools.calls import CallPiece, CallStream, Part, ToolCall, parse_tool_calls
from paceline.tools.forms import ToolForm


class Chat(ApiRequest[ChatBody]):
    body_kind = ChatBody
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: ChatBody, client: int = 0) -> None:
        super().__init__(service, body, client)
        self.requests = service.prepare(body)
        self._predicted = body.prediction is not None
        self._tokens = self.requests[0].tokens
        self.forced = body.forced
        self.tool_form = service.answer_form if body.calling else None
        self.functions = function_schemas(body.tools)
        self.call_streams = [
            CallStream(self.tool_form, self.functions, forced=body.forced)
            for _ in self.requests
            if self.tool_form
        ]
        self._called: set[int] = set()

    def response(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            content: str | None = answer.text
            calls: tuple[ToolCall, ...] = ()
            if self.tool_form:
                content, calls = parse_tool_calls(
                    answer.signed, self.tool_form, self.functions, forced=self.forced
                )
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                listed = [_called(call.name, call.arguments, self.tool_form) for call in calls]
                message |= {"content": content or None, "tool_calls": listed}
            message |= self._reasoning(answer.reasoning)
            reason = _finish_reason(answer, called=bool(calls))
            choices.append(self._choice(index, {"message": message}, answer.pieces, reason))
        more = {"prompt_token_ids": self._tokens} if self._body.return_token_ids else {}
        return self._whole(choices, **more)

    def delta_events(self, delta: Delta) -> bytes:
        index, pieces, events = delta.index, delta.pieces, b""
        if reasoning := self._reasoning(delta.reasoning):
            # If a step has both thoughts and text, its tokens are sent with the thoughts.
            events = self._delta_chunk(index, reasoning, pieces)
            pieces = []
        parts: list[Part] = [delta.text] if delta.text else []
        if self.tool_form:
            stream = self.call_streams[index]
            split = [*stream.push(delta.signed), *(stream.finish() if delta.finished else ())]
            parts = [part for part in split if isinstance(part, str) or part.name or part.arguments]
        if not parts and self._lists_tokens(pieces, logprobs=self._body.logprobs):
            parts = [""]
        for part in parts:
            if isinstance(part, str):
                fields: dict[str, Any] = {"content": part}
            else:
                self._called.add(index)
                fields = {"tool_calls": [self._call_delta(part)]}
            events += self._delta_chunk(index, fields, pieces)
            pieces = []
        if delta.finished:
            if index not in self._sent:
                events += self._delta_chunk(index, {"content": ""}, ())
            reason = _finish_reason(self.answers[index], called=index in self._called)
            events += self._delta_chunk(index, {}, (), reason)
        return events

    def _call_delta(self, piece: CallPiece) -> dict[str, Any]:
        """A part of a call; only the first has the name and an id."""
        if not piece.name:
            return {"index": piece.call, "function": {"arguments": piece.arguments}}
        return {"index": piece.call, **_called(piece.name, piece.arguments, self.tool_form)}

    def _reasoning(self, text: str) -> dict[str, str]:
        """The fields of a message or delta for thoughts."""
        if not (text and self._body.include_reasoning):
            return {}
        return {"reasoning_content": text, "reasoning": text}  # llama.cpp's name, and vLLM's

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], pieces: Sequence[Piece], reason: str | None = None
    ) -> bytes:
        more = {}
        if index not in self._sent:
            delta = {"role": "assistant", **delta}
            more = {"prompt_token_ids": self._tokens} if self._body.return_token_ids else {}
        choice = self._choice(index, {"delta": delta}, pieces, reason)
        return self._chunk(choice, last=reason is not None, **more)

    def _choice(
        self, index: int, content: dict[str, Any], pieces: Sequence[Piece], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and (pieces or not self._body.stream):
            listed = chat_logprobs(self._service.token_bytes, pieces)
            logprobs = {"content": listed, "refusal": None}
        fields = {"logprobs": logprobs, **self._token_fields(pieces), "finish_reason": reason}
        return {"index": index, **content, **fields}


def function_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """A function's name -> the JSON schema of its arguments."""
    return {tool.function.name: tool.function.parameters for tool in tools}


def call_id(form: ToolForm | None) -> str:
    """A new id of a call, as the model's chat template demands."""
    length = form.id_length if form else None
    return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def _called(name: str, arguments: str, form: ToolForm | None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(form), "type": "function", "function": function}


def _finish_reason(answer: Answer, *, called: bool) -> str:
    if called and answer.finish_reason == FinishReason.STOP:
        return "tool_calls"
    return str(answer.finish_reason)
