"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from typing import Any

from paceline.decoding.types import FinishReason
from paceline.server.api.chat import Chat
from paceline.server.api.endpoint import ApiRequest, Endpoint, reading
from paceline.server.api.messages_body import MessagesBody
from paceline.server.errors import ApiError
from paceline.server.http import event
from paceline.server.json_body import parse
from paceline.server.service import Service
from paceline.server.stream_text import Delta
from paceline.tools.calls import Part, PartKind

_SIGNATURE = "unsigned"
"""The signature of reasoning, which clients send back; it is not verified."""

_DELTAS = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
"""Type of a part's delta, and the field with the new text."""


class Messages(ApiRequest[MessagesBody]):
    body_kind = MessagesBody
    kind = chunk_kind = "message"
    id_prefix = "msg_"
    keepalive = event({"type": "ping"}, "ping")

    def __init__(self, service: Service, body: MessagesBody, client: int) -> None:
        super().__init__(service, body, client)
        self._chat = Chat(service, body.chat(service.files.thinking))
        self.requests = self._chat.requests

    def response(self) -> dict[str, Any]:
        content = [_block(part) for part in self._chat.push(self.answers[0].complete)]
        ended = {**self._stop_fields(), "usage": self._cost()}
        return {**self._message(), "content": content, **ended, **self._telemetry()}

    def stream_start(self) -> bytes:
        usage = {"input_tokens": len(self.prompts[0]), "output_tokens": 0}
        message = {**self._message(), "usage": {**_NOTHING_CACHED, **usage}}
        return _event("message_start", message=message) + self.keepalive

    def delta_events(self, delta: Delta) -> bytes:
        return b"".join(map(_part_events, self._chat.push(delta)))

    def stream_end(self) -> bytes:
        ended = {"delta": self._stop_fields(), "usage": self._cost(), **self._telemetry()}
        return _event("message_delta", **ended) + _event("message_stop")

    def error_events(self, error: ApiError) -> bytes:
        return event(error.body_for("/messages"), "error")

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._base["id"],
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop_fields(self) -> dict[str, Any]:
        answer = self.answers[0]
        stopped = answer.done.stopped_by
        if answer.finish_reason == FinishReason.LENGTH:
            max_tokens = self.requests[0].request.settings["max_tokens"].value
            limited = max_tokens is not None and answer.tokens >= max_tokens
            reason = "max_tokens" if limited else "model_context_window_exceeded"
        elif stopped is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._chat.streams[0].calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _cost(self) -> dict[str, Any]:
        """Return Anthropic's usage: input tokens exclude those from the cache."""
        cost = self._usage()
        cached = cost["prompt_tokens_details"]["cached_tokens"]
        return {
            **_NOTHING_CACHED,
            "input_tokens": cost["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": cost["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.answers[0].reasoning_tokens},
        }


_NOTHING_CACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def count_tokens(service: Service) -> Endpoint:
    def count(text: bytes) -> dict[str, int]:
        body = parse(MessagesBody, text)
        service.check_model(body.model)
        prompt = service.prompts.chat(body.chat(service.files.thinking)).text
        service.prompts.check_length(prompt)
        return {"input_tokens": len(service.files.control_text.encode(prompt))}

    return reading(service, count)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _part_events(part: Part) -> bytes:
    place, events = {"index": part.index}, b""
    kind, name = _DELTAS[part.kind]
    if part.opens:
        events += _event("content_block_start", **place, content_block=_block(part, started=True))
    if part.new:
        events += _event("content_block_delta", **place, delta={"type": kind, name: part.new})
    if part.closes:
        if part.kind is PartKind.REASONING:
            signed = {"type": "signature_delta", "signature": _SIGNATURE}
            events += _event("content_block_delta", **place, delta=signed)
        events += _event("content_block_stop", **place)
    return events


def _block(part: Part, *, started: bool = False) -> dict[str, Any]:
    """Return the content block of a part; a `started` block is empty."""
    text = "" if started else part.text
    if part.kind is PartKind.REASONING:
        signature = "" if started else _SIGNATURE
        return {"type": "thinking", "thinking": text, "signature": signature}
    if part.kind is PartKind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    arguments = {} if started else json.loads(text)
    called = part.call_id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": called, "name": part.name, "input": arguments}
