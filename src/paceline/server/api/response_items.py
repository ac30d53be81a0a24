"""The items of /v1/responses: converts input items to messages, and an answer's parts to items.

Independent of the model. Invariant: an answer and its items become the same messages, so that a
conversation continues identically by `previous_response_id` and by sending its items.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from paceline.server.api.response_tools import Place, custom_input
from paceline.server.body import MAX_MESSAGES, Message
from paceline.server.errors import ApiError
from paceline.server.json_body import Body, Text, tool_call, type_tag
from paceline.server.remembered import Reader
from paceline.tools.calls import Part, PartKind

_PREFIX = {PartKind.REASONING: "rs_", PartKind.TEXT: "msg_", PartKind.CALL: "fc_"}

_OURS = "paceline:"
"""Prefix of our `encrypted_content`, unencrypted because it never leaves the user's machines."""


class FunctionCallItem(Body):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"
    output: Text | None = None
    """The result, if another server ran the function."""


class FunctionOutputItem(Body):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningText(Body):
    """A part of a thought, or of its summary."""

    text: str = ""


class ReasoningItem(Body):
    """The thoughts of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default=[])
    content: list[ReasoningText] = Field(default=[])
    encrypted_content: str | None = None

    @property
    def thoughts(self) -> str:
        """The text of the reasoning; empty if it is encrypted elsewhere and has no summary."""
        if self.content:
            return "".join(part.text for part in self.content)
        if (self.encrypted_content or "").startswith(_OURS):
            try:
                text = (self.encrypted_content or "").removeprefix(_OURS)
                return base64.b64decode(text, validate=True).decode()
            except (binascii.Error, ValueError):
                return ""
        return "\n".join(part.text for part in self.summary)


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    Annotated[Message, Tag("MESSAGE")]
    | Annotated[FunctionCallItem, Tag("FUNCTION_CALL")]
    | Annotated[FunctionOutputItem, Tag("FUNCTION_CALL_OUTPUT")]
    | Annotated[ReasoningItem, Tag("REASONING")]
    | Annotated[ItemReference, Tag("ITEM_REFERENCE")],
    Discriminator(
        lambda value: type_tag(value, "message"),
        custom_error_type="invalid",
        custom_error_message="expected an item with a type",
    ),
]
_ITEM: TypeAdapter[Any] = TypeAdapter(Item)


def conversation(
    earlier: Sequence[Message],
    items: Sequence[Any],
    stored_item: Callable[[str], Any],
    name_of: Callable[[Place], str],
) -> list[Message]:
    """Return the messages of a conversation: `earlier` ones, and those of an input's items.

    `stored_item` returns the item of a stored response by its id, or None; `name_of` returns the
    model's name of a function.

    The items of one answer become one message. Raises ApiError if a function's output has no call
    before it, an item is not stored, or the number of messages is zero or too large.
    """
    old = {"place": "previous_response_id"}
    messages = [message.model_copy(update=old) for message in earlier]
    first = len(messages)  # the first message after the `earlier` ones
    calls = {call.id for message in messages for call in message.tool_calls or ()}
    for place, listed in enumerate(items):
        item = listed
        if isinstance(item, ItemReference):
            stored = stored_item(item.id)
            if stored is None:
                raise ApiError(
                    f"item {item.id[:80]!r} not found; send the item itself",
                    param=f"input[{place}].id",
                )
            item = _ITEM.validate_python(Reader().turn(stored, f"input[{place}]"))
        if isinstance(item, FunctionOutputItem):
            if item.call_id not in calls:
                raise ApiError(
                    f"function call {item.call_id[:80]!r} not found before its output",
                    param=f"input[{place}].call_id",
                )
            message = _result(item, item.output)
        else:
            message = _message(item, name_of)
            if isinstance(item, ReasoningItem) and not item.thoughts:
                continue
            calls |= {call.id for call in message.tool_calls or ()}
        if (
            message.role == "assistant"
            and len(messages) > first
            and messages[-1].role == "assistant"
        ):
            message = joined(messages.pop(), message)
        message.place = f"input[{place}]"
        messages.append(message)
        if isinstance(item, FunctionCallItem) and item.output is not None:
            messages.append(_result(item, item.output))
    if not messages:
        raise ApiError("input: expected a message with text", param="input")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(f"the conversation has more than {MAX_MESSAGES} messages", param="input")
    return messages


def _result(item: FunctionCallItem | FunctionOutputItem, output: str) -> Message:
    return Message(role="tool", content=output, tool_call_id=item.call_id)


def _message(item: Any, name_of: Callable[[Place], str]) -> Message:
    if isinstance(item, FunctionCallItem):
        name = name_of(Place(item.namespace, item.name))
        return Message(role="assistant", tool_calls=[tool_call(item.call_id, name, item.arguments)])
    if isinstance(item, ReasoningItem):
        return Message(role="assistant", reasoning_content=item.thoughts or None)
    assert isinstance(item, Message)
    return item


def joined(first: Message, second: Message, between: str = "\n") -> Message:
    """Join two messages of one answer; `between` separates their texts."""
    contents = [text for text in (first.content, second.content) if text]
    thoughts = [text for text in (first.reasoning_content, second.reasoning_content) if text]
    return Message(
        role="assistant",
        content=between.join(contents),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=[*(first.tool_calls or ()), *(second.tool_calls or ())] or None,
    )


def item_id(part: Part, place: Place) -> str:
    return ("ctc_" if place.custom else _PREFIX[part.kind]) + part.id


def item_of(
    part: Part, place: Place, status: str, logprobs: list[dict[str, Any]], *, encrypted: bool
) -> dict[str, Any]:
    """Return the item of a part; an `in_progress` item has no content yet.

    `place` is the function's place, if the part is a call.
    """
    started = status == "in_progress"
    item: dict[str, Any] = {"id": item_id(part, place), "type": "message", "status": status}
    content = [] if started else [content_of(part, logprobs)]
    if part.kind is PartKind.CALL:
        call = {"call_id": part.call_id, "name": place.name}
        call |= {"namespace": place.namespace} if place.namespace else {}
        arguments = "" if started else part.text
        if place.custom:
            return {**item, "type": "custom_tool_call", **call, "input": custom_input(arguments)}
        return {**item, "type": "function_call", **call, "arguments": arguments}
    if part.kind is PartKind.TEXT:
        return {**item, "role": "assistant", "content": content}
    item |= {"type": "reasoning", "summary": [], "content": content}
    if encrypted and not started:
        item["encrypted_content"] = _OURS + base64.b64encode(part.text.encode()).decode()
    return item


def content_of(part: Part, logprobs: list[dict[str, Any]], text: str | None = None) -> Any:
    """Return the content of a part's item; a `text` replaces its own."""
    text = part.text if text is None else text
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
