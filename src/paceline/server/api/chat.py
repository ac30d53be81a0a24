"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from paceline.decoding.types import FinishReason, Piece
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.body import ChatBody
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Delta
from paceline.tools.calls import Part, PartKind, PartStream


class Chat(ApiRequest[ChatBody]):
    body_kind = ChatBody
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: ChatBody, client: int = 0) -> None:
        super().__init__(service, body, client)
        self.requests = service.chat(body)
        self._predicted = body.prediction is not None
        self._tokens = self.requests[0].tokens
        form = service.answer_form if body.calling else None
        functions = {tool.function.name: tool.function.parameters for tool in body.tools}
        self.streams = [
            PartStream(form, functions, whole=not body.stream, forced=body.forced)
            for _ in self.requests
        ]
        """The parts of the answers."""

    def push(self, delta: Delta) -> list[Part]:
        """Divide an answer's new text into parts, as `PartStream.push` does."""
        reasoning = delta.reasoning if self._body.include_reasoning else ""
        stream = self.streams[delta.index]
        return stream.push(delta.text, reasoning, delta.pieces, end=delta.finished)

    def response(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            self.push(answer.complete)
            stream = self.streams[index]
            content, calls = stream.text(PartKind.TEXT), [*map(_tool_call, stream.calls)]
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            if thoughts := stream.text(PartKind.REASONING):
                message |= _reasoning(thoughts)
            reason = _finish_reason(answer, called=bool(calls))
            choices.append(self._choice(index, {"message": message}, answer.pieces, reason))
        more = {"prompt_token_ids": self._tokens} if self._body.return_token_ids else {}
        return self._complete_response(choices, **more)

    def delta_events(self, delta: Delta) -> bytes:
        index, pieces, events = delta.index, delta.pieces, b""
        for part in self.push(delta):
            # The first chunk of a step has all of its tokens.
            if part.new or (part.opens and part.kind is PartKind.CALL):
                events += self._delta_chunk(index, self._fields(part, index), pieces)
                pieces = ()
        if self._lists_tokens(pieces, logprobs=self._body.logprobs):
            events += self._delta_chunk(index, {"content": ""}, pieces)
        if delta.finished:
            if index not in self._sent:
                events += self._delta_chunk(index, {"content": ""}, ())
            reason = _finish_reason(self.answers[index], called=bool(self.streams[index].calls))
            events += self._delta_chunk(index, {}, (), reason)
        return events

    def _fields(self, part: Part, index: int) -> dict[str, Any]:
        """Return a part's new fields; only the first chunk of a call has its name and id."""
        if part.kind is PartKind.REASONING:
            return _reasoning(part.new)
        if part.kind is PartKind.TEXT:
            return {"content": part.new}
        call = _tool_call(part) if part.opens else {"function": {"arguments": part.new}}
        return {"tool_calls": [{"index": self.streams[index].calls.index(part), **call}]}

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


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}  # llama.cpp's name, and vLLM's


def _tool_call(part: Part) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.text}
    return {"id": part.call_id, "type": "function", "function": function}


def _finish_reason(answer: Answer, *, called: bool) -> str:
    if called and answer.finish_reason == FinishReason.STOP:
        return "tool_calls"
    return str(answer.finish_reason)
