"""Functions, their calls, and parsing those."""

import json
from typing import Any, NamedTuple

from paceline.tools.calls import Functions, Part, PartKind, PartStream, ToolCall
from paceline.tools.forms import HERMES, ToolForm

SCHEMAS: dict[str, dict[str, Any]] = {
    "trip": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "hour": {"$ref": "#/$defs/hour"},
            "by": {"enum": ["train", 'the "bus"', 3, None]},
            "stops": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
            "seats": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        },
        "required": ["hour", "by"],
        "additionalProperties": False,
        "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TRIP = ToolCall("trip", '{"city": "Linz", "hour": 7, "by": "train", "stops": ["a", "b"]}')
NOW = ToolCall("now", "{}")


class Parsed(NamedTuple):
    content: str
    calls: tuple[ToolCall, ...]


def parsed(answer: PartStream) -> Parsed:
    """The text of an answer, and its calls."""
    calls = (ToolCall(part.name, part.text) for part in answer.calls)
    return Parsed(answer.text(PartKind.TEXT), tuple(calls))


def parse_tool_calls(
    text: str, form: ToolForm = HERMES, functions: Functions | None = None, *, forced: bool = False
) -> Parsed:
    """The text and the calls of a whole answer."""
    answer = PartStream(form, functions, whole=True, forced=forced)
    answer.push(text, end=True)
    return parsed(answer)


def read(text: str, form: ToolForm, functions: dict[str, Any] = SCHEMAS) -> Parsed:
    """The calls of a whole text, with their arguments as `json.dumps` writes them."""
    return tidy(parse_tool_calls(text, form, functions))


def tidy(result: Parsed) -> Parsed:
    calls = (ToolCall(call.name, json.dumps(json.loads(call.arguments))) for call in result.calls)
    return Parsed(result.content, tuple(calls))


def same(call: ToolCall) -> ToolCall:
    return ToolCall(call.name, json.dumps(json.loads(call.arguments)))


def streamed(pieces: list[str], form: ToolForm, functions: dict[str, Any]) -> Parsed:
    """The calls of a text that comes in pieces."""
    stream = PartStream(form, functions)
    new = dict[Part, str]()
    for piece in pieces:
        changed = stream.push(piece)
        assert [part.opens for part in changed] == [part not in new for part in changed]
        new |= {part: new.get(part, "") + part.new for part in changed}
    new |= {part: new.get(part, "") + part.new for part in stream.push("", end=True)}
    assert [*new] == stream.parts
    assert [*new.values()] == [part.text for part in stream.parts]
    return parsed(stream)
