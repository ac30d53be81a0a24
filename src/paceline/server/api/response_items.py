"""The items of /v1/responses: converts input items to messages, and an answer's parts to items.

Also its tools: functions, custom tools, those in namespaces, and others. Independent of the model,
which calls each function by one name.

Invariants: an answer and its items become the same messages, so that a conversation continues
identically by `previous_response_id` and by sending its items; and names of functions are unique.
In the API, a call, a choice and an earlier call of a function in a namespace all have both `name`
and `namespace`.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter
from pydantic_core import from_json

from paceline.server.body import MAX_MESSAGES, Message
from paceline.server.errors import ApiError, field_error
from paceline.server.json_body import Body, Function, OneOf, OtherTool, Text, Tool, tool_call
from paceline.server.remembered import Reader
from paceline.tools.calls import Part, PartKind

_SHOWN_CHARACTERS = 80

_INPUT = "input"
_TEXT = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
"""The parameters of a custom tool."""

_PREFIX = {PartKind.REASONING: "rs_", PartKind.TEXT: "msg_", PartKind.CALL: "fc_"}
_OURS = "paceline:"
"""Prefix of our `encrypted_content`, unencrypted because it never leaves the user's machines."""


class FunctionTool(Function):
    """A function that the model may call, or a custom tool: for the model one with a string."""

    type: Literal["function", "custom"]
    format: dict[str, Any] | None = None
    """The grammar of a custom tool's input."""


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool, from the arguments of its call so far."""
    try:
        return str(from_json(arguments or "{}", allow_partial="trailing-strings").get(_INPUT, ""))
    except ValueError:  # half a surrogate pair
        return ""


class NamespaceTool(Body):
    """Functions of one source, as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str = ""
    tools: list[Annotated[Any, OneOf(FunctionTool, OtherTool)]] = Field(default=[])


ResponseTool = Annotated[Any, OneOf(FunctionTool, NamespaceTool, OtherTool)]


class ToolChoice(Body):
    """A function that the answer must call, or the functions that it may call."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: "list[ToolChoice]" = Field(default=[])


class Place(NamedTuple):
    """The place of a function in the API."""

    namespace: str | None
    name: str
    custom: bool = False
    """True for a custom tool."""


class OfferedTools:
    """The tools of a request as the model receives them."""

    def __init__(self, tools: Sequence[FunctionTool | NamespaceTool | OtherTool]) -> None:
        self.functions: dict[str, FunctionTool] = {}
        """The functions by the model's names."""
        self._places: dict[str, Place] = {}
        self.ignored: list[str] = []
        """Types and names of the ignored tools."""
        # Functions without a namespace come first: they keep their names.
        for tool in sorted(tools, key=lambda tool: isinstance(tool, NamespaceTool)):
            if not isinstance(tool, NamespaceTool):
                self._add(tool, None)
                continue
            about = tool.description  # once: it may be long
            for inner in tool.tools:
                self._add(inner, tool.name, about)
                about = about if isinstance(inner, OtherTool) else ""

    def _add(self, tool: FunctionTool | OtherTool, namespace: str | None, about: str = "") -> None:
        if isinstance(tool, OtherTool):
            of = f" of {namespace[:_SHOWN_CHARACTERS]}" if namespace else ""
            self.ignored.append(tool.about + of)
            return
        place = Place(namespace, tool.name, tool.type == "custom")
        name = self.name_of(place)
        while self._places.get(name, place) != place:
            name += "_"
        self._places[name] = place
        grammar = (tool.format or {}).get("definition") if place.custom else None
        lines = (about, tool.description, grammar and f"The input has this grammar:\n{grammar}")
        more = {"parameters": _TEXT} if place.custom else {}
        text = "\n".join(filter(None, lines))
        self.functions[name] = tool.model_copy(update={"name": name, "description": text, **more})

    def for_chat(self, names: Sequence[str]) -> list[Tool]:
        """Return functions in the format of a chat body."""
        return [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type", "format"})))
            for tool in (self.functions[name] for name in names)
        ]

    def name_of(self, place: Place) -> str:
        """Return the model's name of a function, which may no longer be offered."""
        for name, other in self._places.items():
            if other[:2] == place[:2]:
                return name
        return place.name if not place.namespace else f"{place.namespace.rstrip('_')}__{place.name}"

    def place_of(self, name: str) -> Place:
        return self._places.get(name, Place(None, name))

    def chosen(self, choice: ToolChoice) -> list[str]:
        """Return the functions that a choice names, where an unambiguous name suffices.

        Raises ApiError if there are none.
        """
        if choice.type == "namespace":
            return [name for name, place in self._places.items() if place.namespace == choice.name]
        names = [name for name, place in self._places.items() if place.name == choice.name]
        exact = [name for name in names if self._places[name].namespace == choice.namespace]
        if exact or (choice.namespace is None and len(names) == 1):
            return exact or names
        about = "/".join(filter(None, (choice.namespace, choice.name)))[:_SHOWN_CHARACTERS]
        raise ApiError(f"{about!r} is not a function in tools", param="tool_choice")


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
    Any, OneOf(Message, FunctionCallItem, FunctionOutputItem, ReasoningItem, ItemReference)
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
        raise field_error("input", "expected a message with text")
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
