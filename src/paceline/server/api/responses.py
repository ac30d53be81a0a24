"""/v1/responses: a conversation and its answer as items; responses can be continued by id."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.decoding.types import FinishReason, Piece
from paceline.server.api.chat import Chat
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.api.response_body import CALLABLE, LOGPROBS, ResponsesBody
from paceline.server.api.response_items import (
    Place,
    content_of,
    conversation,
    custom_input,
    item_id,
    item_of,
    joined,
)
from paceline.server.body import Message
from paceline.server.errors import ApiError
from paceline.server.http import event
from paceline.server.json_body import OtherTool, tool_call
from paceline.server.service import Service
from paceline.server.stream_text import Delta
from paceline.tools.calls import Part, PartKind

_ENCRYPTED = "reasoning.encrypted_content"

_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""A chat body's field -> the field here."""

_EVENTS = {
    PartKind.REASONING: "response.reasoning_text",
    PartKind.TEXT: "response.output_text",
    PartKind.CALL: "response.function_call_arguments",
}
"""The prefix of event names for a part's text."""


class Responses(ApiRequest[ResponsesBody]):
    body_kind = ResponsesBody
    kind = chunk_kind = "response"
    id_prefix = "resp_"

    def __init__(self, service: Service, body: ResponsesBody, client: int) -> None:
        super().__init__(service, body, client)
        earlier = tuple[Message, ...]()
        if body.previous_response_id is not None:
            earlier = service.stored.messages(client, body.previous_response_id)
        stored_item = partial(service.stored.item, client)
        self._messages = conversation(earlier, body.input, stored_item, body.offered.name_of)
        try:
            self._chat = Chat(service, body.chat(self._messages))
        except ApiError as error:
            error.fields["param"] = _PARAMS.get(error.fields["param"], error.fields["param"])
            raise
        self.requests = self._chat.requests
        self._settings = self.requests[0].request.settings
        self._parts = self._chat.streams[0].parts
        self._events = 0

    def response(self) -> dict[str, Any]:
        self._chat.push(self.answers[0].complete)
        return self._finished()

    def stream_start(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta_events(self, delta: Delta) -> bytes:
        return b"".join(map(self._part_events, self._chat.push(delta)))

    def stream_end(self) -> bytes:
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def error_events(self, error: ApiError) -> bytes:
        fields = {name: error.fields[name] for name in ("code", "message", "param")}
        limited = error.fields["type"] == "rate_limit_error"
        code = "rate_limit_exceeded" if limited else "server_error"  # one of OpenAI's few codes
        failed = {**self._response("failed"), "error": {"code": code, "message": str(error)}}
        return self._event("error", **fields, error=error.fields) + self._event(
            "response.failed", response=failed
        )

    def _part_events(self, part: Part) -> bytes:
        tool, events = self._place_of(part), b""
        output = {"output_index": part.index}
        place = {"item_id": item_id(part, tool), **output}
        called, is_text = part.kind is PartKind.CALL, part.kind is PartKind.TEXT
        place |= {} if called else {"content_index": 0}
        name = "response.custom_tool_call_input" if tool.custom else _EVENTS[part.kind]
        if part.opens:
            item = self._item(part, "in_progress")
            events += self._event("response.output_item.added", **output, item=item)
            if not called:
                content = content_of(part, [], "")
                events += self._event("response.content_part.added", **place, part=content)
        new = part.new
        if tool.custom:
            sent = custom_input(part.text.removesuffix(new))
            new = custom_input(part.text)[len(sent) :]
        if new:
            more = {"logprobs": self._logprobs(part.new_pieces)} if is_text else {}
            events += self._event(f"{name}.delta", **place, delta=new, **more)
        if not part.closes:
            return events
        if tool.custom:
            events += self._event(f"{name}.done", **place, input=custom_input(part.text))
        elif called:
            events += self._event(f"{name}.done", **place, name=tool.name, arguments=part.text)
        else:
            logprobs = self._logprobs(part.pieces)
            more = {"logprobs": logprobs} if is_text else {}
            events += self._event(f"{name}.done", **place, text=part.text, **more)
            content = content_of(part, logprobs)
            events += self._event("response.content_part.done", **place, part=content)
        item = self._item(part, self._status(part))
        return events + self._event("response.output_item.done", **output, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1, **fields}, kind)

    def _finished(self) -> dict[str, Any]:
        """Return the response with all parts; store it, if the request allows it."""
        (answer,) = self.answers
        completed = answer.finish_reason != FinishReason.LENGTH
        cost = self._usage()
        cached = cost["prompt_tokens_details"]["cached_tokens"]
        response = {
            **self._response("completed" if completed else "incomplete"),
            "incomplete_details": None if completed else {"reason": "max_output_tokens"},
            "completed_at": self._service.now() if completed else None,
            "output": [self._item(part, self._status(part)) for part in self._parts],
            "usage": {
                "input_tokens": cost["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": cost["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": cost["total_tokens"],
            },
            **self._telemetry(),
        }
        if self._body.store:
            *messages, last = self._messages
            if last.role != "assistant" or last.tool_calls:
                messages.append(last)
                last = Message(role="assistant")
            self._service.stored.add(self._client, response, [*messages, self._continued(last)])
        return response

    def _continued(self, message: Message) -> Message:
        """Return an assistant message continued by the answer, without an incomplete call."""
        answer = self._chat.streams[0]
        calls = [
            tool_call(part.call_id, part.name, part.text) for part in answer.calls if part.whole
        ]
        new = Message(
            role="assistant",
            content=answer.text(PartKind.TEXT),
            reasoning_content=answer.text(PartKind.REASONING) or None,
            tool_calls=calls or None,
        )
        return joined(message, new, "")

    def _status(self, part: Part) -> str:
        """Return the status of a part that has ended; only the last one can be incomplete."""
        answer = self.answers[0]
        last = answer.result is not None and part is self._parts[-1]
        return "incomplete" if last and answer.finish_reason == FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        tools = [tool for tool in body.tools if not isinstance(tool, OtherTool)]
        choice = body.tool_choice
        return {
            "id": self._base["id"],
            "object": "response",
            "created_at": self._base["created"],
            "model": self._service.name,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": self._settings["temperature"].value,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": [_echo(tool.model_dump(exclude_unset=True)) for tool in tools],
            "top_p": self._settings["top_p"].value,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        encrypted = _ENCRYPTED in self._body.include
        logprobs = self._logprobs(part.pieces)
        return item_of(part, self._place_of(part), status, logprobs, encrypted=encrypted)

    def _place_of(self, part: Part) -> Place:
        return self._body.offered.place_of(part.name)

    def _logprobs(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        if LOGPROBS not in self._body.include:
            return []
        return chat_logprobs(self._service.token_bytes, pieces)


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool for a response, with the fields that clients require."""
    if tool["type"] == "namespace":
        return {**tool, "tools": [inner for inner in tool["tools"] if inner["type"] in CALLABLE]}
    return tool if tool["type"] == "custom" else {"parameters": {}, "strict": True, **tool}
